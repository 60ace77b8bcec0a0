"""Claims about predictions and embeddings of many images: what a row holds, and what a stopped computation leaves and takes up."""

import csv
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hf_vit import HFViTForImageClassification
from hf_vit.data.image_spec import ImageSpec
from hf_vit.data.normalization import normalize
from hf_vit.evaluation import parts as parts_module
from hf_vit.evaluation.classifiers import model_digest
from hf_vit.evaluation.parts import Parts, compute_parts
from hf_vit.evaluation.prediction import BatchPredictor
from hf_vit.evaluation.result_files import (
    best_labels,
    check_output_file,
    embedding_columns,
    finish_output,
    prediction_columns,
    write_npy,
    write_table,
)


SPEC = ImageSpec(16, 16, 3, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
COUNT, BROKEN = 11, {2, 8, 9}  # rows; parts of four are whole, short of one, and short of all but one
ALONE = SimpleNamespace(
    is_main_process=True,
    process_index=0,
    num_processes=1,
    wait_for_everyone=lambda: None,
    print=lambda text: None,
    device=torch.device("cpu"),
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(parts_module, "ROWS", 4)


def load(batches):
    """Row i is an image of the number i."""
    for ids in batches:
        index = torch.tensor([row for row in ids if row not in BROKEN], dtype=torch.long)
        images = index.float().view(-1, 1, 1, 1) if len(index) else None
        yield {
            "images": images,
            "index": index,
            "errors": [f"row {row} is broken" for row in ids if row in BROKEN],
        }


def double(images):
    return {"embedding": 2 * images.flatten(1)}


def write(file, count, parts):
    write_npy(file, count, (part["embedding"] for part in parts.read()))


def embed(output, compute=double, accelerator=ALONE, overwrite=False, **signature):
    parts = Parts(output, COUNT)
    compute_parts(parts, load, compute, accelerator, 3, {"model": "one", **signature}, overwrite)
    return finish_output(parts, output, lambda file, count: write(file, count, parts))


def assert_whole(output):
    np.testing.assert_array_equal(np.load(output)[:, 0], [2 * row for row in range(COUNT) if row not in BROKEN])
    lines = output.with_name(f"{output.name}.unreadable.txt").read_text().splitlines()
    assert lines == [f"row {row} is broken" for row in sorted(BROKEN)]
    assert {file.name for file in output.parent.iterdir()} == {output.name, f"{output.name}.unreadable.txt"}


@pytest.mark.parametrize("batch", range(1, 6))
def test_wherever_it_is_stopped_nothing_comes_twice_or_is_missing(batch, tmp_path):
    seen = []

    def stopping(images):
        seen.append(images)
        if len(seen) == batch:
            raise KeyboardInterrupt
        return double(images)

    with pytest.raises(KeyboardInterrupt):
        embed(tmp_path / "all.npy", stopping)
    assert not (tmp_path / "all.npy").exists()
    before = len(seen)
    embed(tmp_path / "all.npy", lambda images: seen.append(images) or double(images))
    assert_whole(tmp_path / "all.npy")
    rows = [row for images in seen[before:] for row in images.flatten().tolist()]
    finished = {1: 0, 2: 0, 3: 4, 4: 4, 5: 8}[batch]  # batches of a part of four: three rows and one
    assert rows == [row for row in range(finished, COUNT) if row not in BROKEN]


def test_what_is_stopped_while_the_output_is_written_is_written_again(tmp_path):
    def stopped(file, count):
        file.write_text("half")
        raise KeyboardInterrupt

    parts = Parts(tmp_path / "all.npy", COUNT)
    compute_parts(parts, load, double, ALONE, 3, {"model": "one"})
    with pytest.raises(KeyboardInterrupt):
        finish_output(parts, tmp_path / "all.npy", stopped)
    assert not (tmp_path / "all.npy").exists()
    embed(tmp_path / "all.npy", compute=None)
    assert_whole(tmp_path / "all.npy")


def test_results_of_other_settings_are_not_mixed(tmp_path):
    (tmp_path / "all.npy.part").mkdir()
    parts = Parts(tmp_path / "all.npy", COUNT)
    parts.start({"model": "other", "layer": None}, overwrite=False)
    parts.write(range(0, 4), {"index": torch.arange(4), "embedding": torch.zeros(4, 1)}, [])
    with pytest.raises(ValueError, match="another model and another layer"):
        embed(tmp_path / "all.npy", layer=3)
    embed(tmp_path / "all.npy", layer=3, overwrite=True)
    assert_whole(tmp_path / "all.npy")


def test_results_belong_to_weights_config_and_image_processor(tiny_model):
    model, processor = tiny_model(), ViTImageProcessorPil()
    digests = [model_digest(model, processor), model_digest(model, ViTImageProcessorPil(image_mean=[0.4] * 3))]
    model.config.layer_norm_eps = 1e-3
    digests.append(model_digest(model, processor))
    model.classifier.bias.data += 1
    digests.append(model_digest(model, processor))
    assert len(set(digests)) == 4


def test_two_commands_do_not_share_an_output_file(tmp_path):
    Parts(tmp_path / "all.npy", COUNT).folder.mkdir()
    script = (
        "import fcntl, sys\n"
        f"file = open({str(tmp_path / 'all.npy.part' / 'lock')!r}, 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=r"all\.npy\.part"):
            embed(tmp_path / "all.npy")
        other.stdin.close()
    embed(tmp_path / "all.npy")
    assert_whole(tmp_path / "all.npy")


def test_images_that_are_all_broken_are_an_error_and_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BROKEN", set(range(COUNT)))
    with pytest.raises(ValueError, match="row 0 is broken"):
        embed(tmp_path / "all.npy")
    assert list(tmp_path.iterdir()) == []


def test_an_output_without_unreadable_images_takes_the_list_of_an_earlier_one_away(tmp_path, monkeypatch):
    embed(tmp_path / "all.npy")
    monkeypatch.setattr(sys.modules[__name__], "BROKEN", set())
    assert "cannot be read" not in embed(tmp_path / "all.npy", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["all.npy"]


LABELS = ["cat", "=dog", "cat", "file"]


def test_the_best_labels_come_first_and_all_of_them_sum_to_one():
    logits = torch.tensor([[0.0, 3.0, 1.0, -1.0], [2.0, 0.0, 0.0, 5.0]])
    wanted = logits.softmax(dim=1)
    columns = prediction_columns("file", ["a", "b"], best_labels(logits, 2), LABELS, 2)
    assert list(columns) == ["file", "label_1", "probability_1", "label_2", "probability_2"]
    assert (columns["label_1"], columns["label_2"]) == (["=dog", "file"], ["cat", "cat"])
    np.testing.assert_allclose(columns["probability_2"], [wanted[0, 2], wanted[1, 0]])
    every = prediction_columns("file", ["a", "b"], best_labels(logits, 0), LABELS, 0)
    assert list(every) == ["file", "cat (0)", "=dog", "cat (2)", "file (3)"]
    np.testing.assert_allclose(np.stack(list(every.values())[1:], axis=1), wanted)
    assert list(prediction_columns("row", [0, 1], best_labels(logits, 9), LABELS, 9))[-1] == "probability_4"
    torch.testing.assert_close(best_labels(logits, 0, torch.full((4,), 0.5))["probabilities"], logits.sigmoid())


def test_csv_and_parquet_hold_the_same_rows_and_csv_no_formula(tmp_path):
    logits = torch.randn(5, 4)
    names = ["a.jpg", "=cmd.jpg", "b, c.jpg", 'd".jpg', "é\n.jpg"]
    tables = [
        prediction_columns("file", names[part], best_labels(logits[part], 3), LABELS, 3)
        for part in (slice(0, 2), slice(2, 5))
    ]
    for suffix in ("csv", "parquet"):
        write_table(tmp_path / f"out.{suffix}", iter(tables))
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert found["file"].tolist() == names
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == list(found.columns)
    assert [row[0] for row in rows] == ["a.jpg", "'=cmd.jpg", "b, c.jpg", 'd".jpg', "é\\n.jpg"]
    assert [row[1].lstrip("'") for row in rows] == found["label_1"].tolist()
    assert {row[1] for row in rows} & {"=dog"} == set()
    np.testing.assert_allclose([float(row[2]) for row in rows], found["probability_1"], rtol=1e-5)


def test_parquet_and_npy_hold_the_same_embeddings(tmp_path):
    values = torch.randn(5, 6)
    parts = [values[:2], values[2:]]
    write_npy(tmp_path / "out.npy", 5, iter(parts))
    write_table(tmp_path / "out.parquet", (embedding_columns("row", list(range(len(part))), part) for part in parts))
    assert np.load(tmp_path / "out.npy").dtype == np.float32
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), values)
    np.testing.assert_array_equal(np.stack(pd.read_parquet(tmp_path / "out.parquet")["embedding"]), values)


def our_model(fields):
    from hf_vit import HFViTConfig

    model = HFViTForImageClassification(HFViTConfig(**fields, num_register_tokens=2))
    return model, model.vit.layers, lambda tokens: tokens[:, 3:].mean(dim=1)


def native_model(fields):
    model = ViTForImageClassification(ViTConfig(**fields))
    return model, model.vit.layers, lambda tokens: tokens[:, 1:].mean(dim=1)


def registers_model(fields):
    small = {name: fields[name] for name in fields if name != "intermediate_size"}
    model = Dinov2WithRegistersForImageClassification(
        Dinov2WithRegistersConfig(**small, mlp_ratio=2, num_register_tokens=2)
    )
    layers = next(module for name, module in model.named_modules() if name.endswith(("layer", "layers")))
    return model, layers, lambda tokens: tokens[:, 3:].mean(dim=1)


def hierarchical_model(fields):
    sizes = dict(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)
    model = SwinForImageClassification(SwinConfig(**sizes))
    return model, model.swin.encoder.layers, lambda tokens: tokens.mean(dim=1)


def convolutional_model(fields):
    model = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))
    return model, model.resnet.encoder.stages, lambda maps: maps.mean(dim=(2, 3))


@pytest.mark.parametrize(
    "make",
    [our_model, native_model, registers_model, hierarchical_model, convolutional_model],
    ids=lambda make: make.__name__,
)
def test_a_layers_embedding_is_the_mean_over_its_patches(make, tiny_fields):
    model, layers, mean = make(tiny_fields)
    outputs = []
    for layer in layers:
        layer.register_forward_hook(
            lambda _, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    accelerator = Accelerator(cpu=True)
    for number in (0, 1, -1):
        outputs.clear()
        with BatchPredictor(model, SPEC, accelerator, layer=number) as embed_batch:
            found = embed_batch(images)
        torch.testing.assert_close(found, mean(outputs[number]), check_stride=False)
    with (
        BatchPredictor(model, SPEC, accelerator, layer=2) as embed_batch,
        pytest.raises(ValueError, match="got 2"),
    ):
        embed_batch(images)


def test_a_convolutional_networks_features_are_what_its_head_reads():
    model, _, _ = convolutional_model({})
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    with BatchPredictor(model.train(), SPEC, Accelerator(cpu=True), features=True) as embed_batch:
        found = embed_batch(images)
    assert model.training
    assert found.shape == (3, 16)
    with torch.no_grad():
        logits = model.eval()(normalize(images, SPEC)).logits
        torch.testing.assert_close(model.classifier[1](found), logits)


@pytest.mark.parametrize("beside", ["", ".unreadable.txt", ".rows.csv"])
def test_a_file_that_would_be_replaced_is_named_first(tmp_path, beside):
    (tmp_path / f"out.npy{beside}").write_text("precious")
    with pytest.raises(ValueError, match=rf"out.npy{beside} exists"):
        check_output_file(str(tmp_path / "out.npy"), (".npy",), overwrite=False)
    assert check_output_file(str(tmp_path / "out.npy"), (".npy",), overwrite=True) == tmp_path / "out.npy"
