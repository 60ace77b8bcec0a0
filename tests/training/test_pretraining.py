"""Claims about pretrain.py: what a run without labels learns, that it goes on as any run, and what its folder opens as."""

import json
import os
import shlex
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pretrain
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import ViTImageProcessorPil

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTForPreTraining, HFViTModel
from hf_vit.data.sampling import epoch_batches
from hf_vit.data.sources import load_splits
from hf_vit.evaluation.probes import knn_accuracy
from hf_vit.training.arguments import parse_args
from hf_vit.training.plan import DataSize, resolve
from hf_vit.training.pretrain_arguments import PretrainArguments
from hf_vit.training.pretraining import PreTraining, masking_noise
from hf_vit.training.train import train


HOUSE = Path(__file__).parents[2]
TINY = "image_size=16,patch_size=4,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
FLAGS = (
    "--preset", "tiny-patch16-224", "--config_overrides", TINY, "--per_device_train_batch_size", "8", "--max_train_steps", "6",
    "--log_steps", "1", "--eval_steps", "3", "--checkpointing_steps", "2",
    "--mixed_precision", "no", "--num_workers", "0",
)  # fmt: skip
PLAIN = (
    "--crop", "none", "--flip", "false", "--lr_scheduler_type", "constant", "--warmup_ratio", "0", "--max_grad_norm", "0",
    "--weight_decay", "0", "--learning_rate", "1e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Three classes of colour in `photos`, 16 PNG files each to train on and 6 to score; the same without folders in `flat`."""
    home = tmp_path_factory.mktemp("pretraining")
    (home / "flat").mkdir()
    rng = np.random.default_rng(0)
    for split, count in {"train": 16, "validation": 6}.items():
        for name, color in {"red": (150, 90, 90), "green": (90, 150, 90), "blue": (90, 90, 150)}.items():
            (home / "photos" / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(np.array(color) + rng.normal(0, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(home / "photos" / split / name / f"{index}.png")
                Image.fromarray(pixels).save(home / "flat" / f"{split}-{name}-{index}.png")
    return home


@pytest.fixture(scope="module")
def run(home):
    """run(name, *flags, data=) -> the folder of a finished run, trained in this process."""

    def pretrained(name, *flags, data="photos"):
        words = ["--dataset_name", home / data, "--output_dir", home / name, *FLAGS, *flags]
        if "--model_name_or_path" in flags:
            words = [word for word in words if word not in FLAGS[:4]]
        args = parse_args([*map(str, words)], kind=PretrainArguments)
        train(args, PreTraining, pretrain.draw)
        return home / name

    return pretrained


@pytest.fixture(scope="module")
def plain(run):
    return run("plain")


def lines_of(folder, key="loss"):
    """(step, value) of each line of metrics.jsonl that has the key."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def pixels_of(home, split="train"):
    """Normalised images (n, 3, 16, 16) in the order of the split, and their labels (n,)."""
    rows = load_splits(str(home / "photos"))[split]
    files = [item["path"] for item in rows["image"]]
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files])
    return (images / 255 - 0.5) / 0.5, torch.tensor(rows["label"])


def order_of(steps, count=48, size=8):
    """(epoch, ids) of each step."""
    per_epoch = count // size
    for step in range(steps):
        epoch = step // per_epoch
        yield epoch, torch.tensor(list(epoch_batches(count, size, 0, epoch))[step % per_epoch])


# ----------------------------------------------------------------------------------------------------------------------
# What is learned


def test_a_run_is_a_plain_loop_over_images_and_masks(run, home, tiny_config):
    start = HFViTForPreTraining(tiny_config(decoder_hidden_size=24, decoder_num_attention_heads=2))
    start.save_pretrained(home / "start")
    folder = run("loop", *PLAIN, "--model_name_or_path", home / "start", "--max_train_steps", "8")  # six an epoch
    model, (images, _), losses = start.train(), pixels_of(home), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0)
    for epoch, ids in order_of(8):
        loss = model(images[ids], noise=masking_noise(ids, 0, epoch, 16)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [value for _, value in lines_of(folder)] == pytest.approx(losses, rel=1e-5)
    saved = load_file(folder / "checkpoints" / "step-000008" / "model.safetensors")
    for name, weight in model.named_parameters():
        if "k_proj.bias" not in name:  # changes no answer: its gradient is rounding, which Adam makes a step of
            torch.testing.assert_close(saved[name], weight.detach(), rtol=1e-4, atol=1e-5)


def test_held_out_loss_and_neighbours_are_those_of_the_saved_model(plain, home):
    results = results_of(plain)
    (images, labels), (scored, truth) = pixels_of(home), pixels_of(home, "validation")
    with torch.no_grad():
        noise = masking_noise(torch.arange(18), 0, 0, 16)
        loss = HFViTForPreTraining.from_pretrained(plain / "model")(scored, noise=noise).loss
        encoder = HFViTModel.from_pretrained(plain / "model").eval()
        train, features = encoder(images).pooler_output, encoder(scored).pooler_output
    assert results["metrics"]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert results["metrics"]["knn_accuracy"] == pytest.approx(knn_accuracy(train, labels, features, truth))
    assert results["metrics_of"].startswith("validation, the best")
    assert [step for step, _ in lines_of(plain, "eval_loss")] == [3, 6]


def test_a_run_learns_and_its_neighbours_with_it(run):
    folder = run(
        "longer", "--max_train_steps", "80", "--eval_steps", "80", "--log_steps", "20", "--learning_rate", "3e-3"
    )
    losses = [value for _, value in lines_of(folder)]
    assert losses[-1] < 0.98 * losses[0]
    assert results_of(folder)["warnings"] == []
    assert lines_of(folder, "accuracy") == []


@pytest.fixture(scope="module")
def teacher(home, tiny_config, randomize):
    """A teacher with random weights, of 2 x 2 patches."""
    randomize(HFViTModel(tiny_config(patch_size=8, hidden_size=48, num_attention_heads=4))).save_pretrained(
        home / "teacher"
    )
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(home / "teacher")
    return home / "teacher"


def test_a_teachers_features_are_learned_as_by_a_plain_loop(run, home, teacher):
    flags = (*PLAIN, "--teacher_name_or_path", teacher, "--max_train_steps", "24")
    flags += ("--gradient_checkpointing", "true")
    folder = run("distilled", *flags)
    losses = [value for _, value in lines_of(folder)]
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])
    begun = load_file(folder / "checkpoints" / "step-000022" / "model.safetensors")
    (images, _), network = pixels_of(home), HFViTModel.from_pretrained(teacher).eval()
    student = HFViTModel(HFViTModel.from_pretrained(folder / "model").config)
    student.load_state_dict({name[4:]: value for name, value in begun.items() if name.startswith("vit.")})
    (*_, (_, ids)) = order_of(23)  # from the weights after 22 steps
    with torch.no_grad():
        whitened = lambda features: nn.functional.layer_norm(features, features.shape[-1:])
        seen, wanted = student(images[ids]), network(images[ids])
        project = lambda values, name: nn.functional.linear(values, begun[f"{name}.weight"], begun[f"{name}.bias"])
        of_pooled = (project(seen.pooler_output, "pooled_projection") - whitened(wanted.pooler_output)).square().mean()
        grid = whitened(wanted.last_hidden_state[:, 1:]).transpose(1, 2).unflatten(2, (2, 2))
        grid = nn.functional.interpolate(grid, (4, 4), mode="bilinear", antialias=True).flatten(2).transpose(1, 2)
        of_patches = (project(seen.last_hidden_state[:, 1:], "patch_projection") - grid).square().mean()
    assert losses[22] == pytest.approx((of_pooled + of_patches).item() / 2, rel=1e-4)
    assert json.loads((folder / "model" / "config.json").read_text())["architectures"] == ["HFViTModel"]
    assert not (folder / "model" / "figures" / "reconstructions.png").exists()


# ----------------------------------------------------------------------------------------------------------------------
# A run as any other


SLOWED = """
import time
from hf_vit.system import hardware
from hf_vit.training import inputs

hardware.use_all_cores = lambda: None  # threads that wait for each other starve on a busy machine
real = inputs.augment
inputs.augment = lambda *args, **kwargs: (time.sleep({seconds}), real(*args, **kwargs))[1]
"""


def start(home, name, seconds, *flags, **environment):
    """A process at work on a run, `seconds` slower each step."""
    line = [sys.executable, "-W", "ignore", "-c", SLOWED.format(seconds=seconds) + forked.THEN_THE_SCRIPT]
    line += [HOUSE / "recipes" / "pretrain.py", "--dataset_name", home / "photos", "--output_dir", home / name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **environment}
    return forked.Forked([*line, *FLAGS, *flags], env=environment, together=True)


def test_a_killed_run_goes_on_to_the_same_bits(plain, run, home):
    process, until = start(home, "killed", 0.4), time.monotonic() + 100
    while not (home / "killed" / "checkpoints" / "step-000002").exists():
        assert process.poll() is None, process.printed()
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (home / "killed" / "results.json").exists()
    run("killed")
    assert results_of(home / "killed")["resumed_at_steps"] == [2]
    for file in ("model/model.safetensors", "checkpoints/step-000006/optimizer.safetensors"):
        assert (home / "killed" / file).read_bytes() == (plain / file).read_bytes(), file
    for key in ("loss", "eval_loss", "eval_knn_accuracy"):
        assert lines_of(home / "killed", key) == lines_of(plain, key)


def test_a_picture_that_cannot_be_drawn_costs_no_run(run, monkeypatch, capsys):
    def fail(*_):
        raise IndexError("no such patch")

    monkeypatch.setattr(pretrain, "reconstruction_pictures", fail)
    folder = run("undrawn", "--max_train_steps", "1")
    assert "not all pictures could be drawn (IndexError: no such patch)" in capsys.readouterr().out
    assert results_of(folder)["steps"] == 1


def test_two_processes_train_as_one_does(plain, home):
    half = ("--per_device_train_batch_size", "4")
    processes = [start(home, "two", 0, *half, **rank) for rank in forked.group_of_two()]
    printed = [process.communicate(150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    for key in ("loss", "eval_loss"):
        assert dict(lines_of(home / "two", key)) == pytest.approx(dict(lines_of(plain, key)), rel=1e-4)
    alone, together = (load_file(folder / "model" / "model.safetensors") for folder in (plain, home / "two"))
    for name, weight in alone.items():
        if "k_proj.bias" not in name:  # changes no answer: its gradient is rounding, which Adam makes a step of
            torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-4)


def test_images_in_no_class_folders_are_learned_from_too(run, capsys):
    folder = run("unlabelled", data="flat")
    printed = capsys.readouterr().out
    assert "labels are left out, and with them the k-NN accuracy: " in printed
    assert "train: 59 images" in printed
    assert set(results_of(folder)["metrics"]) == {"loss", "step", "epoch"}
    assert results_of(folder)["data"]["labels"] == []


def test_a_stream_is_learned_from_and_its_neighbours_are_not_asked(run):
    folder = run("stream", "--streaming", "true")
    assert set(results_of(folder)["metrics"]) == {"loss", "step", "epoch"}
    assert len(lines_of(folder)) == 6


def test_a_folder_opens_as_every_model_and_has_a_card(plain, run, capsys):
    encoder = load_file(plain / "model" / "model.safetensors")["vit.layers.1.mlp.fc1.weight"]
    for kind in (HFViTForPreTraining, HFViTForImageClassification, HFViTBackbone, HFViTModel):
        state = kind.from_pretrained(plain / "model").state_dict()
        (found,) = [
            value
            for name, value in state.items()
            if name.endswith("layers.1.mlp.fc1.weight") and "decoder" not in name
        ]
        assert torch.equal(found, encoder)
    assert {file.name for file in (plain / "model" / "figures").iterdir()} == {"curves.png", "reconstructions.png"}
    card = (plain / "model" / "README.md").read_text()
    assert "does not see 75% of the patches" in card
    assert f"**{results_of(plain)['metrics']['loss']:.4f}**" in card
    run("plain")  # which is finished
    assert "finished" in capsys.readouterr().out


def test_a_run_ends_with_the_command_that_fine_tunes_its_model(run, capsys):
    folder = run("last", "--max_train_steps", "1")
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("next: "))
    assert words[1].endswith("recipes/train.py")
    args = parse_args(words[2:])
    assert (args.model_name_or_path, args.output_dir) == (str(folder / "model"), f"{folder}-finetuned")


# ----------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--mask_ratio", "0"], "16 of 16 patches"),
        (["--mask_ratio", "0.99"], "0 of 16 patches"),
        (["--config_overrides", "patch_dropout_rate=0.5"], "patch_dropout_rate=0.5"),
        (["--image_size", "18"], "image_size 18"),
        (["--label_column", "nowhere"], "--label_column nowhere"),
        (["--train_split", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_learned_is_one_sentence(run, flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        run("refused", *flags)


def test_a_teacher_whose_grid_has_another_shape_is_refused(run, home, tiny_config):
    HFViTModel(tiny_config(image_size=(16, 24))).save_pretrained(home / "wide")
    ViTImageProcessorPil(size={"height": 16, "width": 24}).save_pretrained(home / "wide")
    with pytest.raises(ValueError, match="has 4 x 6 patches and the student 4 x 4 patches"):
        run("refused", "--teacher_name_or_path", home / "wide")


def test_defaults_are_by_images_and_width_and_the_decoder_is_light(plain):
    args = parse_args(
        ["--dataset_name", "d", "--output_dir", "o", "--preset", "tiny-patch16-224"], kind=PretrainArguments
    )
    plan = resolve(args, DataSize(5000, 500), 128)
    assert (plan.args.learning_rate, plan.args.num_train_epochs, plan.args.layer_decay) == (1e-3, 100, 1)
    config = HFViTConfig.from_pretrained(plain / "model")
    decoder = (config.decoder_hidden_size, config.decoder_num_hidden_layers, config.decoder_num_attention_heads)
    assert decoder == (32, 1, 1)
