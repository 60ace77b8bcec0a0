"""Claims about pretrain.py: what a run without labels learns, that it goes on as any run, and what its folder opens as."""

import os
import shlex
import shutil
import signal

import numpy as np
import pytest
import runs
import torch
from PIL import Image
from runs import TINY, log_of, logged, read_json, results_of, save_with_processor, write_photos
from safetensors.torch import load_file
from torch import nn

from hf_vit import HFViTBackbone, HFViTConfig, HFViTForImageClassification, HFViTForPreTraining, HFViTModel
from hf_vit.data.sampling import epoch_batches
from hf_vit.data.sources import load_splits
from hf_vit.evaluation.probes import knn_accuracy
from hf_vit.model.masked_autoencoder import random_masking
from hf_vit.training import checkpoints, pretraining
from hf_vit.training.arguments import parse_args
from hf_vit.training.optimizers import build_optimizers
from hf_vit.training.plan import DataSize, resolve
from hf_vit.training.pretrain_arguments import PretrainArguments
from hf_vit.training.pretraining import PreTraining, masking_noise


FLAGS = dict(
    per_device_train_batch_size=8, max_train_steps=6, log_steps=1, eval_steps=3, checkpointing_steps=2, mixed_precision="no",
)  # fmt: skip
PLAIN = dict(
    crop="none", flip=False, lr_scheduler_type="constant", warmup_ratio=0.0, max_grad_norm=0.0, weight_decay=0.0, learning_rate=1e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Three classes of colour in `photos`, 16 images each to train on and 6 to evaluate; the same without folders in `flat`."""
    home = tmp_path_factory.mktemp("pretraining")
    (home / "flat").mkdir()
    for file in write_photos(home / "photos", spread=40, train=16, validation=6).rglob("*.png"):
        shutil.copy(file, home / "flat" / "-".join(file.parts[-3:]))
    return home


@pytest.fixture(scope="module")
def run(home):
    """run(name, data=, task=, **flags) -> the folder of a finished run, trained in this process."""

    def pretrained(name, data="photos", task=PreTraining, **flags):
        runs.train(home / data, home / name, task, PretrainArguments, PreTraining.draw, **FLAGS | flags)
        return home / name

    return pretrained


@pytest.fixture(scope="module")
def plain(run):
    return run("plain")


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
    folder = run("loop", model_name_or_path=str(home / "start"), **PLAIN | dict(max_train_steps=8))  # six an epoch
    model, (images, _), losses = start.train(), pixels_of(home), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0)
    for epoch, ids in order_of(8):
        loss = model(images[ids], noise=masking_noise(ids, 0, epoch, 16)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(logged(folder, "loss").values()) == pytest.approx(losses, rel=1e-5)
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
    assert list(logged(plain, "eval_loss")) == [3, 6]


@pytest.fixture(scope="module")
def teacher(home, tiny_config, randomize):
    """A teacher with random weights, of 2 x 2 patches."""
    model = HFViTModel(tiny_config(patch_size=8, hidden_size=48, num_attention_heads=4))
    return save_with_processor(randomize(model), home / "teacher")


def test_a_teachers_features_are_learned_as_by_a_plain_loop(run, home, teacher, monkeypatch):
    monkeypatch.setattr(checkpoints, "KEPT", 99)
    flags = dict(max_train_steps=24, gradient_checkpointing=True, config_overrides=f"{TINY},num_register_tokens=1")
    folder = run("distilled", teacher_name_or_path=str(teacher), **PLAIN, **flags)
    losses = list(logged(folder, "loss").values())
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
        of_patches = (project(seen.last_hidden_state[:, 2:], "patch_projection") - grid).square().mean()
    assert losses[22] == pytest.approx((of_pooled + of_patches).item() / 2, rel=1e-4)
    assert read_json(folder / "model" / "config.json")["architectures"] == ["HFViTModel"]
    assert not (folder / "model" / "figures" / "reconstructions.png").exists()


# ----------------------------------------------------------------------------------------------------------------------
# A run as any other


class Stopped(PreTraining):
    def loss(self, model, batch):
        os.kill(os.getpid(), signal.SIGINT)
        return super().loss(model, batch)


def test_a_stopped_run_goes_on_to_the_same_bits(plain, run, home):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run("stopped", task=Stopped)
    run("stopped")
    assert results_of(home / "stopped")["resumed_at_steps"] == [1, 2]
    for file in ("model/model.safetensors", "checkpoints/step-000006/optimizer.safetensors"):
        assert (home / "stopped" / file).read_bytes() == (plain / file).read_bytes(), file
    assert log_of(home / "stopped") == log_of(plain)


def test_a_picture_that_cannot_be_drawn_costs_no_run(run, monkeypatch, capsys):
    def fail(*_):
        raise IndexError("no such patch")

    monkeypatch.setattr(pretraining, "reconstruction_pictures", fail)
    folder = run("undrawn", max_train_steps=1)
    assert "not all pictures could be drawn (IndexError: no such patch)" in capsys.readouterr().out
    assert results_of(folder)["steps"] == 1


def test_images_in_no_class_folders_are_learned_from_too(run, capsys):
    folder = run("unlabelled", data="flat")
    printed = capsys.readouterr().out
    assert "ignoring labels, and k-NN accuracy with them: " in printed
    assert "train: 59 images" in printed
    assert set(results_of(folder)["metrics"]) == {"loss", "step", "epoch"}
    assert results_of(folder)["data"]["labels"] == []


def test_a_folder_opens_as_every_model_and_has_a_card(plain, run, capsys):
    encoder = load_file(plain / "model" / "model.safetensors")["vit.layers.1.mlp.fc1.weight"]
    for kind in (HFViTForPreTraining, HFViTForImageClassification, HFViTBackbone, HFViTModel):
        state = kind.from_pretrained(plain / "model").state_dict()
        (name,) = (name for name in state if name.endswith("layers.1.mlp.fc1.weight") and "decoder" not in name)
        assert torch.equal(state[name], encoder)
    assert {file.name for file in (plain / "model" / "figures").iterdir()} == {"curves.png", "reconstructions.png"}
    card = (plain / "model" / "README.md").read_text()
    assert "does not see 75% of the patches" in card
    assert f"**{results_of(plain)['metrics']['loss']:.4f}**" in card
    run("plain")  # which is finished
    assert "finished" in capsys.readouterr().out


def test_a_run_ends_with_the_command_that_fine_tunes_its_model(run, capsys):
    folder = run("last", max_train_steps=1)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("next: "))
    assert words[1].endswith("recipes/train.py")
    args = parse_args(words[2:])
    assert (args.model_name_or_path, args.output_dir) == (str(folder / "model"), f"{folder}-finetuned")


# ----------------------------------------------------------------------------------------------------------------------
# Masks


def test_masks_are_a_function_of_seed_epoch_and_image_id():
    index, order = torch.arange(64), torch.randperm(64)
    noise = masking_noise(index, seed=1, epoch=2, num_patches=49)
    assert torch.equal(
        noise[order][:10], masking_noise(index[order][:10], 1, 2, 49)
    )  # whatever the batch and its order
    first, *others = (
        random_masking(each, 0.75)[1] == 0
        for each in (noise, masking_noise(index, 2, 2, 49), masking_noise(index, 1, 3, 49))
    )
    assert len({tuple(row) for row in first.tolist()}) == 64
    for mask in others:
        assert 0.2 < mask[first].float().mean() < 0.3  # as often as by chance


def test_muon_trains_the_matrices_of_the_decoders_layers_and_the_mask_token_does_not_decay(tiny_config):
    model = HFViTForPreTraining(
        tiny_config(decoder_hidden_size=24, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
    )
    adamw, muon = build_optimizers(model, "muon", 1e-3, 0.1, 0.95)
    names = [name for group in muon.param_groups for name in group["names"] if name.startswith("decoder.")]
    layer = "decoder.decoder_layers.0"
    assert {*names} == {
        *(f"{layer}.attention.{part}_proj.weight" for part in "qkvo"), f"{layer}.mlp.fc1.weight", f"{layer}.mlp.fc2.weight",
    }  # fmt: skip
    (group,) = (group for group in adamw.param_groups if "decoder.mask_token" in group["names"])
    assert (group["weight_decay"], group["lr_scale"]) == (0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (dict(mask_ratio=0.0), "16 of 16 patches"),
        (dict(mask_ratio=0.99), "0 of 16 patches"),
        (dict(config_overrides="patch_dropout_rate=0.5"), "patch_dropout_rate"),
        (dict(image_size=18), "image_size 18"),
    ],
)
def test_what_cannot_be_learned_is_one_sentence(run, flags, named):
    with pytest.raises(ValueError, match=named):
        run("refused", **flags)


def test_a_teacher_whose_grid_has_another_shape_is_refused(run, home, tiny_config):
    save_with_processor(HFViTModel(tiny_config(image_size=(16, 24))), home / "wide")
    with pytest.raises(ValueError, match="4 x 6 "):
        run("refused", teacher_name_or_path=str(home / "wide"))


def test_defaults_are_by_images_and_the_decoder_is_light(plain):
    flags = ["--dataset_name", "d", "--output_dir", "o", "--preset", "tiny-patch16-224"]
    args = resolve(parse_args(flags, kind=PretrainArguments), DataSize(5000, 500), 128).args
    assert (args.learning_rate, args.num_train_epochs, args.layer_decay) == (1e-3, 100, 1)
    config = HFViTConfig.from_pretrained(plain / "model")
    decoder = (config.decoder_hidden_size, config.decoder_num_hidden_layers, config.decoder_num_attention_heads)
    assert decoder == (32, 1, 1)
