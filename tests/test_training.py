"""Claims about parameter groups, schedule, precision, averages, scores and the building of a model."""

import math
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hf_vit import HFViTForImageClassification, data, training


@pytest.fixture
def model(tiny_config):
    return HFViTForImageClassification(tiny_config(layerscale_value=0.1, num_register_tokens=2))


def test_only_matrices_decay(model):
    """T15."""
    decayed, undecayed = training.split_decay(model)
    assert sorted(decayed + undecayed) == sorted(name for name, _ in model.named_parameters())
    kinds = {name.rpartition("layers.")[2].partition(".")[2] if "layers." in name else name for name in decayed}
    assert kinds == {
        "vit.embeddings.patch_embeddings.projection.weight",
        *(f"attention.{part}_proj.weight" for part in "qkvo"),
        "mlp.fc1.weight",
        "mlp.fc2.weight",
        "classifier.weight",
    }
    for name in ("cls_token", "register_tokens", "position_embeddings"):
        assert f"vit.embeddings.{name}" in undecayed
    assert {"vit.layers.0.layer_scale1.lambda1", "vit.layernorm.weight", "classifier.bias"} <= set(undecayed)


def test_frozen_parameters_are_in_no_group(model):
    model.vit.requires_grad_(False)
    assert [len(group["params"]) for group in training.parameter_groups(model, 0.1)] == [1, 1]


def test_muon_takes_the_matrices_of_the_layers_and_adamw_all_else(model):
    (whole,) = training.build_optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.95))
    adamw, muon = training.build_optimizers(model, "muon", 1e-3, 0.1, (0.9, 0.95))
    of = lambda optimizer: {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert of(whole) == set(names)
    assert of(adamw) | of(muon) == set(names)
    assert not of(adamw) & of(muon)
    assert {names[i].split(".", 3)[3] for i in of(muon)} == {
        *(f"attention.{part}_proj.weight" for part in "qkvo"),
        "mlp.fc1.weight",
        "mlp.fc2.weight",
    }


def test_learning_rate_rises_linearly_then_follows_a_cosine():
    rates = [training.learning_rate(step, 110, 10, 2.0) for step in range(110)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(1.0)
    assert rates[85] == pytest.approx(1 + math.cos(0.75 * math.pi))
    assert 0 < rates[-1] < 0.001


def test_soft_targets_smooth_over_all_classes():
    targets = training.soft_targets(torch.tensor([2, 0]), 4, 0.2)
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))


def test_smoothed_loss_equals_torchs_own(model):
    pixel_values, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])
    torch.nn.init.normal_(model.classifier.weight)
    outputs = model(pixel_values, labels=training.soft_targets(labels, 3, 0.1))
    wanted = torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(outputs.loss, wanted)


@pytest.mark.parametrize(("feature", "picked"), [("amx_bf16", "bf16"), ("avx512_bf16", "bf16"), ("avx512_f", "no")])
def test_bf16_on_cpu_only_where_the_processor_computes_in_it(monkeypatch, feature, picked):
    """T18."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True})
    assert training.pick_precision("auto", "cpu") == picked
    assert training.pick_precision("no", "cpu") == "no"
    assert training.pick_precision("bf16", "cpu") == "bf16"


@pytest.mark.parametrize(("processes", "threads"), [("1", 8), ("4", 2), ("16", 1)])
def test_a_launched_process_gets_its_share_of_the_cores(monkeypatch, processes, threads):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    training.use_all_cores()
    assert chosen == [threads]


def test_compile_is_off_on_cpu_and_on_for_cuda():
    """T19."""
    assert [training.pick_compile("auto", kind) for kind in ("cpu", "cuda")] == [False, True]
    assert [training.pick_compile(asked, "cpu") for asked in ("yes", "no")] == [True, False]


def test_average_equals_the_plain_formula(model):
    average = training.AverageModel(model, decay=0.9)
    name, wanted = "vit.layernorm.weight", model.vit.layernorm.weight.detach().clone()
    for step in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(model)
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * model.vit.layernorm.weight
    torch.testing.assert_close(average.model.get_parameter(name), wanted.detach())
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_scores_are_those_of_a_hand_count():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [1.0, 0.0]])
    metrics = training.score(logits, torch.tensor([0, 1, 1, 0]))
    assert metrics["accuracy"] == 0.75
    assert metrics["loss"] == pytest.approx(
        sum(math.log(1 + math.exp(margin)) for margin in (-2, -1, 3, -1)) / 4, abs=1e-6
    )


def test_predictions_keep_their_rows_and_the_model_its_mode(model):
    torch.nn.init.normal_(model.classifier.weight)
    model.train()
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    form = data.ImageForm(16, 16, 3, 2, (0.5,) * 3, (0.5,) * 3)
    batches = [{"images": pixels[rows], "index": torch.tensor(rows)} for rows in ([4, 0], [2], [1, 3])]
    logits, seen = training.predict(model, batches, form, Accelerator(cpu=True), 5)
    assert seen.tolist() == [0, 1, 2, 3, 4]
    assert model.training
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()((pixels.float() / 255 - 0.5) / 0.5).logits)


def test_a_checkpoints_head_is_kept_only_for_the_same_labels(tmp_path):
    native = ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
            id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
        )
    )  # fmt: skip
    native.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    kept, processor = training.build_model(["cat", "dog"], str(tmp_path), None, None, {})
    torch.testing.assert_close(kept.classifier.weight, native.classifier.weight)
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    for labels in (["dog", "cat"], ["cat", "dog", "eel"]):
        reset, _ = training.build_model(labels, str(tmp_path), None, None, {})
        assert not reset.classifier.weight.any()
        assert list(reset.config.id2label.values()) == labels


def test_a_model_from_scratch_has_the_datas_labels_and_a_fitting_processor():
    model, processor = training.build_model(
        ["a", "b", "c"], None, "tiny-patch16-224", 32, {"num_channels": 1, "hidden_size": 12, "num_hidden_layers": 1}
    )
    assert model.config.label2id == {"a": 0, "b": 1, "c": 2}
    assert dict(processor.size) == {"height": 32, "width": 32}
    assert len(processor.image_mean) == 1


def test_metrics_load_offline_while_another_file_is_called_evaluate(tmp_path):
    """T21, and recipes/evaluate.py beside recipes/train.py."""
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise OSError('the network was asked')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from hf_vit import training\nimport torch\n"
        "print(training.score(torch.eye(3), torch.arange(3))['accuracy'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.strip() == "1.0", result.stderr
