"""Claims about the plan of a run: what is chosen where flags leave it open, and what another run may not change."""

import pytest

from hf_vit.training.arguments import TrainArguments, parse_args
from hf_vit.training.plan import (
    EVALUATION_COST,
    DataSize,
    check_identity,
    default_batch_size,
    default_rates,
    resolve,
)


METHODS = {"full": {}, "lora": {"lora_rank": 8}, "probe": {"freeze_backbone": True}}
SCRATCH = {"preset": "tiny-patch16-224", "model_name_or_path": None}


def planned(images, evaluated=400, processes=1, checkpoint=None, fingerprint=None, **flags):
    args = TrainArguments(**{"dataset_name": "d", "output_dir": "o", "model_name_or_path": "m", **flags})
    return resolve(args, DataSize(images, evaluated), 768, processes, fingerprint, checkpoint)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("images", "batch", "steps"),
    [(30, 16, 150), (1000, 16, 620), (2500, 64, 390), (10**6, 64, 156_250)],
)
def test_batch_and_steps_of_fine_tuning_follow_from_the_number_of_images(method, images, batch, steps):
    plan = planned(images, **METHODS[method])
    assert (plan.images_per_step, plan.total_steps) == (batch, steps)


@pytest.mark.parametrize(("images", "epochs"), [(50, 100), (1000, 20), (10**6, 10)])
def test_from_scratch_20_000_images_are_shown_in_10_to_100_epochs_of_64(images, epochs):
    args = planned(images, **SCRATCH).args
    assert (args.num_train_epochs, args.per_device_train_batch_size) == (epochs, 64)
    assert (args.learning_rate, args.head_learning_rate, args.layer_decay) == (1e-3, None, 1.0)
    assert (args.crop_scale, planned(images).args.crop_scale) == (0.35, 0.64)


@pytest.mark.parametrize("method", METHODS)
def test_rates_fall_with_the_width_of_the_network_and_for_few_images(method):
    wide = [default_rates(method, 1000, width)[0] for width in (128, 384, 768, 1024)]
    assert wide == sorted(wide, reverse=True)
    assert wide[0] == pytest.approx(6 * wide[2], rel=0.05)
    few, some, *many = (default_rates(method, images, 768) for images in (10, 30, 100, 300, 10**6, None))
    assert few[0] <= some[0] <= many[0][0] < many[1][0] + 1e-9
    assert many[1] == many[2] == many[3]
    assert (some[0] < 0.2 * many[1][0]) == (method != "probe")
    assert {head_rate for _, head_rate, _ in (few, some, *many)} == {few[1]}


def test_what_is_given_wins():
    flags = dict(
        num_train_epochs=3.0, per_device_train_batch_size=5, learning_rate=2e-4, layer_decay=0.5, eval_epochs=2
    )
    plan = planned(54, **flags)
    assert {name: getattr(plan.args, name) for name in flags} == flags
    assert (plan.eval_every, plan.first_eval) == (20, 0)
    assert planned(54, eval_steps=3, eval_epochs=2).eval_every == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_that_is_given_is_that_of_all_layers_and_of_the_head(method):
    args = planned(54, **METHODS[method], learning_rate=2e-4).args
    assert (args.learning_rate, args.head_learning_rate, args.layer_decay) == (2e-4, None, 1.0)
    args = planned(54, layer_decay=0.9).args  # one of the others leaves the rates to the plan
    assert (args.learning_rate, args.head_learning_rate) == default_rates("full", 54, 768)[:2]


@pytest.mark.parametrize("evaluated", [40, 400, 2000])
@pytest.mark.parametrize("images", [54, 250, 2500, 10_000, 10**6])
@pytest.mark.parametrize("flags", [{}, SCRATCH, {"max_train_steps": 10_000}, {"freeze_backbone": True}])
def test_evaluation_takes_at_most_a_fifth_of_a_run_and_comes_after_its_first_epoch_and_its_last(
    images, evaluated, flags
):
    plan = planned(images, evaluated, **flags)
    steps = [step for step in range(plan.total_steps + 1) if plan.is_evaluation_step(step)]
    assert {min(plan.steps_per_epoch, plan.total_steps), plan.total_steps} <= {*steps}
    assert len(steps) <= 42
    trained = plan.total_steps * plan.images_per_step * (EVALUATION_COST if plan.args.freeze_backbone else 1)
    cost = EVALUATION_COST * evaluated * len(steps)
    assert len(steps) <= 2 or cost <= 0.2 * 1.01 * (cost + trained)


def test_a_stream_is_evaluated_by_steps():
    plan = planned(None, 400, streaming=True, max_train_steps=500)
    assert (plan.steps_per_epoch, plan.images_per_step) == (None, 64)
    assert 2 <= sum(map(plan.is_evaluation_step, range(501))) <= 42


def test_a_new_head_of_few_images_is_fitted_first():
    fitted = lambda images, **flags: planned(images, **flags).fit_head_first
    assert fitted(54)
    assert fitted(1000, lora_rank=8)
    assert not fitted(1001)
    assert not fitted(None, streaming=True, max_train_steps=9)
    assert not fitted(54, teacher_name_or_path="x")
    assert not fitted(54, freeze_backbone=True)
    assert not fitted(54, **SCRATCH)


def test_processes_share_the_images_of_a_step_and_a_resumed_run_keeps_them():
    for processes, batch in ((1, 16), (2, 8), (8, 2), (64, 2)):
        assert default_batch_size("full", 54, processes) == batch
    begun = planned(5000, **SCRATCH)
    assert planned(5000, processes=2, **SCRATCH).images_per_step == 128
    resumed = planned(5000, processes=2, checkpoint=begun.identity(), **SCRATCH)
    assert resumed.images_per_step == begun.images_per_step == 64
    check_identity(begun.identity(), resumed.identity(), "the checkpoint")


def test_only_what_does_not_decide_the_result_may_change():
    begun = planned(54, fingerprint={"classes": 3}).identity()
    mutable = dict(
        num_workers=7, checkpointing_steps=100, output_dir="runs/y", log_steps=3, on_bad_image="skip", compile="no",
        mixed_precision="no", per_device_train_batch_size=8, gradient_accumulation_steps=2,
    )  # fmt: skip
    check_identity(begun, planned(54, fingerprint={"classes": 3}, **mutable).identity(), "it")
    other = planned(54, fingerprint={"classes": 4}, label_smoothing=0.2, shots=3).identity()
    with pytest.raises(
        ValueError, match="classes was 3 and is 4; shots was None and is 3; label_smoothing was"
    ) as error:
        check_identity(begun, other, "it")
    assert "seed" not in str(error.value)


def test_config_yaml_names_the_plan_and_parses_to_the_same_run(tmp_path):
    plan = planned(54, learning_rate=3e-4, flip=False, overwrite=True)
    (tmp_path / "config.yaml").write_text(plan.to_yaml())
    again = parse_args(["--config", str(tmp_path / "config.yaml")])
    assert "# total_steps: 150\n" in plan.to_yaml()
    assert not again.overwrite  # consent to replace a folder is given once
    assert resolve(again, DataSize(54, 400), 768).identity() == plan.identity()
