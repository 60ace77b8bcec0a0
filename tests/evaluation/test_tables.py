"""A table says of each image what the model says, and holds names of any kind."""

import io

import numpy as np
import pandas as pd
import torch
from torch import nn

from hf_vit.evaluation.tables import best_labels, prediction_columns, prediction_table


LABELS = ["cat", "=dog", "cat", "file"]


def test_each_line_is_of_one_image_and_names_of_any_kind_come_back():
    names, files = ["red;bag", "=SUM(A1)", "猫\n"], ['a,b/"1".png', "", "../-x.jpg"]
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    text = prediction_table([4, 7, 9], files, torch.tensor([0, 2, 0]), logits, names)
    table = pd.read_csv(io.StringIO(text), keep_default_na=False)
    assert table.drop(columns="confidence").to_dict("list") == {
        "row": [4, 7, 9],
        "file": files,
        "label": ["red;bag", "猫\\n", "red;bag"],
        "predicted": ["red;bag", "'=SUM(A1)", "red;bag"],  # no formula of a spreadsheet
        "correct": [True, False, True],
    }
    np.testing.assert_allclose(table["confidence"], logits.softmax(dim=1).amax(dim=1), atol=1e-6)


def test_several_labels_are_those_that_reach_their_thresholds():
    logits, labels = torch.tensor([[2.0, 1.0], [-1.0, -2.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    thresholds = torch.tensor([0.5, 0.7])
    losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)
    assert prediction_table([3, 4], ["a.png", ""], labels, logits, ["cat", "dog"], thresholds).splitlines() == [
        "row,file,label,predicted,loss,correct",
        f"3,a.png,cat;dog,cat;dog,{losses[0]:.6f},true",
        f"4,,dog,,{losses[1]:.6f},false",
    ]
    columns = prediction_columns(best_labels(logits, 1, thresholds), ["cat", "dog"], 1, True, "file")
    assert (columns["labels"], columns["label_1"]) == (["cat;dog", ""], ["cat", "cat"])
    np.testing.assert_allclose(columns["probability_1"], logits[:, 0].sigmoid())


def test_the_best_labels_come_first_and_all_of_them_sum_to_one():
    logits = torch.tensor([[0.0, 3.0, 1.0, -1.0], [2.0, 0.0, 0.0, 5.0]])
    wanted = logits.softmax(dim=1)
    columns = prediction_columns(best_labels(logits, 2), LABELS, 2, False, "file")
    assert list(columns) == ["label_1", "probability_1", "label_2", "probability_2"]
    assert (columns["label_1"], columns["label_2"]) == (["=dog", "file"], ["cat", "cat"])
    np.testing.assert_allclose(columns["probability_2"], wanted[[0, 1], [2, 0]])
    every = prediction_columns(best_labels(logits, 0), LABELS, 0, False, "file")
    assert list(every) == ["cat (0)", "=dog", "cat (2)", "file (3)"]
    np.testing.assert_allclose(list(every.values()), wanted.T)
    assert list(prediction_columns(best_labels(logits, 9), LABELS, 9, False, "row"))[-1] == "probability_4"
