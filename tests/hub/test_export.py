"""Claims about recipes/export.py: the exported files compute what torch computes, and the command leaves all or nothing."""

import runpy
import subprocess
import sys

import pytest
import runs
import torch
from runs import HOUSE, read_json, recipe, results_of, save_with_processor
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.data.sources import load_splits
from hf_vit.system.files import checksum


onnx = pytest.importorskip("onnx", reason="needs the extra `export`")
onnxruntime = pytest.importorskip("onnxruntime")
import export  # noqa: E402

from hf_vit.hub import export as exporting  # noqa: E402


FILES = ("onnx/model.onnx", "onnx/model_quantized.onnx", "model.pt2")
DIALECTS = {
    "class token, learned": dict(representation_size=24),
    "mean pool, sincos2d": dict(pooling="mean", use_class_token=False, position_embedding="sincos2d", num_channels=1),
    "registers, layer scale, gated": dict(
        num_register_tokens=4, layerscale_value=0.1, gated_mlp=True, hidden_act="silu", qk_norm=True
    ),
    "rotary": dict(position_embedding="rotary", num_register_tokens=2, pooling="mean"),
    "map pooling": dict(pooling="map", use_class_token=False, patch_projection="norm_linear_norm"),
}


@pytest.fixture(scope="module")
def exported(tiny_config, randomize, tmp_path_factory):
    """exported(dialect) -> (model, folder with model.onnx and model.pt2); each is made once."""
    made = {}

    def make(dialect):
        if dialect not in made:
            torch.manual_seed(0)
            config = tiny_config(num_hidden_layers=1, **DIALECTS[dialect])
            model = randomize(HFViTForImageClassification(config)).requires_grad_(False)
            folder = tmp_path_factory.mktemp("exported")
            program = exporting.trace(model)
            torch.export.save(program, folder / "model.pt2")
            exporting.to_onnx(program, model.config, folder / "model.onnx")
            made[dialect] = model, folder
        return made[dialect]

    return make


# ----------------------------------------------------------------------------------------------------------------------
# The files compute what the model computes


def difference(model, folder, images):
    """How far the logits of both files are from the model's."""
    computed = exporting.onnx_model(folder / "model.onnx"), exporting.torch_program(folder / "model.pt2")
    return max(exporting.logit_difference(model, one, [images])["relative"] for one in computed)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_onnx_and_program_give_torchs_logits(exported, pixels, dialect):
    model, folder = exported(dialect)
    for batch in (1, 3):
        assert difference(model, folder, pixels(batch, channels=model.config.num_channels)) < 1e-5


@pytest.mark.parametrize("size", [(16, 24), (8, 8)])
def test_without_a_table_of_positions_other_sizes_give_torchs_logits(exported, pixels, size):
    assert difference(*exported("rotary"), pixels(2, *size)) < 1e-5


def test_the_program_loads_with_torch_alone(exported, pixels, tmp_path):
    model, folder = exported("registers, layer scale, gated")
    images = pixels(5)
    torch.save(images, tmp_path / "images.pt")
    script = (
        "import sys, torch\n"
        f"logits = torch.export.load({str(folder / 'model.pt2')!r}).module()(torch.load('images.pt'))\n"
        "torch.save(logits, 'logits.pt')\n"
        "assert 'hf_vit' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(images).logits)


def test_the_onnx_file_is_whole_and_says_what_may_change(exported):
    model = onnx.load(exported("rotary")[1] / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    (pixel_values,), (logits,) = model.graph.input, model.graph.output
    assert (pixel_values.name, logits.name) == ("pixel_values", "logits")
    dimensions = [size.dim_param or size.dim_value for size in pixel_values.type.tensor_type.shape.dim]
    assert dimensions == ["batch", 3, "4*rows", "4*columns"]


def test_every_product_with_a_weight_is_int8_and_the_answers_stay_near(exported, pixels, tmp_path):
    model, folder = exported("class token, learned")
    exporting.quantize(folder / "model.onnx", tmp_path / "small.onnx")
    count = lambda file, kind: sum(node.op_type == kind for node in onnx.load(file).graph.node)
    dense = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert count(tmp_path / "small.onnx", "MatMulInteger") == dense
    images = pixels(4)
    expected = model(images).logits
    found = exporting.onnx_model(tmp_path / "small.onnx")(images)
    assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_weights_beyond_one_files_size_lie_beside_it(exported, pixels, tmp_path, monkeypatch):
    model, _ = exported("class token, learned")
    monkeypatch.setattr(exporting, "MAX_EMBEDDED_BYTES", 0)
    exporting.to_onnx(exporting.trace(model), model.config, tmp_path / "model.onnx")
    exporting.quantize(tmp_path / "model.onnx", tmp_path / "small.onnx")
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data", "small.onnx"}
    large = exporting.onnx_model(tmp_path / "model.onnx")
    assert exporting.logit_difference(model, large, [pixels(2)])["relative"] < 1e-5
    assert exporting.onnx_model(tmp_path / "small.onnx")(pixels(2)).shape == (2, 3)


def test_another_computation_is_refused(tiny_model, pixels):
    model = tiny_model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"1\.0e-03"):
        exporting.logit_difference(model, lambda images: model(images).logits * 1.001, [pixels(2)])


# ----------------------------------------------------------------------------------------------------------------------
# The command


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on a part of train, a fifth of it scored; it was exported by the real command."""
    folder = tmp_path_factory.mktemp("runs")
    rows = load_splits("fashion-mnist-mini")["train"].select(range(0, 10_000, 40))
    rows.to_parquet(folder / "some" / "train.parquet")
    runs.train(folder / "some", folder / "run", max_train_steps=2, eval_fraction=0.2, seed=3)
    recipe("export.py run", cwd=folder)
    return folder / "run"


def test_a_run_is_exported_and_scored_on_the_images_that_it_scored(run):
    report, results = read_json(run / "export" / "export.json"), results_of(run)
    assert {*files_of(run / "export")} == {*report["files"], "export.json"} == {*FILES, "export.json"}
    assert (report["data"]["split"], report["data"]["images"]) == ("part of train", results["data"]["scored_images"])
    full, quantized, program = (report["files"][name] for name in FILES)
    assert full["accuracy"] == results["metrics"]["accuracy"]  # the very same images
    assert full["interval"] == results["intervals"]["accuracy"]
    assert quantized["interval"][0] <= quantized["accuracy"] <= quantized["interval"][1]
    assert max(one["difference"]["relative"] for one in (full, program)) <= 1e-4
    assert report["weights_sha256"] == checksum(run / "model" / "model.safetensors")


def test_each_onnx_file_is_scored_by_its_own_answers(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.parent)
    truth = torch.arange(50) % 10
    logits = {"model.onnx": torch.eye(10)[truth], "model_quantized.onnx": torch.eye(10)[truth - 1]}
    monkeypatch.setattr(export, "predict", lambda file, _: (logits[file.name], truth))
    evaluated = export.rows_to_evaluate(export.parse_args([str(run)]), run)
    files = export.export(str(run / "model"), tmp_path, evaluated)["files"]
    assert [files[f"onnx/{name}"]["accuracy"] for name in logits] == [1, 0]


@pytest.fixture(scope="module")
def native(tiny_fields, randomize, tmp_path_factory):
    """A folder with a native ViT, and nothing of ours."""
    model = randomize(ViTForImageClassification(ViTConfig(**tiny_fields)))
    return save_with_processor(model, tmp_path_factory.mktemp("native") / "vit")


def test_an_earlier_export_is_replaced_as_a_whole_or_not_at_all(native, tmp_path, monkeypatch):
    """And a native model without data gives no int8 file."""
    (tmp_path / "out" / "onnx").mkdir(parents=True)
    for name in ("export.json", "onnx/model_quantized.onnx"):
        (tmp_path / "out" / name).write_text("earlier")
    args = export.parse_args([str(native), "--output_dir", str(tmp_path / "out")])
    before = files_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "MAX_DIFFERENCE", -1.0)
        with pytest.raises(ValueError, match="nothing is written"):
            export.main(args)
    assert files_of(tmp_path) == before
    export.main(args)
    assert {*files_of(tmp_path)} == {"out/export.json", "out/onnx/model.onnx", "out/model.pt2"}


def test_what_cannot_be_exported_or_would_be_lost_is_refused_in_one_line(native, tiny_config, tmp_path, monkeypatch):
    HFViTModel(tiny_config()).save_pretrained(tmp_path / "tower")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    before = files_of(tmp_path)
    for model, output, named in (
        (native, None, "--output_dir"),
        (tmp_path / "tower", "out", "classifier"),
        (native, "mine", "thesis.txt"),
        (native, "mine/thesis.txt", "thesis.txt"),
    ):
        flags = [] if output is None else ["--output_dir", str(tmp_path / output)]
        monkeypatch.setattr(sys, "argv", ["export.py", str(model), *flags])
        with pytest.raises(SystemExit, match=f"^error: [^\n]*{named}[^\n]*$"):  # Python makes a 1 of a text
            runpy.run_path(str(HOUSE / "recipes" / "export.py"), run_name="__main__")
        assert files_of(tmp_path) == before
