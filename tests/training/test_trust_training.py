"""Claims about training that would go wrong without a word: half precision, NaN, labels, crops, what changed between two starts."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.data.decoding import decode_image
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_files import AllowedFiles, RestrictedImage
from hf_vit.data.image_spec import ImageSpec, image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import normalize
from hf_vit.data.sampling import epoch_batches, sequential_batches
from hf_vit.data.sources import load_splits
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_classifier, load_processor
from hf_vit.evaluation.prediction import LOGITS_TOLERANCE, logits_difference, predict
from hf_vit.evaluation.scores import compute_metrics
from hf_vit.formats.timm_processor import timm_processor
from hf_vit.system.errors import UserError
from hf_vit.system.files import checksum
from hf_vit.training import lives
from hf_vit.training.losses import Teacher, classification_loss, soft_targets
from hf_vit.training.model import add_lora, build_model, save_model
from hf_vit.training.optimizers import build_optimizers, is_finite


HOUSE = Path(__file__).parents[2]
TRAIN = HOUSE / "recipes" / "train.py"
FORM = ImageSpec(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3)
NAMES = ["eel", "cat", "dog"]


@pytest.fixture
def saved(tiny_model, tmp_path):
    """saved(**overrides) -> a folder with a tiny model, its labels NAMES."""

    def save(dtype=torch.float32, **overrides):
        model = tiny_model(id2label=dict(enumerate(NAMES)), num_labels=3, **overrides).to(dtype)
        model.save_pretrained(tmp_path / "saved")
        side = model.config.image_size
        ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return save


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


# ----------------------------------------------------------------------------------------------------------------------
# Half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checkpoint_of_any_precision_is_trained_in_float32(saved, dtype):
    folder = saved(dtype)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    model, _ = build_model(NAMES, str(folder), None, None, {})
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    (optimizer,) = build_optimizers(model, "adamw", 5e-5, 0.0, (0.9, 0.999))
    before = [weight.detach().clone() for weight in model.parameters()]
    for _ in range(20):
        model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.randint(3, (4,))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [(new != old).float().mean().item() for new, old in zip(model.parameters(), before, strict=True)]
    assert np.mean(moved) > 0.95


def test_another_type_for_the_weights_is_refused(saved):
    with pytest.raises(ValueError, match="dtype cannot be chosen, weights are trained in float32; --mixed_precision"):
        build_model(NAMES, str(saved()), None, None, {"dtype": "bfloat16"})


# PEFT reads a name that transformers calls deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("lora_save", ["merged", "adapter"])
def test_lora_on_a_half_precision_base_is_merged_in_float32(saved, tmp_path, lora_save, pixels):
    model, _ = build_model(NAMES, str(saved(torch.bfloat16)), None, None, {})
    model = add_lora(model, 4, 8.0, 0.0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=1e-2)
    save_model(model, tmp_path / "out", lora_save)
    images = pixels(4)
    wanted = model.eval()(images).logits
    loaded = load_classifier(str(tmp_path / "out"), dtype=torch.float32)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.eval()(images).logits, wanted, rtol=0, atol=1e-5)


def test_a_teacher_in_half_precision_answers_in_float32(saved, pixels):
    teacher = Teacher(str(saved(torch.bfloat16)), NAMES, FORM, torch.device("cpu"))
    assert teacher(pixels(2)).dtype == torch.float32


def test_a_saved_model_that_was_rounded_is_told_from_the_one_that_was_scored(tiny_model):
    model, accelerator = tiny_model(), Accelerator(cpu=True)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        scored = model((images / 255 - 0.5) / 0.5).logits
    assert logits_difference(model, images, scored, FORM, accelerator) <= 1e-5
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    assert logits_difference(model, images, scored, FORM, accelerator) > LOGITS_TOLERANCE["no"]


# ----------------------------------------------------------------------------------------------------------------------
# NaN


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_no_score(value):
    logits = torch.eye(3)
    logits[1, 2] = value
    with pytest.raises(
        ValueError, match="NaN or infinity for 1 of 3 images, which cannot be scored: try --mixed_preci"
    ):
        compute_metrics(logits, torch.arange(3))


@pytest.mark.parametrize("features", [False, True])
def test_predictions_that_are_not_finite_name_the_split_and_how_many(tiny_model, features):
    model = tiny_model()
    batch = {"images": torch.zeros(3, 3, 16, 16, dtype=torch.uint8), "index": torch.arange(3)}
    model.vit.layernorm.bias.data[0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinity for 3 of 3 images of validation, which cannot be scored"):
        predict(model, [batch], FORM, Accelerator(cpu=True), 3, features, split="validation")


@pytest.fixture
def poisoned(saved):
    """A model folder with one NaN in the middle of a tensor of more than 2^14 numbers, where loading does not look."""
    folder = saved(hidden_size=64, intermediate_size=512)
    tensors = load_file(folder / "model.safetensors")
    name = "vit.layers.0.mlp.fc1.weight"
    assert tensors[name].numel() > 2**14
    tensors[name].view(-1)[tensors[name].numel() // 2] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_a_nan_in_the_middle_of_a_tensor_is_found_before_training_and_scoring(poisoned):
    for load in (load_classifier, lambda folder: build_model(NAMES, folder, None, None, {})):
        with pytest.raises(UserError, match=r"vit\.layers\.0\.mlp\.fc1\.weight"):
            load(poisoned)


# ----------------------------------------------------------------------------------------------------------------------
# Labels, folders, adapters


def test_the_head_of_a_checkpoint_is_kept_by_the_ids_of_its_labels(saved):
    folder = saved()
    head = load_file(folder / "model.safetensors")["classifier.weight"]
    change_config(folder, id2label={"2": "dog", "0": "eel", "1": "cat"})  # as before, in another order
    kept, _ = build_model(NAMES, str(folder), None, None, {})
    assert torch.equal(kept.classifier.weight, head)
    assert list(HFViTConfig.from_pretrained(folder).id2label.values()) == NAMES
    change_config(folder, id2label={"1": "eel", "0": "cat", "2": "dog"})  # the order of NAMES, of other rows
    reset, _ = build_model(NAMES, str(folder), None, None, {})
    assert not reset.classifier.weight.any()


def test_a_classifier_of_another_library_has_its_labels_by_id_too(tmp_path):
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path)
    change_config(tmp_path, id2label={"1": "dog", "0": "cat"})
    assert list(load_classifier(str(tmp_path)).config.id2label.values()) == ["cat", "dog"]


@pytest.mark.parametrize(
    "id2label",
    [{"0": "a", "2": "b"}, {"-1": "a", "0": "b"}, {"1": "a", "2": "b"}, {"x": "a", "0": "b"}, {1: "a", "1": "b"}],
    ids=["a gap", "negative", "from one", "no number", "twice"],
)
def test_ids_that_are_no_rows_of_a_head_are_one_sentence(id2label):
    with pytest.raises(ValueError, match=r"id2label has the ids .*; wanted each of 0 to 1 once, for the 2 rows"):
        HFViTConfig(id2label=id2label)


def test_two_classes_of_one_name_keep_no_head(saved):
    folder = saved()
    change_config(folder, id2label={"0": "cat", "1": "cat", "2": "dog"})
    reset, _ = build_model(["cat", "dog", "eel"], str(folder), None, None, {})
    assert not reset.classifier.weight.any()


def test_a_relative_folder_loads_as_an_absolute_one(saved, monkeypatch):
    folder = saved()
    (folder / "inside").mkdir()
    wanted = load_file(folder / "model.safetensors")["classifier.weight"]
    for place, name in (
        (folder, "."), (folder, "./"), (folder / "inside", ".."), (folder.parent, "saved"), (folder.parent, "./saved/"),
        (folder.parent, "saved/../saved"), (folder / "inside", "../inside/.."),
    ):  # fmt: skip
        monkeypatch.chdir(place)
        assert torch.equal(HFViTForImageClassification.from_pretrained(name).classifier.weight, wanted)


def test_an_index_that_leads_out_of_a_relative_folder_is_refused(saved, monkeypatch):
    folder = saved()
    shutil.move(folder / "model.safetensors", folder.parent / "secret.safetensors")
    names = load_file(folder.parent / "secret.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "../secret.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="outside"):
        HFViTForImageClassification.from_pretrained(".")


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"base_model_name_or_path": null}', '{"base_model_name_or_path": 3}']
)
def test_an_adapter_without_a_base_is_one_sentence(saved, content):
    folder = saved()
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text(content)
    for load in (load_classifier, HFViTForImageClassification.from_pretrained):
        with pytest.raises(ValueError, match="base_model_name_or_path"):
            load(str(folder))


# ----------------------------------------------------------------------------------------------------------------------
# timm's crops


def scored_by_timm(image, side, part, mode, resample):
    """What `transforms_imagenet_eval` of timm 1.0.31 (data/transforms_factory.py) makes of an image, by Pillow: torchvision's
    `Resize` on an int gives the longer side as int(size * long / short), its `CenterCrop` starts at round((rest) / 2)."""
    resized = math.floor(side / part)
    width, height = image.size
    if mode == "squash":
        image = image.resize((resized, resized), resample)
    else:
        short = min(width, height)
        image = image.resize((int(resized * width / short), int(resized * height / short)), resample)
    left, top = (round((rest - side) / 2) for rest in image.size)
    return np.asarray(image.crop((left, top, left + side, top + side)))


CASES = [
    (224, 0.875, "center", "bicubic"), (224, 0.9, "center", "bicubic"), (224, 1.0, "center", "bilinear"),
    (32, 0.95, "center", "lanczos"), (384, 1.0, "squash", "bicubic"), (224, 0.9, "squash", "bicubic"),
]  # fmt: skip


@pytest.mark.parametrize(("side", "part", "mode", "interpolation"), CASES)
def test_a_timm_repo_is_scored_on_what_timm_shows_it(side, part, mode, interpolation, tmp_path):
    cfg = {"input_size": [3, side, side], "crop_pct": part, "crop_mode": mode, "interpolation": interpolation}
    cfg |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": cfg}))
    form = image_spec_of(load_processor(str(tmp_path)), HFViTConfig())
    assert form.processor is None
    rng, resample = np.random.default_rng(0), Image.Resampling[interpolation.upper()]
    compared = 0
    for size in ((500, 375), (375, 500), (300, 300), (400, 301), (90, 130)):
        image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).resize(size)
        wanted = scored_by_timm(image, side, part, mode, resample)
        resized = math.floor(side / part)
        longer = int(resized * max(size) / min(size)) if mode == "center" else resized
        if {(rest - side) % 4 for rest in (resized, longer)} & {3}:
            continue  # torchvision rounds half a pixel to even, image processors down
        file = tmp_path / "image.png"
        image.save(file)
        item = {"bytes": file.read_bytes(), "path": None}
        np.testing.assert_array_equal(decode_image(item, form), wanted)
        compared += 1
    assert compared >= 2


def test_what_a_timm_repo_leaves_out_is_timms_own_default():
    processor = timm_processor({"crop_pct": 0.875}, "repo")
    assert (dict(processor.size), dict(processor.crop_size)) == ({"shortest_edge": 256}, {"height": 224, "width": 224})
    assert list(processor.image_mean) == [0.485, 0.456, 0.406]
    assert int(processor.resample) == Image.Resampling.BICUBIC


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        ({"crop_mode": "border", "crop_pct": 1.0}, "crop_mode 'border'"),
        ({"crop_mode": "center", "crop_pct": 0.9, "input_size": [3, 32, 48]}, "crop_mode 'center' for 32x48 pixels"),
        ({"crop_pct": 0}, "crop_pct 0"),
        ({"crop_pct": "0.9"}, "crop_pct '0.9'"),
        ({"interpolation": "random"}, "interpolation 'random'"),
    ],
)
def test_a_timm_repo_that_cannot_be_followed_is_refused_in_a_sentence(cfg, said):
    with pytest.raises(ValueError, match=said) as error:
        timm_processor(cfg, "timm/some_model")
    assert "pretrained_cfg of timm/some_model asks for" in str(error.value)


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs


TINY = "patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,image_size=28"
FLAGS = [
    "--dataset_name", "photos", "--preset", "tiny-patch16-224", "--config_overrides", TINY, "--max_train_steps", "6",
    "--per_device_train_batch_size", "4", "--checkpointing_steps", "2", "--eval_steps", "6", "--checkpoints_total_limit", "9",
]  # fmt: skip
ALONE = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def started(cwd, before, *argv, **environment):
    """A process that runs some code, and then the script that `argv` names, if any."""
    line = [sys.executable, "-W", "ignore", "-c", before + forked.THEN_THE_SCRIPT, *argv]
    return forked.Forked(line, cwd, {**os.environ, **ALONE, **environment}, together=True)


def ended(processes, codes):
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == codes, "\n----\n".join(printed)
    return printed


def train(cwd, *flags, before="", code=0):
    return ended([started(cwd, before, TRAIN, *FLAGS, "--num_workers", "0", *flags)], [code])[0]


@pytest.fixture
def photos(tmp_path):
    """A working directory with photos/ in it: two classes of colour, 8 images each to train on, 4 to score."""
    rng = np.random.default_rng(0)
    for split, count in {"train": 8, "validation": 4}.items():
        for name, color in {"red": (150, 90, 90), "blue": (90, 90, 150)}.items():
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(np.array(color) + rng.normal(0, 60, (28, 28, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{index}.png")
    return tmp_path


def cut_off(run, step):
    """Leave of a finished run what a kill after the checkpoint of this step would have left."""
    for name in ("results.json", "confusion_matrix.csv", "samples.safetensors"):
        (run / name).unlink()
    for place in [run / "model", run / "last", *run.glob("checkpoints/*-*")]:
        if "-" not in place.name or int(place.name.partition("-")[2]) > step:
            shutil.rmtree(place, ignore_errors=True)


def results_of(run):
    return json.loads((run / "results.json").read_text())


SAVED_IN_BF16 = """
from hf_vit.training import model as module
save = module.save_model
def save_rounded(model, folder, lora_save):
    rounded = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(rounded)
    save(model, folder, lora_save)
    model.load_state_dict(kept)
module.save_model = save_rounded
"""


def test_a_run_warns_if_its_saved_model_does_not_give_the_logits_that_were_scored(photos):
    printed = train(photos, "--output_dir", "run", "--learning_rate", "3e-3", before=SAVED_IN_BF16)
    assert "does not give the logits that were scored: they differ by" in printed
    assert "at most 0.001 was expected" in printed
    assert results_of(photos / "run")["saved_logits_apart"] > 1e-3


@pytest.fixture(scope="module")
def clothes():
    """51 embedded images of each of ten classes to train on, and 2,000 to score, as `prepare_splits` gives them."""
    return prepare_splits(load_splits("fashion-mnist-mini"), train_split="train", shots=51, seed=0)


def fine_tuned(checkpoint, splits, labels, seed, steps=60):
    """Accuracy of a checkpoint after some steps of AdamW at 1e-4, on images of 16 pixels, which take a quarter of the time."""
    torch.manual_seed(seed)
    model, processor = build_model(labels, str(checkpoint), None, 16, {})
    form = image_spec_of(processor, model.config)
    images, scored = (ImageDataset(splits[name], form) for name in ("train", "eval"))
    (optimizer,) = build_optimizers(model, "adamw", 1e-4, 0.05, (0.9, 0.999))
    batches = (ids for epoch in range(steps) for ids in epoch_batches(len(images), 32, seed, epoch))
    for _, ids in zip(range(steps), batches, strict=False):
        batch = images.__getitems__(ids)
        logits = model.train()(normalize(batch["images"], form).to(model.dtype)).logits
        classification_loss(logits, soft_targets(batch["labels"], len(labels), 0.1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = data_loader(scored, sequential_batches(len(scored), 500), 0)
    logits, rows = predict(model.float(), batches, form, Accelerator(cpu=True), len(scored))
    return compute_metrics(logits, scored.labels[rows])["accuracy"]


@pytest.mark.slow
def test_a_checkpoint_is_fine_tuned_as_well_from_half_precision(tmp_path, clothes):
    """The pre-trained model of model_cards/transfer, stored in three precisions; three seeds each. pytest -s prints what they
    reach. The noise is that of the start, which is rounded: seeds, images and order are the same."""
    splits, labels, _ = clothes
    accuracies = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        shutil.copytree(HOUSE / "model_cards" / "transfer" / "pretrained", tmp_path / name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        stored = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        save_file(stored, tmp_path / name / "model.safetensors", {"format": "pt"})
        change_config(tmp_path / name, dtype=name)
        accuracies[name] = [fine_tuned(tmp_path / name, splits, labels, seed) for seed in range(3)]
        print(name, accuracies[name], flush=True)
    for name in ("bfloat16", "float16"):
        assert np.mean(accuracies[name]) == pytest.approx(np.mean(accuracies["float32"]), abs=0.01), accuracies


# On a CPU, Accelerate leaves the loss scaler of fp16 out.
GRADIENTS_OF_NAN = """
import torch
from accelerate import Accelerator
make, backward = Accelerator.__init__, Accelerator.backward
def with_scaler(self, *args, **how):
    make(self, *args, **how)
    self.scaler, self.native_amp = torch.amp.GradScaler("cpu", init_scale=2.0**{power}), True
def spoiled(self, loss, **how):
    backward(self, loss, **how)
    for optimizer in self._optimizers:
        optimizer.param_groups[0]["params"][0].grad.fill_(float("nan"))
Accelerator.__init__, Accelerator.backward = with_scaler, spoiled
"""


def test_gradients_that_stay_nan_in_fp16_are_no_matter_of_scale_and_stop_the_run(photos):
    flags = ["--output_dir", "run", "--mixed_precision", "fp16", "--max_skipped_steps", "1"]
    on_cpu = "from hf_vit.system import hardware\nhardware.pick_precision = lambda asked, device_type: asked\n"
    printed = train(photos, *flags, before=on_cpu + GRADIENTS_OF_NAN.format(power=3), code=1)
    assert "step 4 is skipped" in printed  # 8, 4, 2 are scales to come down from
    assert "error: the loss or its gradient was not finite in step 5, and before in 4:" in printed


def test_an_overflow_in_fp16_is_excused_only_while_the_loss_is_scaled_up():
    for loss, norm, scale, wanted in (
        (1.0, 1.0, 1.0, True), (1.0, math.inf, 2.0, True), (1.0, math.nan, 1.0, False), (1.0, math.inf, 0.5, False),
        (math.nan, 1.0, 65536.0, False),
    ):  # fmt: skip
        assert bool(is_finite(torch.tensor(loss), torch.tensor(norm), scale)) is wanted


# ----------------------------------------------------------------------------------------------------------------------
# What changed between two starts


OTHER_CODE = """
from hf_vit.training import lives
real = lives.environment_info
def other(*args):
    found = real(*args)
    return {**found, "commit": "0123abc", "versions": {**found["versions"], "torch": "9.9"}}
lives.environment_info = other
"""


def test_a_resumed_run_names_what_changed_and_keeps_each_start(photos, saved):
    teacher = photos / "teacher"
    shutil.copytree(saved(image_size=28, patch_size=7), teacher)
    change_config(
        teacher, id2label={"0": "red", "1": "blue", "2": "green"}, label2id={"red": 0, "blue": 1, "green": 2}
    )
    flags = ["--output_dir", "run", "--teacher_name_or_path", "teacher"]
    assert "WARNING" not in train(photos, *flags)
    run = photos / "run"
    (first,) = results_of(run)["lives"]
    assert (first["from_step"], set(first["images"])) == (0, {"train", "eval"})
    assert {"torch", "transformers", "accelerate", "datasets", "numpy", "Pillow", "python"} <= set(first["versions"])

    cut_off(run, 4)
    tensors = load_file(teacher / "model.safetensors")
    save_file(
        {name: tensor * 1.1 for name, tensor in tensors.items()}, teacher / "model.safetensors", {"format": "pt"}
    )
    Image.new("RGB", (28, 28)).save(photos / "photos" / "train" / "red" / "3.png")
    printed = train(photos, *flags, before=OTHER_CODE)
    said = [line for line in printed.splitlines() if line.startswith("WARNING: ")]
    assert len(said) == 4, printed
    for part in (
        f"the code of hf_vit was {first['commit']} and is 0123abc: the run goes on",
        f"torch was {first['versions']['torch']} and is 9.9: the run goes on",
        "the teacher has other weights: the run goes on",
        "images of the split train have other contents: the run goes on",
    ):
        assert part in printed
    lives_of_run = results_of(run)["lives"]
    assert lives_of_run[0] == first
    assert [(life["from_step"], life["versions"]["torch"]) for life in lives_of_run[1:]] == [(4, "9.9")]


def test_a_checkpoint_of_a_version_without_lives_is_gone_on_with(photos):
    train(photos, "--output_dir", "run")
    run = photos / "run"
    wanted = load_file(run / "model" / "model.safetensors")
    cut_off(run, 4)
    folder = run / "checkpoints" / "step-000004"
    state = json.loads((folder / "state.json").read_text())
    del state["lives"]
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    size, sha256 = (folder / "state.json").stat().st_size, checksum(folder / "state.json")
    manifest["files"]["state.json"] = {"bytes": size, "sha256": sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "WARNING" not in train(photos, "--output_dir", "run")
    assert [life["from_step"] for life in results_of(run)["lives"]] == [4]
    found = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_checksum_of_images_sees_contents_and_order_and_not_where_files_lie(tmp_path):
    class Rows(list):
        features = {"image": RestrictedImage(decode=False, files=AllowedFiles(str(tmp_path)))}

        def __getitems__(self, places):
            return [{"image": self[place]} for place in places]

    contents = [bytes([number]) * 9 for number in range(5)]
    inside = [{"bytes": content, "path": None} for content in contents]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    outside = [{"bytes": None, "path": str(tmp_path / str(number))} for number in range(5)]
    wanted = lives.checksum_of_images(Rows(inside))
    assert lives.checksum_of_images(Rows(outside)) == wanted
    assert lives.checksum_of_images(Rows(inside[::-1])) != wanted
    assert lives.checksum_of_images(Rows([*inside[:4], {"bytes": b"other", "path": None}])) != wanted
    (tmp_path / "2").unlink()
    assert lives.checksum_of_images(Rows(outside)) != wanted


# ----------------------------------------------------------------------------------------------------------------------
# One of several processes


PAIR = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from hf_vit.system.errors import UserError
from hf_vit.training.distributed import POLL_SECONDS, exit_with_error, leave_together, set_timeout, watch_for_failures
dist.init_process_group("gloo")
rank, over = dist.get_rank(), watch_for_failures()
"""


def pair(tmp_path, code, codes):
    return ended([started(tmp_path, PAIR + code, **rank) for rank in forked.group_of_two()], codes)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_ends_one_that_does_not_listen_and_its_reason_is_told(tmp_path, failing):
    code = f"""
if rank == {failing}:
    exit_with_error(UserError("the disk is full"))
time.sleep(600)
"""
    printed = pair(tmp_path, code, [1, 1])
    assert "error: the disk is full" in printed[failing]
    told = "stopped, because process 1 failed: the disk is full" if failing == 1 else ""
    assert told in printed[0]
    assert "error" not in printed[1 - failing]


def test_the_process_that_failed_prints_its_traceback_though_it_watches_too(tmp_path):
    code = """
import hf_vit.training.distributed as distributed
def slow(*error):
    time.sleep(3 * POLL_SECONDS)  # the watcher has looked meanwhile
    print("its traceback")
distributed.traceback.print_exception = slow
if rank == 0:
    exit_with_error(RuntimeError("out of memory"))
time.sleep(600)
"""
    first, second = pair(tmp_path, code, [1, 1])
    assert "its traceback" in first
    assert "stopped" not in first
    assert second == ""


def test_what_follows_from_the_first_failure_is_not_told(tmp_path):
    code = """
over.set()  # it does not look: its collective breaks instead
try:
    if rank == 1:
        raise RuntimeError("out of memory")
    dist.barrier()
except Exception as error:
    exit_with_error(error)
"""
    first, second = pair(tmp_path, code, [1, 1])
    assert "stopped, because process 1 failed: RuntimeError: out of memory" in first
    assert "Traceback" not in first
    assert "Traceback" in second


def test_processes_that_fail_alike_say_so_once(tmp_path):
    printed = pair(tmp_path, "exit_with_error(UserError('no such label'))", [1, 1])
    assert sum(text.count("error: no such label") for text in printed) == 1


def test_a_process_that_does_not_come_is_waited_for_no_longer_than_the_time_out(tmp_path):
    code = """
dist.barrier()
set_timeout(timedelta(seconds=3))
if rank == 1:
    time.sleep(600)
try:
    dist.barrier()
except RuntimeError as error:
    exit_with_error(error)
"""
    assert "Traceback" in pair(tmp_path, code, [1, 1])[0]


def test_processes_that_part_leave_without_an_error(tmp_path):
    code = """
from accelerate import PartialState
leave_together(PartialState(), over)
time.sleep(3 * POLL_SECONDS * rank)  # the store is gone by then
"""
    assert pair(tmp_path, code, [0, 0]) == ["", ""]


BROKEN = """
import importlib, os
module = importlib.import_module("hf_vit.data.augment")
augment, passes = module.augment, []
def broken(*args, **how):
    passes.append(None)
    if os.environ["RANK"] == "1" and len(passes) == 3:
        raise RuntimeError("one process is out of luck")
    return augment(*args, **how)
module.augment = broken
"""


def test_an_error_of_any_kind_in_any_process_ends_a_run_with_that_error(photos):
    flags = [*FLAGS, "--per_device_train_batch_size", "2", "--num_workers", "0", "--output_dir", "run"]
    printed = ended([started(photos, BROKEN, TRAIN, *flags, **rank) for rank in forked.group_of_two()], [1, 1])
    assert "stopped, because process 1 failed: RuntimeError: one process is out of luck" in printed[0]
    assert "Traceback" not in printed[0]
    assert "RuntimeError: one process is out of luck" in printed[1]
    train(photos, "--output_dir", "run")  # and the same command goes on
    assert results_of(photos / "run")["resumed_at_steps"] == [2]
