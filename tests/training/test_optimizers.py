"""Claims about parameter groups, optimizers and the schedule of the rate."""

import pytest

from hf_vit import HFViTForImageClassification
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


def groups_of(model, kind):
    """{name: (its optimizer, its part of the rate, its decay)}, each parameter once."""
    found = {}
    for optimizer in build_optimizers(model, kind, 1e-3, 0.3, 0.95, layer_decay=0.5):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                assert name not in found
                assert parameter is model.get_parameter(name)
                found[name] = (type(optimizer).__name__, group["lr_scale"], group["weight_decay"])
    return found


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_optimizers_hold_every_parameter_once_at_its_rate_and_decay(model, kind):
    of_muon = lambda name, decays: kind == "muon" and ".layers." in name and decays
    assert groups_of(model, kind) == {
        name: ("Muon" if of_muon(name, decays) else "AdamW", scale, 0.3 if decays else 0.0)
        for name, (scale, decays) in TABLE.items()
    }


@pytest.mark.parametrize("lora", [False, True])
def test_the_head_alone_learns_at_a_rate_of_its_own(model, lora):
    groups = parameter_groups(add_lora(model, 2) if lora else model, 0.1, layer_decay=0.5, head_scale=10.0)
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    head = {name: scale for name, scale in scales.items() if "classifier" in name}
    assert [*head.values()] == [10.0, 10.0]
    assert max(scales[name] for name in scales.keys() - head) <= 1.0


def test_low_rank_updates_learn_at_the_rate_of_their_layer_and_all_decay(model):
    found = {name: how for name, how in groups_of(add_lora(model, 2), "muon").items() if "lora_" in name}
    assert found == {
        f"base_model.model.vit.layers.{index}.{name}.lora_{part}.default.weight": ("Muon", scale, 0.3)
        for index, scale in enumerate((0.25, 0.5))
        for name in DENSE
        for part in "AB"
    }


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
