"""Claims about the end of a run: what it says of a bad result, and which command it names."""

import math
import subprocess
from types import SimpleNamespace

import pytest

from hf_vit.training.arguments import TrainArguments
from hf_vit.training.conclusion import closing_lines, find_faults, next_command, uninformed_loss


def results_of(accuracy, low, counts=(50, 30, 20)):
    per_class = [{"label": label, "images": count} for label, count in zip(("cat", "dog", "owl"), counts, strict=True)]
    return SimpleNamespace(
        metrics={"accuracy": accuracy},
        intervals={"accuracy": [low, 1.0]},
        per_class=per_class,
        data={"labels": ["cat", "dog", "owl"], "scored_images": sum(counts), "scored_duplicates": None},
        seconds={"report": 12.3},
        warnings=["Bad."],
    )


def log_of(*losses):
    return [*({"step": step, "loss": loss} for step, loss in enumerate(losses)), {"step": 9, "eval_accuracy": 0.1}]


GOOD = log_of(1.1, 0.9, 0.5)


def test_a_model_that_is_surely_better_than_one_answer_for_all_has_no_fault():
    assert find_faults(TrainArguments(), GOOD, results_of(0.8, 0.51)) == []


@pytest.mark.parametrize("accuracy", [0.5, 0.3])
def test_a_model_that_is_no_better_than_the_most_frequent_class_is_named_so(accuracy):
    (fault,) = find_faults(TrainArguments(), GOOD, results_of(accuracy, accuracy - 0.1))
    assert fault.startswith("No better than chance")
    assert "answering cat every time gives 50.00%" in fault


@pytest.mark.parametrize(("accuracy", "low", "counts"), [(1.0, 0.44, (2, 1, 0)), (0.6, 0.5, (50, 30, 20))])
def test_a_score_of_too_few_images_to_tell_it_from_chance_asks_for_more_of_them(accuracy, low, counts):
    (fault,) = find_faults(TrainArguments(), GOOD, results_of(accuracy, low, counts))
    assert "chance:" in fault
    assert "No better" not in fault
    assert "--eval_fraction" in fault


@pytest.mark.parametrize("last", [1.66, 300.0, math.inf, math.nan])
def test_a_loss_far_above_that_of_equal_probabilities_has_exploded(last):
    (fault,) = find_faults(TrainArguments(learning_rate=100.0), log_of(1.1, *[last] * 5), results_of(0.8, 0.7))
    assert fault.startswith("The training loss exploded: it is ")
    assert "1.1 for a model that knows nothing" in fault
    assert "smaller --learning_rate than 100" in fault


def test_a_loss_near_that_of_equal_probabilities_or_one_bad_batch_is_no_explosion():
    for losses in ((1.1, 1.1), (1.64,), (0.1, 0.1, 99.0), ()):
        assert find_faults(TrainArguments(learning_rate=1.0), log_of(*losses), results_of(0.8, 0.7)) == []


def test_several_labels_are_compared_with_a_random_order_of_the_images():
    results = results_of(0.5, 0.5)
    results.metrics, results.intervals = {"mean_average_precision": 0.5}, {"mean_average_precision": [0.34, 0.6]}
    args = TrainArguments(loss="binary_cross_entropy")
    assert find_faults(args, log_of(0.6), results) == []
    results.intervals = {"mean_average_precision": [0.33, 0.6]}
    (fault,) = find_faults(args, log_of(0.6), results)
    assert "a random order of the images gives 33.33%" in fault


def test_more_scored_duplicates_than_chance_may_add_are_a_fault():
    results = results_of(0.8, 0.7)
    results.data["scored_duplicates"] = 10
    assert find_faults(TrainArguments(), GOOD, results) == []
    results.data["scored_duplicates"] = 11
    (fault,) = find_faults(TrainArguments(), GOOD, results)
    assert fault.startswith(
        "Too good to be true: 11 of the 100 scored images look the same as an image that was trained on."
    )


def test_the_loss_of_a_model_that_knows_nothing_follows_from_the_kind_of_loss():
    assert uninformed_loss(TrainArguments(), 10) == math.log(10)
    assert uninformed_loss(TrainArguments(loss="binary_cross_entropy"), 10) == math.log(2)
    taught = TrainArguments(teacher_name_or_path="x", distillation_alpha=0.25, distillation_temperature=2.0)
    assert uninformed_loss(taught, 10) == pytest.approx((0.75 + 0.25 * 4) * math.log(10))


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """finished(image) -> a run with a model folder, whose first scored image is that file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my runs" / "x" / "model" / "figures").mkdir(parents=True)
    (tmp_path / "my photos").mkdir()

    def finished(image=None):
        rows = [{"image": {"bytes": None, "path": image}}]
        data = SimpleNamespace(eval_images=SimpleNamespace(rows=rows), scored="part of train")
        from pathlib import Path

        return SimpleNamespace(folder=Path("my runs/x"), args=TrainArguments(dataset_name="my photos"), data=data)

    return finished


def last_word(run, tmp_path):
    """The words of the command that the last line names, as a shell reads them."""
    script = tmp_path / "the scripts" / "train.py"
    script.parent.mkdir(exist_ok=True)
    for name in ("classify.py", "eval.py"):
        (script.parent / name).write_text("import sys; print(*sys.argv, sep='\\n')")
    lines = closing_lines(run, results_of(0.8, 0.7), str(script)).splitlines()
    assert lines[0] == "WARNING: Bad."
    assert (
        lines[1]
        == "accuracy on the held-out validation images: 80.00% (95% interval 70.00% to 100.00%); the model is in my runs/x/model"
    )
    assert (
        lines[2]
        == "its card is my runs/x/model/README.md, with 0 pictures in my runs/x/model/figures; 12 s to check and draw"
    )
    assert len(lines) == 4
    command = lines[3].removeprefix("next: ")
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_command_that_a_run_ends_with_classifies_an_image_of_the_data(finished, tmp_path):
    model = tmp_path / "my runs" / "x" / "model"
    (model / "example.png").touch()
    (tmp_path / "my photos" / "a cat.jpg").touch()
    script = "the scripts/classify.py"
    wanted = [script, "my runs/x/model", "my photos/a cat.jpg"]
    assert last_word(finished(str(tmp_path / "my photos" / "a cat.jpg")), tmp_path) == wanted
    assert last_word(finished("inside.parquet"), tmp_path) == [
        script,
        "my runs/x/model",
        "my runs/x/model/example.png",
    ]


def test_without_an_image_file_it_evaluates_the_data(finished, tmp_path):
    wanted = ["the scripts/eval.py", "--model_name_or_path", "my runs/x/model", "--dataset_name", "my photos"]
    assert last_word(finished(), tmp_path) == [*wanted, "--split", "train"]
    run = finished()
    run.data.scored = "validation"
    assert "--split" not in next_command(run, "train.py")
