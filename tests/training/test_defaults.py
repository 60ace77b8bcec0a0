"""Claims about what a run chooses where its flags leave it open: length, batch size, rates and evaluations."""

import json
import math
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml

from hf_vit.data.sources import load_splits
from hf_vit.training.arguments import DERIVED, changed_arguments, parse_args, to_yaml
from hf_vit.training.defaults import (
    FEWEST_STEPS,
    default_batch_size,
    default_epochs,
    default_rates,
    describe_training,
    fill_crop_scale,
    fill_defaults,
    fits_head_first,
    keep_defaults,
)


HOUSE = Path(__file__).parents[2]
PRETRAINED = HOUSE / "model_cards" / "transfer" / "pretrained"
METHODS = {"full": [], "lora": ["--lora_rank", "8"], "probe": ["--freeze_backbone", "true"]}
SIZES = (10, 30, 54, 100, 1000, 2000, 5000, 20_000, 10**5, 10**6)


def asked(*flags, model=("--model_name_or_path", "m")):
    return parse_args(["--dataset_name", "d", "--output_dir", "o", *model, *flags])


def chosen(images, *flags, hidden_size=768, processes=1, **how):
    args = asked(*flags, **how)
    fill_crop_scale(args)
    fill_defaults(args, images, hidden_size, processes)
    return args


def steps_of(args, images, processes=1):
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    return max(1, round(args.num_train_epochs * max(1, images // per_step)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("images", "batch", "steps"),
    [(10, 16, 150), (30, 16, 150), (1000, 16, 620), (2500, 64, 390), (10**6, 64, 156_250)],
)
def test_batch_and_steps_of_fine_tuning_follow_from_the_number_of_images(method, images, batch, steps):
    args = chosen(images, *METHODS[method])
    assert (args.per_device_train_batch_size, steps_of(args, images)) == (batch, steps)


def test_a_larger_set_is_never_shown_fewer_images_nor_in_smaller_steps():
    batches = [default_batch_size("full", images) for images in range(1, 10_000)]
    shown = []
    for images, batch in enumerate(batches, 1):
        steps = default_epochs("full", images, batch) * max(1, images // batch)
        assert steps >= FEWEST_STEPS - 1e-6
        shown.append(steps * batch)
    assert batches == sorted(batches)
    assert all(later > 0.9 * max(shown[: i + 1]) for i, later in enumerate(shown))


@pytest.mark.parametrize(("images", "epochs"), [(50, 100), (200, 100), (1000, 20), (2000, 10), (10**6, 10)])
def test_from_scratch_20_000_images_are_shown_in_10_to_100_epochs_of_64(images, epochs):
    args = chosen(images, model=("--preset", "tiny-patch16-224"))
    assert (args.num_train_epochs, args.per_device_train_batch_size, args.eval_epochs) == (epochs, 64, 1)
    assert (args.learning_rate, args.head_learning_rate, args.layer_decay) == (1e-3, None, 1.0)
    assert (args.crop_scale, chosen(images).crop_scale) == (0.35, 0.64)


@pytest.mark.parametrize("method", METHODS)
def test_a_wider_network_learns_at_a_lower_rate(method):
    rates = [default_rates(method, 1000, width)[0] for width in (128, 384, 768, 1024)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(6 * rates[2], rel=0.05)


def test_few_images_move_the_backbone_less_and_the_head_as_much():
    for method in ("full", "lora"):
        rates = [default_rates(method, images, 768) for images in (10, 30, 100, 300, 10**6, None)]
        assert [rate for rate, *_ in rates] == sorted(rate for rate, *_ in rates)
        assert rates[1][0] == pytest.approx(0.178 * rates[4][0], rel=0.1)
        assert rates[3] == rates[4] == rates[5]
        assert len({head_rate for _, head_rate, _ in rates}) == 1
    assert default_rates("probe", 10, 768) == default_rates("probe", 10**6, 768)


def test_the_rates_of_a_vit_b_are_those_that_are_published():
    rate, head_rate, layer_decay = default_rates("full", 10**4, 768)
    assert 5e-5 <= rate <= 1e-4
    assert 0.65 <= layer_decay <= 0.75
    assert 1e-4 <= default_rates("lora", 10**4, 768)[0] <= 1e-3
    assert 1e-3 <= head_rate <= 2e-3


def test_processes_share_the_images_of_a_step_on_a_small_set():
    for processes, batch in ((1, 16), (2, 8), (8, 2), (64, 2)):
        assert default_batch_size("full", 54, processes) == batch
    assert default_batch_size("full", 10**6, 8) == 64
    assert default_batch_size("full", None) == 64


def test_what_is_given_wins():
    flags = {
        "num_train_epochs": 3.0, "per_device_train_batch_size": 5, "learning_rate": 2e-4, "head_learning_rate": 3e-3,
        "layer_decay": 0.5, "eval_epochs": 2, "loss": "binary_cross_entropy", "crop_scale": 0.2,
    }  # fmt: skip
    assert set(flags) == set(DERIVED)
    args = chosen(54, *(f"--{name}={value}" for name, value in flags.items()))
    assert {name: getattr(args, name) for name in flags} == flags


@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_that_is_given_is_that_of_all_layers_and_of_the_head(method):
    args = chosen(54, *METHODS[method], "--learning_rate", "2e-4")
    assert (args.learning_rate, args.head_learning_rate, args.layer_decay) == (2e-4, None, 1.0)


def test_one_of_the_rates_leaves_the_others_to_the_run():
    args = chosen(54, "--layer_decay", "0.9")
    assert (args.learning_rate, args.head_learning_rate) == default_rates("full", 54, 768)[:2]
    assert args.layer_decay == 0.9


def test_what_a_run_chose_or_an_older_version_for_it_is_kept_when_it_is_resumed():
    saved = yaml.safe_load(to_yaml(chosen(54)))
    older = {"learning_rate": 5e-5, "layer_decay": 1.0, "num_train_epochs": 10.0, "per_device_train_batch_size": 64}
    older = {**saved, **older, "eval_epochs": 1, "crop_scale": 0.35}
    del older["head_learning_rate"]
    for before in (saved, older):
        args = asked()
        assert changed_arguments(before, args) == []
        keep_defaults(args, before)
        fill_crop_scale(args)
        fill_defaults(args, 54, 768)
        assert yaml.safe_load(to_yaml(args)) == before
    assert changed_arguments(saved, asked("--learning_rate", "1e-3"))


def test_a_saved_choice_that_is_no_number_in_range_is_refused():
    for wrong in ("fast", -1.0, True):
        with pytest.raises(ValueError, match="learning_rate"):
            keep_defaults(asked(), {"learning_rate": wrong})


@pytest.mark.parametrize(
    ("images", "flags", "epochs_between"),
    [(54, [], 2), (1000, [], 1), (54, ["--num_train_epochs", "400"], 20), (1000, ["--max_train_steps", "10000"], 8)],
)
def test_a_run_is_scored_at_most_some_forty_times(images, flags, epochs_between):
    assert chosen(images, *flags).eval_epochs == epochs_between


def test_a_line_says_what_was_chosen():
    line = describe_training(chosen(54), 150, 16)
    assert line.startswith("fine-tuning: 150 steps of 16 images, learning rate ")
    assert "(layer decay 0.75), of the head " in line
    args = chosen(54, "--learning_rate", "1e-3", *METHODS["probe"])
    assert describe_training(args, 9, 8) == "the head alone: 9 steps of 8 images, learning rate 0.001"


def test_fine_tuning_30_images_by_default_is_no_worse_than_the_probe_where_ten_small_steps_are(tmp_path):
    """A checkpoint of CIFAR-10, images of clothes. Ten steps of 64 images at 5e-5 with a head of zeros were the old defaults."""
    splits = load_splits("fashion-mnist-mini")
    labels = np.asarray(splits["train"]["label"])
    rows = [row for label in range(10) for row in np.flatnonzero(labels == label)[:3]]
    (tmp_path / "data").mkdir()
    splits["train"].select(rows).to_parquet(tmp_path / "data" / "train.parquet")
    splits["test"].select(range(400)).to_parquet(tmp_path / "data" / "test.parquet")

    def accuracy_of(name, first="", **flags):
        """That of the last weights."""
        flags |= {"dataset_name": tmp_path / "data", "model_name_or_path": PRETRAINED, "output_dir": tmp_path / name}
        flags |= {"mixed_precision": "no", "eval_epochs": 10_000, "num_workers": 0}
        words = [f"--{flag}={value}" for flag, value in flags.items()]
        code = [sys.executable, "-W", "ignore", "-c", first + forked.THEN_THE_SCRIPT, HOUSE / "recipes" / "train.py"]
        forked.run([*code, *words], cwd=tmp_path, check=True)
        return json.loads((tmp_path / name / "results.json").read_text())["metrics"]["accuracy"]

    probe = accuracy_of("probe", freeze_backbone="true", cache_features="true")
    assert accuracy_of("default") >= probe
    of_old = {"learning_rate": 5e-5, "max_train_steps": 10, "per_device_train_batch_size": 64, "crop_scale": 0.35}
    noise = math.sqrt(probe * (1 - probe) / 400)  # one standard error
    no_head_first = "import hf_vit.training.defaults as defaults; defaults.HEAD_FIRST_IMAGES = 0\n"
    assert accuracy_of("of_old", no_head_first, **of_old) < probe - 2 * noise


def test_a_new_head_of_few_images_is_fitted_first():
    fitted = lambda images, *flags, **how: fits_head_first(chosen(images or 54, *flags, **how), images)
    assert fitted(54)
    assert fitted(1000, "--lora_rank", "8")
    assert not fitted(1001)
    assert not fitted(None)  # a stream
    assert not fitted(54, "--teacher_name_or_path", "x")
    assert not fitted(54, *METHODS["probe"])
    assert not fitted(54, model=("--preset", "tiny-patch16-224"))
