"""What the model looks at, under any attention backend: attention weights are recomputed from what each layer has read.

Letters of the shapes: B batch, T tokens, R prefix tokens, N = T - R patches, h w rows and columns of patches, Q queries,
D hidden size, A heads, K head size, L labels.
"""

from contextlib import contextmanager
from numbers import Integral

import torch


GRADIENT_METHODS = ("gradient_rollout", "grad_cam")
MAP_METHODS = ("raw", "mean", "rollout", *GRADIENT_METHODS)


class AttentionRecorder:
    """Hooks that keep what one attention module reads, (B, T, D), and what its heads give, side by side, (B, Q, D)."""

    def __init__(self, attention):
        self.attention = attention
        self.tokens = self.rotary = self.head_outputs = None
        self.gradient = None  # of a class score, with respect to the tokens or the head outputs
        self.hooks = [
            attention.register_forward_pre_hook(self.keep_tokens, with_kwargs=True),
            attention.o_proj.register_forward_pre_hook(self.keep_head_outputs),
        ]

    def keep_tokens(self, _, args, kwargs):
        self.tokens, self.rotary = args[0], kwargs.get("rotary")

    def keep_head_outputs(self, _, args):
        self.head_outputs = args[0]

    def remove(self):
        for hook in self.hooks:
            hook.remove()

    @torch.no_grad()
    def attention_weights(self, **kwargs):
        """softmax(q k^T / sqrt(K)), (B, A, Q, T) in float32; times the positive part of its gradient, where that is known.

        `kwargs` are those of the attention's `project`.
        """
        if self.rotary is not None:
            kwargs["rotary"] = self.rotary
        tokens = self.tokens.to(self.attention.q_proj.weight.dtype)  # autocast changes the type
        query, key, value = (heads.float() for heads in self.attention.project(tokens, **kwargs))
        weights = (query @ key.transpose(2, 3) * self.attention.head_dim**-0.5).softmax(dim=3)  # (B, A, Q, T)
        if self.gradient is None:
            return weights
        B, A, Q, K = query.shape
        gradient = self.gradient.float().view(B, Q, A, K).transpose(1, 2)  # (B, Q, D) -> (B, A, Q, K)
        return weights * (gradient @ value.transpose(2, 3)).clamp(min=0)  # head outputs are weights @ value


@contextmanager
def record_attention(model, attentions):
    """An `AttentionRecorder` of each of these modules, which the next forward pass fills.

    That pass runs in evaluation mode, on all patches (no token merging) and uncompiled, because compiled code skips hooks.
    Afterwards the model is as it was.
    """
    modes = {module: module.training for module in model.modules()}
    num_merged = {layer: layer.num_merged for layer in model.base_model.layers}
    recorders = []
    try:
        model.eval()
        for layer in num_merged:
            layer.num_merged = 0
        for attention in attentions:
            recorders.append(AttentionRecorder(attention))
        with torch.compiler.set_stance("force_eager"):
            yield recorders
    finally:
        for recorder in recorders:
            recorder.remove()
        for module, mode in modes.items():
            module.training = mode
        for layer, count in num_merged.items():
            layer.num_merged = count


def select_layers(layers, count: int, method: str) -> tuple[list[int], bool]:
    """Layer numbers in 0 .. count - 1, and whether a single one was asked for."""
    several = isinstance(layers, (list, tuple, range)) or (layers is None and method in ("raw", "mean"))
    if layers is None:
        layers = range(count) if several else count - 1
    selected = list(layers) if several else [layers]
    if not selected or not all(
        isinstance(layer, Integral) and layer is not True and -count <= layer < count for layer in selected
    ):
        raise ValueError(
            f"layers is {layers!r}; wanted None, a number from {-count} to {count - 1}, or a list of them"
        )
    return [layer % count for layer in selected], not several


def class_scores(logits: torch.Tensor, labels) -> torch.Tensor:
    """The logit of each image's class, (B,); of the predicted class where `labels` is None."""
    B, L = logits.shape
    given = logits.argmax(dim=1) if labels is None else labels
    given = given.tolist() if hasattr(given, "tolist") else given  # of torch or numpy
    classes = list(given) if isinstance(given, (list, tuple)) else [given] * B
    if len(classes) != B or not all(type(label) is int and 0 <= label < L for label in classes):
        raise ValueError(f"labels is {given!r}; wanted one class from 0 to {L - 1}, or one for each of {B} images")
    return logits.gather(1, torch.tensor(classes, device=logits.device).view(B, 1)).squeeze(1)


def pooling_weights(tokens, probe: AttentionRecorder | None, config) -> torch.Tensor:
    """How much of each token (B, T, D) is in the pooled vector, (B, 1, T): the query whose attention is shown."""
    B, T = tokens.shape[:2]
    R = config.num_prefix_tokens
    weights = torch.zeros(B, 1, T, device=tokens.device)
    if config.pooling.startswith("cls"):
        weights[:, :, : config.n_cls_tokens] = 1 / config.n_cls_tokens
    else:
        weights[:, :, R:] = 1 / (T - R) if probe is None else probe.attention_weights().mean(dim=1)
    return weights


def head_maps(recorders: dict[int, AttentionRecorder], selected, query, config) -> torch.Tensor:
    """Attention of the query (B, 1, T) in each head of the selected layers, (B, layers, A, N)."""
    num_queries = config.n_cls_tokens if config.pooling.startswith("cls") else None
    maps = []
    for layer in selected:
        weights = recorders[layer].attention_weights(num_queries=num_queries)  # (B, A, Q, T)
        weights = query[:, None, :, :num_queries] @ weights  # (B, A, 1, T)
        maps.append(weights.squeeze(2)[..., config.num_prefix_tokens :])  # (B, A, N)
    return torch.stack(maps, dim=1)


def rollout(recorders: dict[int, AttentionRecorder], selected, query, average_residual: bool) -> torch.Tensor:
    """The query (B, 1, T) followed down through the layers from each selected one, (B, layers, T).

    With `average_residual`, half of each layer is its residual (arXiv 2005.00928, section 3); else it is added
    (arXiv 2103.15679, equation 6).
    """
    rows, start = query.repeat(1, len(selected), 1), torch.tensor(selected, device=query.device)  # (B, layers, T)
    for layer in reversed(range(max(selected) + 1)):
        weights, begun = recorders[layer].attention_weights().mean(dim=1), start >= layer  # (B, T, T)
        mixed = rows[:, begun] + rows[:, begun] @ weights
        rows[:, begun] = mixed / 2 if average_residual else mixed
    return rows


def grad_cam(recorders: dict[int, AttentionRecorder], selected, config) -> torch.Tensor:
    """Patches read by each selected layer, their channels weighted by the mean gradient of the class, (B, layers, N)."""
    R, maps = config.num_prefix_tokens, []
    for layer in selected:
        channels = recorders[layer].gradient[:, R:].float().mean(dim=1, keepdim=True)  # (B, 1, D)
        maps.append((recorders[layer].tokens.detach()[:, R:].float() * channels).sum(dim=2).relu())  # (B, N)
    return torch.stack(maps, dim=1)


def compute_maps(method: str, recorders, probe: AttentionRecorder | None, selected, config) -> torch.Tensor:
    """Maps of the selected layers, (B, layers, N), or (B, layers, A, N) of "raw", from the recorder of each layer."""
    if method == "grad_cam":
        return grad_cam(recorders, selected, config)
    query = pooling_weights(recorders[selected[0]].tokens, probe, config)  # (B, 1, T)
    if method in ("raw", "mean"):
        maps = head_maps(recorders, selected, query, config)
        return maps.mean(dim=2) if method == "mean" else maps
    rows = rollout(recorders, selected, query, average_residual=method == "rollout")  # (B, layers, T)
    if method == "gradient_rollout" and probe is None:
        rows = rows - query  # a patch's own share: equal for all patches of a mean, none in a class token
    return rows[..., config.num_prefix_tokens :]


class AttentionMapsMixin:
    """`attention_maps`, `attention_query` and `attention_distances` of every model."""

    def attention_maps(
        self, pixel_values, layers=None, method: str = "raw", labels=None, interpolate_pos_encoding: bool = False
    ) -> torch.Tensor:
        """What the model looks at in each image, one number per patch, under any attention backend.

        The query, named by `attention_query`, is the class token (of several their mean) where the model pools it, else the mean over all patches,
        or the probe of attention pooling, whose weights then weigh the rows of the patches. Prefix tokens are left out of
        the maps. They are computed as in evaluation, with every patch, and the model is left unchanged; but hooks record
        the pass, so threads that share a model must take turns.

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
            (B, layers, A, h, w). Only the selected layers (with rollouts also those below) take memory for it.

        Raises:
            ValueError: for an unknown method or layer, for labels that are no class, or for a class of a model without a head.
        """
        vit, by_gradient = self.base_model, method in GRADIENT_METHODS
        if method not in MAP_METHODS:
            raise ValueError(f"method is {method!r}; wanted one of {', '.join(MAP_METHODS)}")
        if by_gradient and not self.is_classifier:
            raise ValueError(f"{method} follows the gradient of a class: wanted an HFViTForImageClassification")
        if labels is not None and not by_gradient:
            raise ValueError(f"{method} knows no class: leave labels out, or use {' or '.join(GRADIENT_METHODS)}")
        selected, single = select_layers(layers, len(vit.layers), method)
        recorded = list(range(max(selected) + 1)) if method.endswith("rollout") else sorted(set(selected))
        attentions = [vit.layers[layer].attention for layer in recorded]
        if vit.attention_pooling is not None and method != "grad_cam":
            attentions.append(vit.attention_pooling)
        with (
            record_attention(self, attentions) as recorders,
            torch.inference_mode(False),
            torch.set_grad_enabled(by_gradient),
        ):
            pixel_values = pixel_values.clone() if pixel_values.is_inference() else pixel_values.detach()
            if by_gradient and pixel_values.is_floating_point():
                pixel_values.requires_grad_()  # so that there is a graph even if all weights are frozen
            network = self if by_gradient else vit  # without a head, which may mask patches
            outputs = network(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
            if by_gradient:
                ends = [one.tokens if method == "grad_cam" else one.head_outputs for one in recorders]
                gradients = torch.autograd.grad(class_scores(outputs.logits, labels).sum(), ends)
                for recorder, gradient in zip(recorders, gradients, strict=True):
                    recorder.gradient = gradient
        probe = recorders[-1] if len(recorders) > len(recorded) else None
        with torch.autocast(pixel_values.device.type, enabled=False):
            of_layer = dict(zip(recorded, recorders, strict=False))
            maps = compute_maps(method, of_layer, probe, selected, self.config)  # (B, layers, ..., N)
        grid = vit.embeddings.patch_embeddings.grid_size(pixel_values)
        maps = maps.unflatten(-1, grid)  # (B, layers, ..., N) -> (B, layers, ..., h, w)
        return maps[:, 0] if single else maps

    @property
    def attention_query(self) -> str:
        """Whose attention `attention_maps` shows, in words."""
        if self.config.pooling.startswith("cls"):
            return "the class token" if self.config.n_cls_tokens == 1 else "the mean over the class tokens"
        has_probe = self.base_model.attention_pooling is not None  # a backbone never has one
        return "the probe of the attention pooling" if has_probe else "the mean over all patches"

    @torch.no_grad()
    def attention_distances(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """How far each head looks, (layers, A) in pixels: the mean distance of a patch to the patches it attends to.

        Weighted by the attention weights, normalised to a sum of 1 over the patches; the mean over all patches and images.
        Figure 7, right, and appendix D.7 of arXiv 2010.11929.

        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
        """
        vit, R = self.base_model, self.config.num_prefix_tokens
        with record_attention(self, [layer.attention for layer in vit.layers]) as recorders:
            vit(pixel_values, interpolate_pos_encoding=True)
        height, width = vit.embeddings.patch_embeddings.patch_size
        sides = (torch.arange(0, pixel_values.shape[2], height), torch.arange(0, pixel_values.shape[3], width))
        centres = torch.cartesian_prod(*sides).float().to(pixel_values.device)  # (N, 2)
        between = torch.cdist(centres, centres)  # (N, N)
        distances = []
        with torch.autocast(pixel_values.device.type, enabled=False):
            for recorder in recorders:
                weights = recorder.attention_weights()[:, :, R:, R:]  # (B, A, N, N)
                weights = weights / weights.sum(dim=3, keepdim=True)
                distances.append((weights * between).sum(dim=3).mean(dim=(0, 2)))  # (A,)
        return torch.stack(distances)
