"""Logits or features of a data set, on any number of processes."""

import contextlib

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from hf_vit.system.errors import UserError
from hf_vit.system.text import counted


REDUCED_ROWS = 2**14  # that are added up over the processes at a time


def classification_head(model) -> nn.Linear:
    """The dense layer that gives the logits; its input are the features.

    Raises:
        ValueError: if there is none.
    """
    dense = [module for module in model.modules() if isinstance(module, nn.Linear)]
    fitting = [layer for layer in dense if layer.out_features == model.config.num_labels]
    if not fitting:
        raise UserError(
            f"{type(model).__name__} has no dense layer of {model.config.num_labels} labels: its features cannot be taken"
        )
    return fitting[-1]


@contextlib.contextmanager
def batch_predictor(model, spec, accelerator, features: bool = False):
    """Within the block, a function of images (b, C, H, W) that gives logits (b, L) in float32; the model is in eval mode.

    Args:
        spec: the `ImageSpec` of the images.
        features: give what the head reads, (b, D), instead.

    Raises:
        ValueError: if the model has no dense head whose input are the features.
    """
    was_training, head_inputs, hooks = model.training, [], []
    is_regression = model.config.problem_type == "regression"
    if features or is_regression:
        head = classification_head(model)
        hooks.append(head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0])))

    @torch.no_grad()
    def predict_batch(images: torch.Tensor) -> torch.Tensor:
        images = images.to(accelerator.device, non_blocking=True)
        with accelerator.autocast():
            values = model(spec.normalize(images)).logits  # (b, L)
        if features:
            values = head_inputs.pop().flatten(1)  # (b, D)
        elif is_regression:  # in bfloat16, numbers around 2,000 are multiples of 8
            values = nn.functional.linear(head_inputs.pop().float(), head.weight.float(), head.bias.float())
        return values.float()

    model.eval()
    try:
        yield predict_batch
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def predict(
    model, batches, spec, accelerator, count: int, features=False, stopped=lambda: False, split="", convert=lambda x: x
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits (n, L) in float32, or the features (n, D) that the head reads, and the row number of each: see `gather_rows`.

    Args:
        convert: what is kept of the values of a batch, (b, L or D) -> (b, K).
    """
    with batch_predictor(model, spec, accelerator, features) as predict_batch:
        answer = lambda batch: convert(predict_batch(batch["images"]))  # (b, K)
        return gather_rows(answer, batches, accelerator, count, stopped, split)


@torch.no_grad()
def gather_rows(
    answer, batches, accelerator, count: int, stopped=lambda: False, split: str = ""
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What a model answers to images, (n, K), and the row number of each, (n,) rising.

    Every process gets all of them, each row once, however the rows are shared out. n is `count` unless images were skipped.

    Args:
        answer: gives the answers (b, K) to a batch, in float32.
        batches: this process's share, dicts of `images` uint8 (b, C, H, W) and `index` (b,); shares do not overlap.
        stopped: asked before each batch; if it is True on any process, None is returned.
        split: what the images are, for the error.

    Raises:
        ValueError: if no image can be read, or if an answer is not finite.
    """
    table, seen = None, torch.zeros(count, 1)  # on the CPU, where n x K numbers have room
    answer = halve_where_memory_is_short(answer)
    for batch in batches:
        if stopped():
            break
        values = answer(batch).cpu()  # (b, K)
        if table is None:
            table = torch.zeros(count, values.shape[1])
        table[batch["index"]], seen[batch["index"]] = values, 1.0
    device = accelerator.device
    if accelerator.reduce(torch.tensor(float(stopped()), device=device), reduction="sum") > 0:
        return None
    if accelerator.num_processes > 1:
        width = torch.tensor([0 if table is None else table.shape[1]], device=device)
        width = int(accelerator.gather(width).max())
        table = torch.zeros(count, width) if table is None else table
        for part in (*table.split(REDUCED_ROWS), *seen.split(REDUCED_ROWS)):
            part.copy_(accelerator.reduce(part.to(device), reduction="sum"))
    if not seen.any():
        raise UserError(f"none of {counted(count, 'image')} can be read")
    rows = seen[:, 0].nonzero().flatten()
    values = table[rows]
    check_finite(values, split)
    return values, rows


def halve_where_memory_is_short(answer):
    """`answer` that is asked about a part of a batch at a time, from the first batch on that does not fit into memory."""
    most = None

    def answer_in_parts(batch):
        nonlocal most
        count = len(batch["images"])
        if most is not None and count > most:
            parts = [{key: batch[key][at : at + most] for key in ("images", "index")} for at in range(0, count, most)]
            return torch.cat([answer_in_parts(part).cpu() for part in parts])
        try:
            return answer(batch)
        except Exception as error:
            if count == 1 or not should_reduce_batch_size(error):
                raise
        clear_device_cache(garbage_collection=True)  # outside of `except`, whose traceback holds the tensors
        most = count // 2
        return answer_in_parts(batch)

    return answer_in_parts


def check_finite(values: torch.Tensor, split: str = ""):
    """Raise ValueError if a row of logits or features (n, L) is not finite: argmax would take NaN for a prediction."""
    if wrong := int((~values.isfinite().all(dim=1)).sum()):
        where = f" of {split}" if split else ""
        raise UserError(
            f"the model gives NaN or infinity for {wrong:,} of {counted(len(values), 'image')}{where}: try --mixed_precision no; if that does "
            "not help, look at these images, or use weights of an earlier step"
        )


# How much two computations of the same logits may differ, relative to the largest, by --mixed_precision. Other batch sizes use
# other kernels, and a sum in another order differs by some units in the last place: 2^-24 of float32 (2^-11 where a GPU
# computes in TF32), 2^-11 of float16, 2^-8 of bfloat16, times a few for the layers.
LOGITS_TOLERANCE = {"no": 1e-3, "fp16": 1e-2, "bf16": 6e-2}


def logits_difference(model, images: torch.Tensor, logits: torch.Tensor, spec, accelerator, scale=None) -> float:
    """The largest difference between a saved model's logits and the scored ones, relative to `scale`, or the largest of these.

    Args:
        model: as `load_classifier` gives it back.
        images: uint8 (n, C, H, W), scored ones.
        logits: (n, L), the scored ones.
    """
    with batch_predictor(model.to(accelerator.device), spec, accelerator) as predict_batch:
        again = predict_batch(images).cpu()  # (n, L)
    return float((again - logits).abs().max() / max(1e-6, scale or logits.abs().max()))
