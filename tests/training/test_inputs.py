"""Claims about the images of a run before its first step."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from datasets import DatasetDict, List, concatenate_datasets, load_from_disk
from image_data import dataset

from hf_vit.training import inputs
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.classification import Classification
from hf_vit.training.plan import DataSize, resolve


@pytest.fixture
def read(tmp_path):
    """read(**flags) -> the RunData of 20 noisy images to train on and 5 to score, three of which are the same."""
    images = dataset([0, 1] * 12)
    scored = concatenate_datasets([images.select([3, 8, 11]), images.select([20, 21])])
    DatasetDict(train=images.select(range(20)), test=scored).save_to_disk(tmp_path / "data")
    sizes = "image_size=16,patch_size=8,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
    accelerator = SimpleNamespace(is_main_process=True, main_process_first=contextlib.nullcontext)

    def read(**flags):
        flags = {
            "dataset_name": str(tmp_path / "data"),
            "preset": "tiny-patch16-224",
            "config_overrides": sizes,
            "output_dir": str(tmp_path / "run"),
            **flags,
        }
        args = TrainArguments(**flags)
        return inputs.read_data(args, Classification(args), accelerator)[0]

    return read


def test_scored_images_that_are_trained_on_too_are_counted_in_one_line(read, capsys):
    assert read(crop="none").scored_duplicates == 3
    assert "3 of the 5 images to score" in capsys.readouterr().out


def test_images_that_are_not_in_memory_or_too_many_are_not_compared(read, monkeypatch):
    assert read(crop="resized", crop_scale=0.5).scored_duplicates is None
    monkeypatch.setattr(inputs, "MAX_PAIRS", 99)
    assert read(crop="none").scored_duplicates is None


def test_images_of_a_test_split_select_no_weights_and_those_held_out_do(read):
    assert not read(crop="none").selects_best
    assert read(crop="none", train_split="test", eval_fraction=0.4).selects_best


def test_a_part_of_a_photo_is_not_cropped_again(read):
    data = read(crop="resized", crop_scale=0.5)
    args = TrainArguments(
        "d", preset="tiny-patch16-224", output_dir="o", crop_scale=0.5, flip=False, per_device_train_batch_size=4
    )
    plan, task = resolve(args, DataSize(20, 5), 16), Classification(args)
    task.data = data
    batches = inputs.TrainBatches(SimpleNamespace(plan=plan, data=data, task=task, accelerator=None), 4, 1)
    rows = data.train_images.__getitems__([0, 1, 2, 3])
    assert torch.equal(batches.augmented(rows, 0, 0)[0], data.spec.normalize(rows["images"]))


def test_a_split_to_score_in_which_no_image_has_a_label_ends_the_run_before_it_trains(read, tmp_path):
    saved = load_from_disk(tmp_path / "data")
    kind = List(saved["train"].features["label"])
    lists = {split: [[label] if split == "train" else [] for label in rows["label"]] for split, rows in saved.items()}
    several = {
        split: rows.remove_columns("label").add_column("label", lists[split], feature=kind)
        for split, rows in saved.items()
    }
    DatasetDict(several).save_to_disk(tmp_path / "several")
    with pytest.raises(ValueError, match="none of the 5 images of test has a label"):
        read(crop="none", dataset_name=str(tmp_path / "several"))
