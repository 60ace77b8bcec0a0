"""Several labels an image, from the command that trains to the one that predicts, tested by running the real commands."""

import csv
import json

import pytest
from runs import recipe
from transformers import AutoModelForImageClassification


TINY = (
    "image_size=[28,56],patch_size=7,hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,"
    "position_embedding=sincos2d,pooling=mean,use_class_token=false"
)


FLAGS = (
    "--config", "demo", "--dataset_name", "pairs", "--shots", "20", "--config_overrides", TINY,
    "--max_train_steps", "3", "--output_dir", "run",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of three steps on pairs of Fashion-MNIST images, beside the data."""
    home = tmp_path_factory.mktemp("pairs")
    recipe("data/make_fashion_pairs.py", "pairs", cwd=home)
    printed = recipe("train.py", *FLAGS, cwd=home)
    assert "mean average precision on the validation images" in printed
    return home


def test_a_run_says_scores_and_thresholds_of_each_label(trained):
    results = json.loads((trained / "run" / "results.json").read_text())
    assert {"mean_average_precision", "micro_f1", "macro_f1", "exact_match", "loss"} <= set(results["metrics"])
    config = json.loads((trained / "run" / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["thresholds"] == dict(zip(results["data"]["labels"], results["thresholds"], strict=True))
    figures = {file.stem for file in (trained / "run" / "model" / "figures").glob("*.png")}
    assert {"average_precision", "predictions", "mistakes", "attention"} <= figures
    assert "confusion" not in figures
    with open(trained / "run" / "predictions.csv") as file:
        assert next(csv.reader(file)) == ["row", "file", "label", "predicted", "loss", "correct"]


def test_eval_repeats_the_scores_of_the_run(trained):
    flags = ["--model_name_or_path", "run", "--dataset_name", "pairs", "--output_file", "scores.json"]
    recipe("eval.py", *flags, "--num_workers", "1", cwd=trained)
    scores, results = (json.loads((trained / name).read_text()) for name in ("scores.json", "run/results.json"))
    for name in ("mean_average_precision", "micro_f1", "exact_match"):
        assert scores[name] == pytest.approx(results["metrics"][name], abs=2e-3)


def test_predict_and_classify_give_the_labels_that_reach_their_thresholds(trained):
    flags = [
        "--model_name_or_path",
        "run",
        "--dataset_name",
        "pairs",
        "--split",
        "validation",
        "--output_file",
        "all.csv",
    ]
    recipe("predict.py", *flags, "--top_k", "0", "--num_workers", "1", cwd=trained)
    thresholds = json.loads((trained / "run" / "model" / "config.json").read_text())["thresholds"]
    with open(trained / "all.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1000
    near = lambda row: any(abs(float(row[name]) - value) < 1e-5 for name, value in thresholds.items())
    for row in (row for row in rows if not near(row)):
        given = [name for name, value in thresholds.items() if float(row[name]) >= value]
        assert sorted(row["labels"].split(";")) == sorted(given) or (row["labels"], given) == ("", [])
    assert "example.png: " in recipe("classify.py", "run", "run/model/example.png", cwd=trained)


def test_publish_keeps_problem_type_and_thresholds_in_the_native_layout(trained):
    recipe("publish.py", "run", "--repo", "me/pairs", "--output_dir", "package", cwd=trained)
    model = AutoModelForImageClassification.from_pretrained(trained / "package")
    assert type(model).__module__.startswith("transformers.")
    assert model.config.problem_type == "multi_label_classification"
    assert set(model.config.thresholds) == set(model.config.id2label.values())
