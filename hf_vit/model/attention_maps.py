"""What the model looks at, from its attention weights and their gradients.

Letters of the shapes: B batch, T tokens, R prefix tokens, N = T - R patches, h w rows and columns of patches, D hidden size,
A heads, L labels.
"""

import torch

from .fields import as_pair


GRADIENT_METHODS = ("gradient_rollout", "grad_cam")
MAP_METHODS = ("raw", "mean", "rollout", *GRADIENT_METHODS)


def record_pass(model, pixel_values, method: str, labels, **asked):
    """What a map is made of: the attention weights of each layer, (B, A, T, T), and of the probe, (B, A, 1, N), where there is one.

    Of "gradient_rollout", each times the positive part of its gradient; of "grad_cam", the tokens that each layer's attention reads,
    (B, T, D), and their gradients.
    """
    vit, by_gradient = model.base_model, method in GRADIENT_METHODS
    modes, hooks = {module: module.training for module in model.modules()}, []
    tokens, probe = [], []
    try:
        model.eval()
        if method == "grad_cam":
            look = lambda _, args: tokens.append(args[1])
            hooks += [layer.attention.register_forward_pre_hook(look) for layer in vit.layers]
        elif vit.attention_pooling is not None:
            hooks.append(vit.attention_pooling.register_forward_hook(lambda _, __, output: probe.append(output[1])))
        # Compiled code skips hooks.
        with (
            torch.compiler.set_stance("force_eager"),
            torch.inference_mode(False),
            torch.set_grad_enabled(by_gradient),
        ):
            images = pixel_values.detach().clone()
            images.requires_grad_(by_gradient)  # there must be a graph even if all weights are frozen
            network = model if by_gradient else vit  # without a head, which may mask patches
            outputs = network(images, output_attentions=True, token_merging=None, **asked)
            weights = tokens or [*outputs.attentions, *probe]
            if not by_gradient:
                return weights
            labels = outputs.logits.argmax(dim=1) if labels is None else torch.as_tensor(labels).expand(len(images))
            scores = outputs.logits[range(len(images)), labels.tolist()]  # (B,)
            gradients = torch.autograd.grad(scores.sum(), weights)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    pairs = [(one.detach().float(), slope.float()) for one, slope in zip(weights, gradients, strict=True)]
    return pairs if tokens else [one * slope.clamp(min=0) for one, slope in pairs]


def pooling_query(weights, config):
    """How much of each token is pooled, (B, 1, T): the row that looks."""
    R, T = config.num_prefix_tokens, weights[0].shape[3]
    query = weights[0].new_zeros(len(weights[0]), 1, T)
    if config.pooling.startswith("cls"):
        query[:, :, : config.n_cls_tokens] = 1 / config.n_cls_tokens
    else:
        query[:, :, R:] = weights[-1].mean(dim=1) if len(weights) > config.num_hidden_layers else 1 / (T - R)
    return query


def map_of_layer(method: str, recorded: list, layer: int, config):
    """One number a token (B, T), or (B, A, T) of "raw", from what `record_pass` gave."""
    if method == "grad_cam":  # channels weighted by the mean gradient over the patches
        tokens, gradients = recorded[layer]
        channels = gradients[:, config.num_prefix_tokens :].mean(dim=1, keepdim=True)  # (B, 1, D)
        return (tokens * channels).sum(dim=2).relu()
    query = row = pooling_query(recorded, config)  # (B, 1, T)
    if method in ("raw", "mean"):
        heads = (query.unsqueeze(1) @ recorded[layer]).squeeze(2)  # (B, A, T)
        return heads if method == "raw" else heads.mean(dim=1)
    for weights in reversed(recorded[: layer + 1]):
        row = row + row @ weights.mean(dim=1)
        row = row / 2 if method == "rollout" else row  # half of it is the residual
    if method == "gradient_rollout" and len(recorded) == config.num_hidden_layers:
        row = row - query  # a patch's own share: equal for all patches of a mean, none in a class token
    return row.squeeze(1)


def attention_maps(
    model, pixel_values, layers=None, method: str = "raw", labels=None, interpolate_pos_encoding: bool = False
):
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
        ValueError: for an unknown method, or for a class of a model without a head.
        IndexError: for a layer or a class that is not there.
    """
    count, by_gradient = len(model.base_model.layers), method in GRADIENT_METHODS
    if method not in MAP_METHODS:
        raise ValueError(f"method must be one of {', '.join(MAP_METHODS)}, got {method!r}")
    if by_gradient and not model.is_classifier:
        raise ValueError(f"{method} follows the gradient of a class: wanted an HFViTForImageClassification")
    if layers is None:
        layers = range(count) if method in ("raw", "mean") else -1
    single = isinstance(layers, int)
    selected = [range(count)[layer] for layer in ([layers] if single else layers)]
    recorded = record_pass(model, pixel_values, method, labels, interpolate_pos_encoding=interpolate_pos_encoding)
    with torch.no_grad(), torch.autocast(pixel_values.device.type, enabled=False):
        if not by_gradient:
            recorded = [weights.float() for weights in recorded]
        maps = torch.stack([map_of_layer(method, recorded, layer, model.config) for layer in selected], dim=1)
    maps = maps[..., model.config.num_prefix_tokens :]  # (..., T) -> (..., N)
    maps = maps.unflatten(-1, model.base_model.embeddings.patch_embeddings.grid_size(pixel_values))  # (..., h, w)
    return maps[:, 0] if single else maps


def attention_query(model) -> str:
    """Whose attention `attention_maps` shows, in words."""
    if model.config.pooling.startswith("cls"):
        return "the class token" if model.config.n_cls_tokens == 1 else "the mean over the class tokens"
    has_probe = model.base_model.attention_pooling is not None  # a backbone never has one
    return "the probe of the attention pooling" if has_probe else "all patches, averaged"


@torch.no_grad()
def attention_distances(model, pixel_values):
    """How far each head looks, (layers, A) in pixels: the mean distance of a patch to the patches it attends to.

    Weighted by the attention weights, normalised to a sum of 1 over the patches; the mean over all patches and images.
    Figure 7, right, and appendix D.7 of arXiv 2010.11929.

    Args:
        pixel_values: (B, C, H, W) floats as the model's image processor makes them.
    """
    R, layers = model.config.num_prefix_tokens, model.config.num_hidden_layers
    recorded = record_pass(model, pixel_values, "raw", None, interpolate_pos_encoding=True)
    height, width = as_pair(model.config.patch_size)
    sides = (torch.arange(0, pixel_values.shape[2], height), torch.arange(0, pixel_values.shape[3], width))
    centres = torch.cartesian_prod(*sides).float().to(pixel_values.device)  # (N, 2)
    weights = torch.stack(recorded[:layers])[..., R:, R:].float()  # (layers, B, A, N, N)
    shares = weights / weights.sum(dim=4, keepdim=True)
    return (shares * torch.cdist(centres, centres)).sum(dim=4).mean(dim=(1, 3))  # (layers, A)
