"""Several labels an image, from the command that trains to the one that predicts, tested by running the real commands."""

import pandas as pd
import pytest
from runs import read_json, recipe, results_of
from transformers import AutoModelForImageClassification


TINY = (
    "image_size=[28,56],patch_size=7,hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,"
    "position_embedding=sincos2d,pooling=mean,use_class_token=false"
)


FLAGS = f"--config demo --dataset_name pairs --shots 20 --config_overrides {TINY} --max_train_steps 3 --output_dir run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of three steps on pairs of Fashion-MNIST images, beside the data."""
    home = tmp_path_factory.mktemp("pairs")
    recipe("data/make_fashion_pairs.py pairs", cwd=home)
    printed = recipe("train.py", FLAGS, cwd=home)
    assert "mean average precision on the validation images" in printed
    return home


def test_a_run_says_scores_and_thresholds_of_each_label(trained):
    results = results_of(trained / "run")
    assert {"mean_average_precision", "micro_f1", "macro_f1", "exact_match", "loss"} <= set(results["metrics"])
    config = read_json(trained / "run" / "model" / "config.json")
    assert config["problem_type"] == "multi_label_classification"
    assert config["thresholds"] == dict(zip(results["data"]["labels"], results["thresholds"], strict=True))
    figures = {file.stem for file in (trained / "run" / "model" / "figures").glob("*.png")}
    assert {"average_precision", "predictions", "mistakes", "attention"} <= figures
    assert "confusion" not in figures
    table = pd.read_csv(trained / "run" / "predictions.csv")
    assert list(table) == ["row", "file", "label", "predicted", "loss", "correct"]


def test_eval_repeats_the_scores_of_the_run(trained):
    recipe(
        "eval.py --model_name_or_path run --dataset_name pairs --output_file scores.json --num_workers 1", cwd=trained
    )
    scores, results = read_json(trained / "scores.json"), results_of(trained / "run")
    for name in ("mean_average_precision", "micro_f1", "exact_match"):
        assert scores[name] == pytest.approx(results["metrics"][name], abs=2e-3)


def test_predict_and_classify_give_the_labels_that_reach_their_thresholds(trained):
    flags = "--dataset_name pairs --split validation --output_file all.csv --top_k 0 --num_workers 1"
    recipe("predict.py --model_name_or_path run", flags, cwd=trained)
    thresholds = pd.Series(read_json(trained / "run" / "model" / "config.json")["thresholds"])
    table = pd.read_csv(trained / "all.csv", keep_default_na=False)
    assert len(table) == 1000
    margins = table[thresholds.index] - thresholds
    for margin, labels in zip(margins.to_dict("records"), table["labels"], strict=True):
        if min(map(abs, margin.values())) > 1e-5:  # else rounding decides
            assert {*filter(None, labels.split(";"))} == {name for name, value in margin.items() if value > 0}
    assert "example.png: " in recipe("classify.py run run/model/example.png", cwd=trained)


def test_publish_keeps_problem_type_and_thresholds_in_the_native_layout(trained):
    recipe("publish.py run --repo me/pairs --output_dir package", cwd=trained)
    model = AutoModelForImageClassification.from_pretrained(trained / "package")
    assert type(model).__module__.startswith("transformers.")
    assert model.config.problem_type == "multi_label_classification"
    assert set(model.config.thresholds) == set(model.config.id2label.values())
