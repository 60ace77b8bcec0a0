"""Claims about recipes/predict.py, its labels and its embeddings, tested by running the real command."""

import os
import re
import shutil

import numpy as np
import pandas as pd
import predict
import pytest
import torch
from image_data import picture, pictures
from PIL import Image
from runs import HOUSE, recipe, save_with_processor
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from hf_vit import HFViTForImageClassification


EMBED = ["--output", "embeddings"]
TWO = f"-m accelerate.commands.launch --config_file {HOUSE}/recipes/accelerate/ddp.yaml --cpu --num_processes 2 --main_process_port 0"


def run(model, data, output, *flags, **how):
    """What the command prints; it takes no more than one process for images."""
    line = f"predict.py --model_name_or_path {model} --dataset_name {data} --output_file {output} --num_workers 1"
    return recipe(line, *flags, **how)


@pytest.fixture(scope="module")
def model(demo_run):
    """A run whose head tells images apart."""
    folder = demo_run.parent / "for-predictions"
    shutil.copytree(demo_run, folder)
    model = HFViTForImageClassification.from_pretrained(folder / "model")
    with torch.no_grad():
        model.classifier.weight.normal_(0, 2, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """100 images in nested folders, three of them broken."""
    folder = tmp_path_factory.mktemp("predict") / "photos"
    for place in "012":
        (folder / place).mkdir(parents=True)
    for number, image in enumerate(pictures(range(100))):
        file = folder / f"{number % 3}" / f"{number:04}.png"
        file.write_bytes(image if number not in (5, 60, 61) else image[:40])
    os.rename(folder / "0" / "0000.png", folder / "=0.png")
    return folder


@pytest.fixture(scope="module")
def predicted(model, photos):
    """The predictions of `photos`, what the command printed, and what it listed as unreadable."""
    printed = run(model, photos, "alone.parquet", cwd=photos.parent)
    listed = (photos.parent / "alone.parquet.unreadable.txt").read_text()
    return pd.read_parquet(photos.parent / "alone.parquet"), printed, listed


def by_hand(folder, file):
    """Probabilities (L,) of an image file, as the README has it, and the labels."""
    model = AutoModelForImageClassification.from_pretrained(folder / "model")
    inputs = AutoImageProcessor.from_pretrained(folder / "model")(Image.open(file), return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[0].softmax(dim=0), model.config.id2label


def test_a_row_is_an_image_and_says_what_the_model_says(model, photos, predicted):
    table, printed, listed = predicted
    broken = ["0/0060.png", "1/0061.png", "2/0005.png"]
    files = {str(file.relative_to(photos)) for file in photos.rglob("*.png")}
    assert table["file"].tolist() == sorted(files - {*broken})
    assert "97 images in" in printed
    assert re.findall(r"\((.*?)\) cannot be read", listed) == broken
    assert table["label_1"].nunique() > 1
    for _, row in table.iloc[[0, 1, 60, -1]].iterrows():
        probabilities, id2label = by_hand(model, photos / row["file"])
        best = probabilities.topk(5)
        assert row["label_1":"label_5":2].tolist() == [id2label[index] for index in best.indices.tolist()]
        np.testing.assert_allclose(row["probability_1"::2].tolist(), best.values, rtol=1e-4)
    assert list(table.columns)[-1] == "probability_5"


def test_two_processes_write_what_one_writes(model, photos, predicted, tmp_path):
    printed = run(model, photos, "two.parquet", cwd=tmp_path, launcher=TWO.split())
    assert printed.count("97 images in two.parquet") == 1
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "two.parquet"), predicted[0], rtol=1e-4)
    assert {file.name for file in tmp_path.iterdir()} == {"two.parquet", "two.parquet.unreadable.txt"}


def test_all_probabilities_are_a_column_each_and_a_model_needs_no_names(tmp_path, tiny_fields, randomize):
    (tmp_path / "photos").mkdir()
    picture(1).save(tmp_path / "photos" / "=1.png")
    save_with_processor(randomize(ViTForImageClassification(ViTConfig(**tiny_fields))), tmp_path / "model")
    run("model", "photos", "all.csv", "--top-k", "0", cwd=tmp_path)
    table = pd.read_csv(tmp_path / "all.csv", index_col="file")
    assert list(table) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert table.loc["'=1.png"].sum() == pytest.approx(1, abs=1e-4)


def test_embeddings_are_the_same_as_parquet_and_as_npy(model, photos, tmp_path):
    run(model, photos, "out.npy", *EMBED, cwd=tmp_path)
    run(model, photos, "out.parquet", *EMBED, cwd=tmp_path)
    table, array = pd.read_parquet(tmp_path / "out.parquet"), np.load(tmp_path / "out.npy")
    names = pd.read_csv(tmp_path / "out.npy.rows.csv")["file"]
    assert table["file"].tolist() == names.str.lstrip("'").tolist()
    assert array.shape == (97, 32)
    np.testing.assert_allclose(np.stack(table["embedding"]), array, atol=1e-5)
    head = HFViTForImageClassification.from_pretrained(model / "model").classifier
    for row in (1, -1):
        found = head(torch.from_numpy(array[row])).softmax(dim=0)
        torch.testing.assert_close(found, by_hand(model, photos / table["file"].iloc[row])[0], rtol=1e-3, atol=1e-5)


def start(folder, model, data, output, *flags):
    """The script's `main` in this process, for errors that come before anything is computed."""
    words = [
        f"--model_name_or_path={folder / model}",
        f"--dataset_name={folder / data}",
        f"--output_file={folder / output}",
    ]
    predict.main(predict.parse_args([*words, "--num_workers=0", *flags]))


def test_bad_input_is_an_error_that_names_it_and_nothing_is_written(model, photos, tmp_path):
    (tmp_path / "there.csv").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "1.jpg").write_text("nothing")
    (tmp_path / "new.npy.rows.csv").write_text("precious")
    for data, output, flags, named in (
        (photos, "new.npy", EMBED, "new.npy.rows.csv"),
        (photos, "there.csv", (), "there.csv"),
        (photos, "out.xlsx", (), "out.xlsx"),
        (photos, "out.csv", EMBED, "out.csv"),
        ("broken", "out.csv", (), "1.jpg"),
    ):
        with pytest.raises((ValueError, SystemExit), match=re.escape(named)):
            start(tmp_path, model, data, output, *flags)
        assert not (tmp_path / "out.csv").exists()


def test_a_checkpoint_without_a_head_has_no_predictions_but_embeddings(model, tmp_path):
    HFViTForImageClassification.from_pretrained(model / "model").vit.save_pretrained(tmp_path / "backbone")
    shutil.copy(model / "model" / "preprocessor_config.json", tmp_path / "backbone")
    (tmp_path / "few").mkdir()
    picture(1).save(tmp_path / "few" / "1.png")
    with pytest.raises(ValueError, match="classifier"):
        start(tmp_path, "backbone", "few", "out.csv")
    start(tmp_path, "backbone", "few", "out.npy", *EMBED)
    assert np.load(tmp_path / "out.npy").shape == (1, 32)
