"""Claims about Muon: what it computes, in how many products and in which type, on whole matrices wherever their parts lie."""

import os
import sys
from collections import Counter

import forked
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vit import HFViTForImageClassification
from hf_vit.training import muon
from hf_vit.training.optimizers import build_optimizers


SHAPES = [(6, 6), (6, 16), (16, 6), (6, 6), (16, 6)]
RATES = [(1e-2, 3e-3), (2e-2, 0.0), (5e-3, 1e-3)]  # of two groups, a step each


def trained_by(kind, rates=RATES, **options):
    """Matrices after steps of an optimizer along fixed gradients, in two groups; the last of each has no gradient."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES + SHAPES]
    groups = [{"params": part, "weight_decay": decay} for part, decay in ((matrices[:5], 0.0), (matrices[5:], 0.3))]
    optimizer = kind(groups, lr=1.0, **options)
    for step in rates:
        for group, rate in zip(optimizer.param_groups, step, strict=True):
            group["lr"] = rate
            for matrix in group["params"][:-1]:
                matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()
    return optimizer, [matrix.detach() for matrix in matrices]


class Products(TorchDispatchMode):
    """The matrix products that run inside of it, by name and type."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.found.append((name, args[-1].dtype))
        return function(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------------------------
# What it computes


def test_muon_equals_torchs_own_in_float32(monkeypatch):
    monkeypatch.setattr(muon, "has_native_bf16", lambda device_type: False)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # the type of torch's products
    _, ours = trained_by(muon.Muon)
    _, wanted = trained_by(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    assert_close(ours, wanted, rtol=0, atol=1e-6)


def test_a_gradient_of_zeros_leaves_the_matrix_to_weight_decay():
    matrix = torch.ones(4, 6, requires_grad=True)
    matrix.grad = torch.zeros_like(matrix)
    muon.Muon([matrix], lr=0.5, weight_decay=0.1).step()
    assert_close(matrix.detach(), torch.full((4, 6), 0.95))


@pytest.mark.parametrize("layers", [1, 6])
def test_a_deeper_model_needs_no_more_products(tiny_config, layers):
    model = HFViTForImageClassification(tiny_config(num_hidden_layers=layers))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    _, optimizer = build_optimizers(model, "muon", 1e-3, 0.1, 0.95, layer_decay=0.5)
    with Products() as products:
        optimizer.step()
    kinds = 3  # q, k, v and o have one shape, fc1 and fc2 one each
    assert Counter(name for name, _ in products.found) == dict(bmm=5 * kinds, baddbmm=10 * kinds)


def test_stacks_of_large_matrices_are_bounded(monkeypatch):
    _, wanted = trained_by(muon.Muon)
    monkeypatch.setattr(muon, "BATCH_NUMBERS", 2 * 6 * 16)
    sizes = []
    real = muon.orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", lambda stack: sizes.append(stack.numel()) or real(stack))
    _, ours = trained_by(muon.Muon)
    assert max(sizes) == 2 * 6 * 16
    assert_close(ours, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_products_are_in_bfloat16_only_where_the_hardware_is(monkeypatch, native, dtype):
    monkeypatch.setattr(muon, "has_native_bf16", lambda device_type: native)
    with Products() as products:
        trained_by(muon.Muon)
    assert {found for _, found in products.found} == {dtype}


# ----------------------------------------------------------------------------------------------------------------------
# Sharded

# Matrices whose rows, and whose number, two processes cannot share out evenly; each process prints the largest difference.
SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from hf_vit.training import optimizers
from hf_vit.training.muon import Muon

dist.init_process_group("gloo")
mesh, shapes = init_device_mesh("cpu", (2,)), [(5, 5)] * 3 + [(5, 12), (12, 5), (1, 4)]
generator = torch.Generator().manual_seed(0)
whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
parts = [distribute_tensor(matrix.detach(), mesh, [Shard(0)]).requires_grad_() for matrix in whole]
optimizers = Muon(whole, lr=1e-2), Muon(parts, lr=1e-2)
for _ in range(3):
    for matrix, part in zip(whole, parts):
        matrix.grad = torch.randn(matrix.shape, generator=generator)
        part.grad = distribute_tensor(matrix.grad, mesh, [Shard(0)])
    for optimizer in optimizers:
        optimizer.step()
difference = max((part.full_tensor() - matrix).abs().max().item() for matrix, part in zip(whole, parts))
held = sum(optimizers[1].state[part]["momentum_buffer"].to_local().numel() for part in parts)
print(difference, held)
dist.destroy_process_group()
"""


def test_sharded_matrices_are_orthogonalized_whole_and_each_process_keeps_its_part_of_the_momentum():
    line = [sys.executable, "-W", "ignore", "-c", SHARDED]
    processes = [forked.Forked(line, env=os.environ | rank) for rank in forked.group_of_two()]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    differences, held = zip(*(map(float, numbers) for numbers in printed), strict=True)
    assert max(differences) < 1e-6
    assert sum(held) == 3 * 25 + 2 * 60 + 4
    assert min(held) > 0.3 * sum(held)
