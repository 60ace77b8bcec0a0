"""Claims about parameter groups, optimizers, the schedule of the rate, and the average of the weights."""

import pytest
import torch

from hf_vit import HFViTForImageClassification
from hf_vit.data.augment import mix
from hf_vit.training.ema import ModelEMA
from hf_vit.training.losses import classification_loss, soft_targets
from hf_vit.training.model import add_lora
from hf_vit.training.optimizers import build_optimizers, learning_rate, parameter_groups


@pytest.fixture
def model(tiny_config):
    return HFViTForImageClassification(tiny_config(layerscale_value=0.1, num_register_tokens=2))


DENSE = [*(f"attention.{m}_proj" for m in "qkvo"), "mlp.fc1", "mlp.fc2"]
IN_A_LAYER = {
    **{f"{name}.weight": True for name in DENSE},
    **{f"{name}.bias": False for name in DENSE},
    **{f"layernorm_{at}.{kind}": False for at in ("before", "after") for kind in ("weight", "bias")},
    "layer_scale1.lambda1": False,
    "layer_scale2.lambda1": False,
}  # name: whether it decays
TABLE = {
    "vit.embeddings.cls_token": (0.125, False),
    "vit.embeddings.register_tokens": (0.125, False),
    "vit.embeddings.position_embeddings": (0.125, False),
    "vit.embeddings.patch_embeddings.projection.weight": (0.125, True),
    "vit.embeddings.patch_embeddings.projection.bias": (0.125, False),
    **{f"vit.layers.0.{name}": (0.25, decays) for name, decays in IN_A_LAYER.items()},
    **{f"vit.layers.1.{name}": (0.5, decays) for name, decays in IN_A_LAYER.items()},
    "vit.layernorm.weight": (1.0, False),
    "vit.layernorm.bias": (1.0, False),
    "classifier.weight": (1.0, True),
    "classifier.bias": (1.0, False),
}  # name: its part of the rate, and whether it decays


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_optimizers_hold_every_parameter_once_at_its_rate_and_decay(model, kind):
    found = {}
    for optimizer in build_optimizers(model, kind, 1e-3, 0.3, 0.95, layer_decay=0.5):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                assert name not in found
                assert parameter is model.get_parameter(name)
                found[name] = (type(optimizer).__name__, group["lr_scale"], group["weight_decay"])
    of_muon = lambda name, decays: kind == "muon" and ".layers." in name and decays
    assert found == {
        name: ("Muon" if of_muon(name, decays) else "AdamW", scale, 0.3 if decays else 0.0)
        for name, (scale, decays) in TABLE.items()
    }


@pytest.mark.parametrize("lora", [False, True])
def test_the_head_alone_learns_at_a_rate_of_its_own(model, lora):
    model = add_lora(model, 2) if lora else model
    groups = parameter_groups(model, 0.1, layer_decay=0.5, head_scale=10.0)
    head = {name for group in groups if group["lr_scale"] == 10.0 for name in group["names"]}
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "classifier" in name}
    assert head == names
    assert len(head) == 2
    assert max(group["lr_scale"] for group in groups if not head & {*group["names"]}) <= 1.0


def test_low_rank_updates_learn_at_the_rate_of_their_layer_and_all_decay(model):
    lora = add_lora(model, 2)
    found, layer = {}, r"base_model.model.vit.layers."
    for optimizer in build_optimizers(lora, "muon", 1e-3, 0.3, 0.95, layer_decay=0.5):
        for group in optimizer.param_groups:
            for name in group["names"]:
                found[name] = (type(optimizer).__name__, group["lr_scale"], group["weight_decay"])
    dense = {
        f"{layer}{index}.{name}.lora_{part}.default.weight" for index in (0, 1) for name in DENSE for part in "AB"
    }
    assert {name for name in found if "lora_" in name} == dense
    for name in dense:
        assert found[name] == ("Muon", 0.25 if name.startswith(f"{layer}0.") else 0.5, 0.3)


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {0: 0.2, 9: 2.0, 10: 2.0, 55: 1.0, 100: 0.0}),
        ("linear", {0: 0.2, 9: 2.0, 10: 2.0, 55: 1.0, 99: 2 / 90}),
        ("constant", {0: 0.2, 9: 2.0, 10: 2.0, 55: 2.0, 99: 2.0}),
        ("step", {0: 0.2, 9: 2.0, 10: 2.0, 49: 2.0, 50: 0.2, 99: 0.2}),
    ],
)
def test_a_schedule_at_points_computed_by_hand(schedule, points):
    rates = {step: learning_rate(step, 100, 10, 2.0, schedule) for step in points}
    assert rates == pytest.approx(points, abs=1e-9)


def test_average_equals_the_plain_formula(model):
    average = ModelEMA(model, decay=0.9)
    name, wanted = "vit.layernorm.weight", model.vit.layernorm.weight.detach().clone()
    for step in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(model)
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * model.vit.layernorm.weight
    last = model.get_parameter(name).detach().clone()
    with average.applied(model):
        torch.testing.assert_close(model.get_parameter(name).detach(), wanted.detach())
    assert torch.equal(model.get_parameter(name), last)


@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 2.0]], ids=["even", "weighted"])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 1.0)])
def test_gradients_of_8_images_equal_those_of_two_times_4(accelerator, tiny_model, mixup, cutmix, weights):
    model, seed, steps = tiny_model().train(), 5, 3
    weights = None if weights is None else torch.tensor(weights)
    images, labels = torch.randn(steps * 8, 3, 16, 16), torch.randint(0, 3, (steps * 8,))
    targets = soft_targets(labels, 3, 0.1)

    def gradients(batch, accumulation):
        """As recipes/train.py goes through an epoch."""
        ours = accelerator(mixed_precision="no")
        ours.gradient_accumulation_steps = accumulation
        network, *optimizers = ours.prepare(model, *build_optimizers(model, "adamw", 0, 0, 0.95))
        found = []
        for number, start in enumerate(range(0, len(images), batch)):
            rows = slice(start, start + batch)
            mixed, blended = mix(images[rows], targets[rows], mixup, cutmix, seed, 0, number // accumulation)
            with ours.accumulate(network):
                ours.backward(classification_loss(network(mixed).logits, blended, weights))
                if ours.sync_gradients:
                    found.append({name: p.grad.clone() for name, p in model.named_parameters()})
                for optimizer in optimizers:
                    optimizer.param_groups[0]["lr"] = 0.0
                    optimizer.step()
                    optimizer.zero_grad()
        return found

    whole, parts = gradients(8, 1), gradients(4, 2)
    assert len(whole) == len(parts) == steps
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert not torch.equal(whole[0]["classifier.bias"], whole[1]["classifier.bias"])
