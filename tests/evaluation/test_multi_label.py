"""Claims about several labels an image: the scores are scikit-learn's, and thresholds belong to their labels."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from transformers import AutoModelForImageClassification

from hf_vit import HFViTForImageClassification
from hf_vit.evaluation.intervals import intervals
from hf_vit.evaluation.multi_label import FEWEST_POSITIVES, MULTI_LABEL, check_task, choose_thresholds, thresholds_of
from hf_vit.evaluation.scores import classification_report, compute_metrics, headline


NAMES = ["cat", "dog", "owl", "yak"]


def scored(seed=0, count=200):
    """Random logits that know something of random labels; no image has the last one."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, 4, generator=generator) < torch.tensor([0.5, 0.2, 0.05, 0.0])).float()
    return 2 * labels - 1 + 1.5 * torch.randn(count, 4, generator=generator), labels


def test_each_score_of_several_labels_is_scikit_learns():
    logits, labels = scored()
    thresholds = torch.tensor([0.5, 0.4, 0.6, 0.5])
    metrics = compute_metrics(logits, labels, thresholds)
    probabilities, truth = logits.sigmoid().numpy(), labels.numpy().astype(int)
    given, present = (probabilities >= thresholds.numpy()).astype(int), [0, 1, 2]
    wanted = {
        "mean_average_precision": sklearn.average_precision_score(truth[:, present], probabilities[:, present]),
        "micro_f1": sklearn.f1_score(truth, given, average="micro"),
        "macro_f1": sklearn.f1_score(truth, given, average="macro", labels=present),
        "exact_match": sklearn.accuracy_score(truth, given),
        "loss": sklearn.log_loss(truth.ravel(), probabilities.ravel()),
    }
    assert metrics == pytest.approx(wanted, abs=1e-6)
    report = classification_report(logits, labels, NAMES, thresholds)
    precision, recall, f1, _ = sklearn.precision_recall_fscore_support(truth, given, average=None, zero_division=0)
    for name, values in (("precision", precision), ("recall", recall), ("f1", f1)):
        assert [row[name] or 0 for row in report["per_class"]] == pytest.approx(values)
    counts = sklearn.multilabel_confusion_matrix(truth, given)
    assert report["confusion_matrix"] == [[c[1, 1], c[0, 1], c[1, 0], c[0, 0]] for c in counts]
    for name, (low, high) in intervals(logits, labels, thresholds).items():
        assert 0 <= low < metrics[name] < high <= 1


def test_labels_that_no_image_has_are_counted_and_left_out_of_the_mean():
    logits, labels = scored()
    thresholds = torch.full((4,), 0.5)
    report = classification_report(logits, labels, NAMES, thresholds)
    *precisions, absent = (row["average_precision"] for row in report["per_class"])
    assert (report["labels_without_images"], absent) == (1, None)
    assert headline(compute_metrics(logits, labels, thresholds))[1] == pytest.approx(np.mean(precisions))
    with pytest.raises(ValueError, match="200 images"):
        compute_metrics(logits, torch.zeros(200, 4), thresholds)


def test_a_threshold_has_the_best_f1_and_is_a_half_where_too_few_images_have_the_label():
    logits, labels = scored()
    thresholds = choose_thresholds(logits, labels)
    assert labels[:, 3].sum() < FEWEST_POSITIVES
    assert thresholds[3] == 0.5
    f1 = lambda value, index: sklearn.f1_score(labels[:, index], logits[:, index].sigmoid() >= value)
    for index in (0, 1):
        best = max(f1(value, index) for value in logits[:, index].sigmoid())
        assert f1(thresholds[index], index) == pytest.approx(best)
        assert thresholds[index] not in logits[:, index].sigmoid()  # where rounding would decide


def test_a_threshold_of_a_rare_label_is_not_rounded_to_nothing():
    labels = torch.zeros(40, 1)
    labels[:6] = 1
    logits = torch.where(labels == 1, -15.0, -17.0)  # probabilities of 3e-7 and 4e-8
    (threshold,) = choose_thresholds(logits, labels).tolist()
    assert logits[6].sigmoid() < threshold < logits[0].sigmoid()
    assert classification_report(logits, labels, ["owl"], torch.tensor([threshold]))["thresholds"] == [threshold]


def test_thresholds_belong_to_the_labels_and_survive_saving_and_the_native_layout(tiny_model, tmp_path):
    model = tiny_model(num_labels=2, id2label={0: "cat", 1: "dog"}, problem_type=MULTI_LABEL)
    assert thresholds_of(model.config).tolist() == [0.5, 0.5]
    for wrong, named in (({"owl": 0.5}, "owl"), ({"cat": 7, "dog": 0.5}, "7")):
        model.config.thresholds = wrong
        with pytest.raises(ValueError, match=named):
            thresholds_of(model.config)
    model.config.thresholds = {"dog": 0.75, "cat": 0.25}
    model.save_pretrained(tmp_path / "ours")
    model.to_transformers().save_pretrained(tmp_path / "native")
    native = AutoModelForImageClassification.from_pretrained(tmp_path / "native")
    assert native.config.model_type == "vit"
    for loaded in (
        native,
        *map(HFViTForImageClassification.from_pretrained, (tmp_path / "ours", tmp_path / "native")),
    ):
        assert loaded.config.problem_type == MULTI_LABEL
        assert thresholds_of(loaded.config).tolist() == [0.25, 0.75]


def test_images_and_model_must_have_labels_of_one_kind():
    one, several, thresholds = torch.zeros(3), torch.zeros(3, 2), torch.zeros(2)
    check_task(one, None)
    check_task(several, thresholds)
    for labels, of_model in ((several, None), (one, thresholds)):
        with pytest.raises(ValueError, match="label"):
            check_task(labels, of_model)
