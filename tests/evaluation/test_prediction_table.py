"""The table of predictions says of each image what the model says, and holds names of any kind."""

import csv
import io

import torch

from hf_vit.evaluation.prediction_table import image_names, prediction_table


def test_each_line_is_of_one_image_and_names_of_any_kind_come_back():
    names, files = ["red;bag", "=SUM(A1)", "猫\n"], ['a,b/"1".png', "", "../-x.jpg"]
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    text = prediction_table([4, 7, 9], files, torch.tensor([0, 2, 0]), logits, names)
    assert text.count("\n") == 4
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [line["row"] for line in lines] == ["4", "7", "9"]
    assert [line["file"] for line in lines] == files
    assert [line["label"] for line in lines] == ["red;bag", "猫\\n", "red;bag"]
    assert [line["predicted"] for line in lines] == ["red;bag", "'=SUM(A1)", "red;bag"]  # no formula of a spreadsheet
    assert [line["correct"] for line in lines] == ["true", "false", "true"]
    chances = logits.softmax(dim=1).max(dim=1).values.tolist()
    assert [line["confidence"] for line in lines] == [f"{chance:.6f}" for chance in chances]


def test_an_image_without_a_file_is_called_by_its_row():
    assert image_names([4, 7], ["cat/1.png", ""]) == ["cat/1.png", "row 7"]
