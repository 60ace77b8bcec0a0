"""Claims about the end of a run: what it says of a bad result, and which command it names."""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_vit.training.arguments import TrainArguments
from hf_vit.training.classification import Classification


def results_of(accuracy, low, counts=(50, 30, 20), name="accuracy"):
    return SimpleNamespace(
        metrics={name: accuracy},
        intervals={name: [low, 1.0]},
        per_class=[{"label": label, "images": count} for label, count in zip("abc", counts, strict=False)],
        data={"scored_images": sum(counts)},
        saved_logits_apart=0.0,
        mixed_precision="no",
    )


def task(multi_label=False, **flags):
    found = Classification(TrainArguments("photos", preset="tiny-patch16-224", output_dir="o", **flags))
    found.data = SimpleNamespace(labels=list("abc"), multi_label=multi_label, scored="part of train")
    found.teacher = flags.get("teacher_name_or_path")
    return found


def log_of(*losses):
    return [*({"step": step, "loss": loss} for step, loss in enumerate(losses)), {"step": 9, "eval_accuracy": 0.1}]


GOOD = log_of(1.1, 0.9, 0.5)


@pytest.mark.parametrize(
    ("results", "log", "named"),
    [
        (results_of(0.8, 0.51), GOOD, []),
        (results_of(0.5, 0.4), GOOD, ["50.00%", "--eval_fraction"]),
        (results_of(1.0, 0.44, (2, 1, 0)), GOOD, ["3 images", "--eval_fraction"]),
        *[
            (results_of(0.8, 0.7), log_of(1.1, *[last] * 5), ["diverged", "1.1 ", "--learning_rate"])
            for last in (1.66, math.inf, math.nan)
        ],
        *[(results_of(0.8, 0.7), log_of(*losses), []) for losses in ((1.1, 1.1), (1.64,), (0.1, 0.1, 99.0), ())],
    ],
)
def test_a_run_that_diverged_or_is_no_better_than_chance_says_so_and_what_to_do(results, log, named):
    faults = task().faults(results, log)
    assert len(faults) == bool(named)
    assert all(name in faults[0] for name in named)


def test_the_loss_of_a_model_that_knows_nothing_follows_from_the_kind_of_loss():
    diverged = lambda loss, **how: bool(task(**how).faults(results_of(0.8, 0.7), log_of(loss)))
    assert not diverged(1.6)
    name = dict(name="mean_average_precision")
    assert task(multi_label=True).faults(results_of(0.8, 0.7, **name), log_of(1.1))
    assert not diverged(9.0, teacher_name_or_path="x")  # whose part of the loss has no such bound
    assert diverged(math.nan, teacher_name_or_path="x")


@pytest.mark.parametrize("example", ["model/example.png", None])
def test_the_command_that_a_run_ends_with_classifies_an_image_or_evaluates(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my runs"
    (run / "model").mkdir(parents=True)
    if example:
        (run / example).touch()
    words = shlex.split(task().next_command(Path("my runs")))
    assert Path(words[1]).name == ("classify.py" if example else "eval.py")
    assert words[-1] == (f"my runs/{example}" if example else "photos")
