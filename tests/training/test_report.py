"""Claims about the end of a run: what it says of a bad result."""

import math
import shlex
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


SEVERAL = results_of(0.8, 0.7, name="mean_average_precision")


@pytest.mark.parametrize(
    ("kind", "results", "log", "named"),
    [
        ({}, results_of(0.8, 0.51), GOOD, []),
        ({}, results_of(0.5, 0.4), GOOD, ["50.00%", "--eval_fraction"]),
        ({}, results_of(1.0, 0.44, (2, 1, 0)), GOOD, ["3 images", "--eval_fraction"]),
        *[
            ({}, results_of(0.8, 0.7), log_of(1.1, *[last] * 5), ["diverged", "1.1 ", "--learning_rate"])
            for last in (1.66, math.inf, math.nan)
        ],
        *[({}, results_of(0.8, 0.7), log_of(*losses), []) for losses in ((1.1, 1.1), (1.64,), (0.1, 0.1, 99.0), ())],
        (dict(multi_label=True), SEVERAL, log_of(1.1), ["diverged"]),
        (dict(teacher_name_or_path="x"), results_of(0.8, 0.7), log_of(9.0), []),  # its part of the loss has no bound
        (dict(teacher_name_or_path="x"), results_of(0.8, 0.7), log_of(math.nan), ["diverged"]),
    ],
)
def test_a_run_that_diverged_or_is_no_better_than_chance_says_so_and_what_to_do(kind, results, log, named):
    faults = task(**kind).faults(results, log)
    assert len(faults) == bool(named)
    assert all(name in faults[0] for name in named)


def test_a_run_without_an_example_ends_with_the_command_that_evaluates(tmp_path):
    words = shlex.split(task().next_command(tmp_path))
    assert (words[1].rpartition("/")[2], words[-1]) == ("eval.py", "photos")
