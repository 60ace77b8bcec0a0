"""Muon, the optimizer of hidden matrices: each update is the momentum with all its singular values brought near 1."""

import math
from collections import defaultdict

import torch
from torch.distributed.tensor import DTensor, Shard

from hf_vit.system.hardware import has_native_bf16
from hf_vit.training.distributed import local_tensors


# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/): the
# coefficients are tuned for the steepest slope at 0, so that five steps take singular values to about 0.7 to 1.2.
COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
BATCH_NUMBERS = 2**25  # in one stack of matrices, which is copied about five times: 128 MiB each in float32


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """U S V^T -> about U V^T for each matrix of a stack (n, r, c), by the quintic Newton-Schulz iteration.

    Three batched products a step, however many matrices there are: in bfloat16 where the hardware computes in it, else in
    float32, which the result has too.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the Gram matrix has the size of the rows
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)  # no singular value is above 1
    x = x.to(torch.bfloat16 if has_native_bf16(x.device.type) else torch.float32)
    for _ in range(STEPS):
        gram = x @ x.mT  # (n, r, r)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize_sharded(shards: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This process's part of `orthogonalize`, of its part of each matrix; both (n, part of r, c), cut as `like` (r, c) is.

    The matrices are shared out: each process is sent 1 / processes of them whole, and sends the results back in parts.
    """
    mesh, shape = like.device_mesh, torch.Size([len(shards), *like.shape])
    sharded = [Shard(cut.dim + 1) if cut.is_shard() else cut for cut in like.placements]
    whole = [Shard(0) if cut.is_shard() else cut for cut in like.placements]

    def move(local, source, target):
        stack = DTensor.from_local(local, mesh, source, run_check=False, shape=shape, stride=local.stride())
        return stack.redistribute(placements=target).to_local()

    return move(orthogonalize(move(shards, sharded, whole)), whole, sharded)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised: `w -= lr * weight_decay * w + lr * 0.2 * sqrt(max(r, c)) * orthogonalize(update)`.

    The factor gives the update of a matrix (r, c) the size that AdamW's has, so that AdamW's learning rate and decay fit
    (arXiv 2502.16982, section 2.2). It is what `torch.optim.Muon(params, adjust_lr_fn="match_rms_adamw")` does, and goes on
    from that optimizer's state; that one computes in bfloat16 on any hardware, and a matrix at a time. Here all matrices of one
    shape, of whatever group, are stacked and share their products.

    Args:
        params: matrices, or groups of them. Of DTensors (FSDP 2) each process keeps the momentum of its part.
    """

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        """Change the parameters that have a gradient; `closure` computes the loss anew, which is returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        batches = defaultdict(list)  # by shape: (parameter, momentum to orthogonalise, learning rate)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
            gradients = local_tensors(parameter.grad for parameter in parameters)
            updates = local_tensors(self.state[parameter]["momentum_buffer"] for parameter in parameters)
            if parameters:
                torch._foreach_lerp_(updates, gradients, 1 - group["momentum"])
                updates = torch._foreach_lerp(gradients, updates, group["momentum"])
                torch._foreach_mul_(local_tensors(parameters), 1 - group["lr"] * group["weight_decay"])
            for parameter, update in zip(parameters, updates, strict=True):
                batches[parameter.shape].append((parameter, update, group["lr"]))
        for shape, batch in batches.items():
            size = max(1, BATCH_NUMBERS // shape.numel())
            for start in range(0, len(batch), size):
                parameters, updates, rates = zip(*batch[start : start + size], strict=True)
                stack, first = torch.stack(updates), parameters[0]  # (n, r, c)
                stack = orthogonalize_sharded(stack, first) if isinstance(first, DTensor) else orthogonalize(stack)
                steps = stack.to(first.dtype).unbind()
                torch._foreach_mul_(steps, [-rate * 0.2 * math.sqrt(max(shape)) for rate in rates])
                torch._foreach_add_(local_tensors(parameters), steps)
        return loss
