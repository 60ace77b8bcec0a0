"""What the model looks at, from its attention weights and their gradients.

Letters of the shapes: B batch, T tokens, R prefix tokens, N = T - R patches, h w rows and columns of patches, D hidden size,
A heads, L labels.
"""

from contextlib import contextmanager
from numbers import Integral

import torch


GRADIENT_METHODS = ("gradient_rollout", "grad_cam")
MAP_METHODS = ("raw", "mean", "rollout", *GRADIENT_METHODS)


@contextmanager
def whole_evaluation(model):
    """Evaluation mode, uncompiled, because compiled code skips hooks; gives a list of hooks to remove at the end.

    Afterwards the model is as it was.
    """
    modes, hooks = {module: module.training for module in model.modules()}, []
    try:
        model.eval()
        with torch.compiler.set_stance("force_eager"), torch.inference_mode(False):
            yield hooks
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode


def select_layers(layers, count: int, method: str) -> tuple[list[int], bool]:
    """Layer numbers in 0 .. count - 1, and whether a single one was asked for."""
    if layers is None:
        layers = range(count) if method in ("raw", "mean") else count - 1
    single = not isinstance(layers, (list, tuple, range))
    selected = [layers] if single else list(layers)
    if not selected or not all(isinstance(layer, Integral) and -count <= layer < count for layer in selected):
        raise ValueError(
            f"layers must be None, a number from {-count} to {count - 1}, or a list of them, got {layers!r}"
        )
    return [layer % count for layer in selected], single


def class_scores(logits: torch.Tensor, labels) -> torch.Tensor:
    """The logit of each image's class, (B,); of the predicted class where `labels` is None."""
    B, L = logits.shape
    classes = logits.argmax(dim=1) if labels is None else torch.as_tensor(labels, device=logits.device).clone()
    if classes.is_floating_point() or classes.shape not in ((), (B,)) or not ((classes >= 0) & (classes < L)).all():
        raise ValueError(f"labels must be one class from 0 to {L - 1}, or one for each of {B} images, got {labels!r}")
    return logits.gather(1, classes.expand(B).unsqueeze(1)).squeeze(1)


def rollout(weights: list[torch.Tensor], selected, query, average_residual: bool) -> torch.Tensor:
    """The query (B, 1, T) followed down through the layers, (B, A, T, T) each, from each selected one, (B, layers, T).

    With `average_residual`, half of each layer is its residual (arXiv 2005.00928, section 3); else it is added
    (arXiv 2103.15679, equation 6).
    """
    rows, start = query.repeat(1, len(selected), 1), torch.tensor(selected, device=query.device)  # (B, layers, T)
    for layer in reversed(range(max(selected) + 1)):
        begun = start >= layer
        mixed = rows[:, begun] + rows[:, begun] @ weights[layer].mean(dim=1)
        rows[:, begun] = mixed / 2 if average_residual else mixed
    return rows


def grad_cam(tokens, gradients, selected, R: int) -> torch.Tensor:
    """Patches (B, T, D) that each layer reads, their channels weighted by the mean gradient of the class, (B, layers, N)."""
    maps = []
    for layer in selected:
        channels = gradients[layer][:, R:].float().mean(dim=1, keepdim=True)  # (B, 1, D)
        maps.append((tokens[layer][:, R:].float() * channels).sum(dim=2).relu())  # (B, N)
    return torch.stack(maps, dim=1).detach()


def compute_maps(method: str, weights: list[torch.Tensor], selected, config) -> torch.Tensor:
    """Maps of the selected layers, (B, layers, N), or (B, layers, A, N) of "raw".

    `weights`: (B, A, T, T) of each layer, then (B, A, 1, N) of the probe where there is one.
    """
    R, has_probe = config.num_prefix_tokens, len(weights) > config.num_hidden_layers
    query = weights[0].new_zeros(
        len(weights[0]), 1, weights[0].shape[3]
    )  # (B, 1, T), how much of each token is pooled
    if config.pooling.startswith("cls"):
        query[:, :, : config.n_cls_tokens] = 1 / config.n_cls_tokens
    else:
        query[:, :, R:] = weights[-1].mean(dim=1) if has_probe else 1 / (query.shape[2] - R)
    if method in ("raw", "mean"):
        maps = torch.stack([(query.unsqueeze(1) @ weights[layer]).squeeze(2) for layer in selected], dim=1)
        return maps[..., R:] if method == "raw" else maps[..., R:].mean(dim=2)  # (B, layers, A, T) -> (B, layers, N)
    rows = rollout(weights, selected, query, average_residual=method == "rollout")  # (B, layers, T)
    if method == "gradient_rollout" and not has_probe:
        rows = rows - query  # a patch's own share: equal for all patches of a mean, none in a class token
    return rows[..., R:]


def attention_maps(
    model, pixel_values, layers=None, method: str = "raw", labels=None, interpolate_pos_encoding: bool = False
) -> torch.Tensor:
    """What the model looks at in each image, one number per patch, under any attention backend.

    The query, named by `attention_query`, is the class token (of several their mean) where the model pools it, else the mean
    over all patches, or the probe of attention pooling, whose weights then weigh the rows of the patches. Prefix tokens are
    left out of the maps. They are computed as in evaluation, with every patch, and the model is left unchanged; but hooks
    record the pass, so threads that share a model must take turns. The weights of all layers take memory, (B, A, T, T) each.

    Args:
        pixel_values: (B, C, H, W) floats as the model's image processor makes them.
        layers: a number, negative from the end, or a list of numbers, which adds a dimension. None: all layers of "raw"
            and "mean", the last one of the others.
        method: what the numbers are,
            "raw", attention weights of each head, in [0, 1]; with the prefix tokens they sum to 1;
            "mean", their mean over the heads;
            "rollout", weights multiplied up to the layer, half of each being its residual (arXiv 2005.00928, section 3);
            "gradient_rollout", the same of weights times the positive part of their gradient, for a class (arXiv
            2103.15679, equations 5 and 6, without the query's own share that they begin with), 0 or more;
            "grad_cam", the patches that the layer's attention reads, their channels weighted by the mean gradient of
            a class, 0 or more (arXiv 1610.02391, equations 1 and 2).
        labels: for the last two, one class or (B,) classes; None: the predicted class.
        interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

    Returns:
        Maps in float32, (B, h, w) of one layer, (B, layers, h, w) of several; with "raw" (B, A, h, w) and
        (B, layers, A, h, w).

    Raises:
        ValueError: for an unknown method or layer, for labels that are no class, or for a class of a model without a head.
    """
    vit, by_gradient = model.base_model, method in GRADIENT_METHODS
    if method not in MAP_METHODS:
        raise ValueError(f"method must be one of {', '.join(MAP_METHODS)}, got {method!r}")
    if by_gradient and not model.is_classifier:
        raise ValueError(f"{method} follows the gradient of a class: wanted an HFViTForImageClassification")
    if labels is not None and not by_gradient:
        raise ValueError(f"{method} knows no class: leave labels out, or use {' or '.join(GRADIENT_METHODS)}")
    selected, single = select_layers(layers, len(vit.layers), method)
    tokens, probe = [], []  # (B, T, D) that each layer's attention reads, (B, A, 1, N)
    with whole_evaluation(model) as hooks, torch.set_grad_enabled(by_gradient):
        if method == "grad_cam":
            look = lambda _, args: tokens.append(args[1])
            hooks += [layer.attention.register_forward_pre_hook(look) for layer in vit.layers]
        elif vit.attention_pooling is not None:
            hooks.append(vit.attention_pooling.register_forward_hook(lambda _, __, output: probe.append(output[1])))
        pixel_values = pixel_values.detach().clone()
        # there must be a graph even if all weights are frozen
        pixel_values.requires_grad_(by_gradient and pixel_values.is_floating_point())
        network = model if by_gradient else vit  # without a head, which may mask patches
        asked = dict(interpolate_pos_encoding=interpolate_pos_encoding, output_attentions=True, token_merging=None)
        outputs = network(pixel_values, **asked)
        weights = [*outputs.attentions, *probe]
        if by_gradient:
            gradients = torch.autograd.grad(class_scores(outputs.logits, labels).sum(), tokens or weights)
    if method == "grad_cam":
        maps = grad_cam(tokens, gradients, selected, model.config.num_prefix_tokens)  # (B, layers, N)
    else:
        if by_gradient:
            weights = [one * slope.clamp(min=0) for one, slope in zip(weights, gradients, strict=True)]
        with torch.autocast(pixel_values.device.type, enabled=False):
            maps = compute_maps(method, [one.detach().float() for one in weights], selected, model.config)
    maps = maps.unflatten(-1, vit.embeddings.patch_embeddings.grid_size(pixel_values))  # (..., N) -> (..., h, w)
    return maps[:, 0] if single else maps


def attention_query(model) -> str:
    """Whose attention `attention_maps` shows, in words."""
    if model.config.pooling.startswith("cls"):
        return "the class token" if model.config.n_cls_tokens == 1 else "the mean over the class tokens"
    has_probe = model.base_model.attention_pooling is not None  # a backbone never has one
    return "the probe of the attention pooling" if has_probe else "the mean over all patches"


@torch.no_grad()
def attention_distances(model, pixel_values: torch.Tensor) -> torch.Tensor:
    """How far each head looks, (layers, A) in pixels: the mean distance of a patch to the patches it attends to.

    Weighted by the attention weights, normalised to a sum of 1 over the patches; the mean over all patches and images.
    Figure 7, right, and appendix D.7 of arXiv 2010.11929.

    Args:
        pixel_values: (B, C, H, W) floats as the model's image processor makes them.
    """
    vit, R = model.base_model, model.config.num_prefix_tokens
    with whole_evaluation(model):
        outputs = vit(pixel_values, interpolate_pos_encoding=True, output_attentions=True, token_merging=None)
    height, width = vit.embeddings.patch_embeddings.patch_size
    sides = (torch.arange(0, pixel_values.shape[2], height), torch.arange(0, pixel_values.shape[3], width))
    centres = torch.cartesian_prod(*sides).float().to(pixel_values.device)  # (N, 2)
    between, distances = torch.cdist(centres, centres), []  # (N, N)
    for attention in outputs.attentions:
        weights = attention[:, :, R:, R:].float()  # (B, A, N, N)
        shares = weights / weights.sum(dim=3, keepdim=True)
        distances.append((shares * between).sum(dim=3).mean(dim=(0, 2)))  # (A,)
    return torch.stack(distances)
