"""A plain Vision Transformer, from pixels to logits, top to bottom. This file is copied to the Hub with the weights.

The letters of every shape below:
    B batch, C channels, H W image height and width, P patch side, h w rows and columns of patches, N = h * w patches,
    R class and register tokens before the patches, T = R + N tokens, D hidden size, A heads, K = D / A head size, L labels.

The network is that of "An Image is Worth 16x16 Words" (arXiv 2010.11929, figure 1 and section 3.1).
"""

import copy
import logging as python_logging
import re
from contextlib import contextmanager, suppress

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HFViTConfig, as_pair


logger = logging.get_logger(__name__)


# ----------------------------------------------------------------------------------------------------------------------
# Pixels to tokens


def sincos_2d(grid: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Fixed positions (1, N, D) in [-1, 1]: a quarter of the channels each for sin x, cos x, sin y, cos y.

    The variant of "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580, section 3; MoCo v3, arXiv 2104.02057).
    """
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")  # (h, w) each
    steps = hidden_size // 4
    frequencies = 10000.0 ** -(torch.arange(steps, dtype=torch.float64) / max(1, steps - 1))  # (D / 4,)
    x, y = columns.reshape(-1, 1) * frequencies, rows.reshape(-1, 1) * frequencies  # (N, D / 4) each
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float().unsqueeze(0)  # (1, N, D)


def resample_positions(positions: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Patch positions (1, N, D) of grid `old` -> grid `new`, by antialiased bicubic interpolation in float32."""
    if old == new:
        return positions
    image = positions.float().reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, N, D) -> (1, D, h, w)
    image = nn.functional.interpolate(image, size=new, mode="bicubic", antialias=True, align_corners=False)
    return image.flatten(2).transpose(1, 2).to(positions.dtype)  # (1, D, h, w) -> (1, N, D)


class HFViTPatchEmbeddings(nn.Module):
    """Cut the image into patches and project each: a convolution whose stride is its kernel."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_size = as_pair(config.patch_size)
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, self.patch_size, stride=self.patch_size)

    def forward(self, pixel_values):
        return self.projection(pixel_values).flatten(2).transpose(1, 2)  # (B, C, H, W) -> (B, D, h, w) -> (B, N, D)


class HFViTEmbeddings(nn.Module):
    """Patch tokens with their positions, behind the class token and the registers."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        self.patch_embeddings = HFViTPatchEmbeddings(config)
        hidden_size, (rows, columns) = config.hidden_size, config.grid_size
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden_size)) if config.use_class_token else None
        registers = config.num_register_tokens
        self.register_tokens = nn.Parameter(torch.empty(1, registers, hidden_size)) if registers else None
        if config.position_embedding == "learned":
            positions = int(config.use_class_token) + rows * columns
            self.position_embeddings = nn.Parameter(torch.empty(1, positions, hidden_size))
        else:  # computed, not stored: _init_weights fills it, also after from_pretrained
            self.register_buffer("position_embeddings", torch.empty(1, rows * columns, hidden_size), persistent=False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def check(self, pixel_values, interpolate_pos_encoding):
        """Raise ValueError unless pixel_values is a float (B, C, H, W) this model can read."""
        config, patch_size = self.config, self.patch_embeddings.patch_size
        if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; wanted (batch, {config.num_channels}, height, width): "
                "prepare the images with the model's image processor"
            )
        if not pixel_values.is_floating_point():
            raise ValueError(
                f"pixel_values has dtype {pixel_values.dtype}; wanted floats that the model's image processor normalised"
            )
        size = tuple(pixel_values.shape[2:])
        if not interpolate_pos_encoding and size != as_pair(config.image_size):
            raise ValueError(
                f"pixel_values is {size[0]}x{size[1]} pixels but the model takes {'x'.join(map(str, as_pair(config.image_size)))}: "
                "resize the images, or pass interpolate_pos_encoding=True"
            )
        if size[0] % patch_size[0] or size[1] % patch_size[1]:
            raise ValueError(
                f"pixel_values is {size[0]}x{size[1]} pixels, which patches of {patch_size} do not divide"
            )

    def positions(self, grid):
        """Positions of the class token (1, 1, D), or None, and of the patches (1, N, D) on this grid."""
        config = self.config
        if config.position_embedding == "sincos2d":
            if grid == config.grid_size:
                return None, self.position_embeddings
            return None, sincos_2d(grid, config.hidden_size).to(self.position_embeddings)
        of_class, of_patches = self.position_embeddings.split(
            [int(config.use_class_token), self.position_embeddings.shape[1] - int(config.use_class_token)], dim=1
        )
        return of_class, resample_positions(of_patches, config.grid_size, grid)

    def forward(self, pixel_values, interpolate_pos_encoding=False):
        self.check(pixel_values, interpolate_pos_encoding)
        patch_height, patch_width = self.patch_embeddings.patch_size
        grid = (pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width)  # (h, w)
        of_class, of_patches = self.positions(grid)
        tokens = [self.patch_embeddings(pixel_values) + of_patches]  # (B, N, D)
        if self.register_tokens is not None:
            tokens.insert(0, self.register_tokens.expand(pixel_values.shape[0], -1, -1))
        if self.cls_token is not None:
            cls_token = self.cls_token if of_class is None else self.cls_token + of_class
            tokens.insert(0, cls_token.expand(pixel_values.shape[0], -1, -1))
        return self.dropout(torch.cat(tokens, dim=1))  # (B, T, D)


# ----------------------------------------------------------------------------------------------------------------------
# The transformer layer


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """softmax(q k^T / sqrt(K)) v, written out: (B, A, T, K) -> (B, T, A, K), and the weights (B, A, T, T)."""
    weights = query @ key.transpose(2, 3) * scaling  # (B, A, T, T)
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


class HFViTAttention(nn.Module):
    """Multi-head self-attention, computed by the backend that `attn_implementation` names."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False  # without it sdpa hides every later patch
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, **kwargs):
        B, T, D = hidden_states.shape
        query = self.q_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, T, D) -> (B, A, T, K)
        key = self.k_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, A, T, K)
        value = self.v_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, A, T, K)
        # Only the eager backend has the weights to give.
        wanted = kwargs.get("output_attentions", self.config.output_attentions)
        backend = "eager" if wanted else self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        attended, weights = attend(self, query, key, value, None, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(attended.reshape(B, T, D)), weights  # (B, T, A, K) -> (B, T, D), (B, A, T, T)


class HFViTMLP(nn.Module):
    """Two dense layers with an activation between them, applied to each token."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.fc2(self.activation(self.fc1(hidden_states)))  # (B, T, D)


class HFViTLayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (arXiv 2103.17239, section 2)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states):
        return hidden_states * self.lambda1  # (B, T, D)


class HFViTDropPath(nn.Module):
    """Drop the residual branch of whole samples while training (stochastic depth, arXiv 1603.09382, section 3)."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, hidden_states):
        if not self.training or self.probability == 0:
            return hidden_states
        keep = hidden_states.new_empty(hidden_states.shape[0], 1, 1).bernoulli_(1 - self.probability)  # (B, 1, 1)
        return hidden_states * keep / (1 - self.probability)

    def extra_repr(self):
        return f"probability={self.probability:.3f}"


class HFViTLayer(GradientCheckpointingLayer):
    """Pre-norm transformer layer: attention, then MLP, each with a residual (arXiv 2010.11929, equations 2 and 3)."""

    def __init__(self, config: HFViTConfig, index: int):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = HFViTAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HFViTMLP(config)
        scaled = config.layerscale_value is not None
        self.layer_scale1 = HFViTLayerScale(config) if scaled else nn.Identity()
        self.layer_scale2 = HFViTLayerScale(config) if scaled else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = HFViTDropPath(config.drop_path_rate * index / max(1, config.num_hidden_layers - 1))

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.attention(self.layernorm_before(hidden_states), **kwargs)  # (B, T, D)
        hidden_states = hidden_states + self.drop_path(self.layer_scale1(self.dropout(attended)))
        expanded = self.mlp(self.layernorm_after(hidden_states))  # (B, T, D)
        return hidden_states + self.drop_path(self.layer_scale2(self.dropout(expanded)))


# ----------------------------------------------------------------------------------------------------------------------
# Models


@contextmanager
def own_report():
    """Silence transformers' loading table, unless a tensor could not be converted: ours says what happened, or raises."""
    table = python_logging.getLogger("transformers.modeling_utils")
    keep = lambda record: "LOAD REPORT" not in record.getMessage() or "CONVERSION" in record.getMessage()
    table.addFilter(keep)
    try:
        yield
    finally:
        table.removeFilter(keep)


class HFViTPreTrainedModel(PreTrainedModel):
    """What every model here shares: the config class, the initial weights, and loading that never guesses."""

    config_class = HFViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # Trainer then divides the loss by the accumulation steps itself
    _no_split_modules = ["HFViTEmbeddings", "HFViTLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HFViTLayer, "attentions": HFViTAttention}
    _input_embed_layer = "patch_embeddings"

    def __init__(self, config: HFViTConfig, *args, **kwargs):
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        # As in the ViT paper's code: LeCun normal for patches, Xavier uniform for dense layers, a small normal for tokens.
        # Only functions of `transformers.initialization`: they leave alone what from_pretrained has already loaded.
        std = self.config.initializer_range
        if isinstance(module, nn.Conv2d):
            init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, HFViTLayerScale):
            init.constant_(module.lambda1, self.config.layerscale_value)
        elif isinstance(module, HFViTEmbeddings):
            for token in (module.cls_token, module.register_tokens):
                if token is not None:
                    init.normal_(token, std=std)
            if self.config.position_embedding == "learned":
                init.normal_(module.position_embeddings, std=std)
            else:
                init.copy_(module.position_embeddings, sincos_2d(self.config.grid_size, self.config.hidden_size))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """Load our own repos and every public format of `HFViTConfig.families`; arguments as in transformers.

        `num_labels=` may differ from the checkpoint: the head alone is then reset, and a log line says so.

        Raises:
            ValueError: when any other tensor is missing, unexpected or of another shape, with its name.
        """
        kwargs.pop("ignore_mismatched_sizes", None)  # it would hide every mismatch; a reset head needs no permission
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            kwargs["_loading_model"] = True  # HFViTConfig.from_dict takes it
        elif config.model_type != cls.config_class.model_type:
            raise ValueError(f"config is a {type(config).__name__}; leave it out, or pass an HFViTConfig")
        elif pretrained_model_name_or_path is not None:
            with suppress(OSError):  # a folder without config.json is ours, as the given config says
                found, _ = cls.config_class.get_config_dict(pretrained_model_name_or_path, **kwargs)
                if "_family" in found:
                    kwargs["config"] = config = copy.deepcopy(config)
                    config.model_type = f"{cls.config_class.model_type}<{found['_family']}"
        with own_report():
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *model_args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
        if getattr(model, "_hf_peft_config_loaded", False):  # info is then about the adapter, not its base
            wrong = {*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])}
            if wrong:
                raise ValueError(
                    f"the adapter {pretrained_model_name_or_path} does not fit its base model: {', '.join(sorted(wrong)[:5])}"
                )
        return (model, info) if output_loading_info else model

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        family = model.config.__dict__.pop("model_type", HFViTConfig.model_type).rpartition("<")[2]
        model._weight_conversions = []  # whatever was read, our own names are written
        model._account_for(loading_info.to_dict(), load_config.pretrained_model_name_or_path, family)
        return loading_info

    def _account_for(self, info, source, family):
        """Explain every difference between checkpoint and model in one log line, or raise ValueError."""
        missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
        mismatched = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]}
        notes = [] if family == HFViTConfig.model_type else [f"read as {family}"]

        # The head and the pooler are reset or left out as a whole; half a head is a broken file.
        head = {name for name in missing | set(mismatched) if name.startswith("classifier.")}
        if head == {"classifier.weight", "classifier.bias"}:
            found = mismatched.get("classifier.weight", (("none",), None))[0][0]
            notes.append(f"classifier reset to {self.config.num_labels} labels (the checkpoint has {found})")
            missing, mismatched = missing - head, {name: mismatched[name] for name in set(mismatched) - head}
        if missing == {"pooler.dense.weight", "pooler.dense.bias"}:
            self.pooler = self.config.pooler_act = None
            notes.append("no pooler in the checkpoint: pooler_output is the pooled token itself")
            missing = set()
        left_out = {
            name for name in unexpected if re.fullmatch(r"(classifier|(vit\.)?pooler\.dense)\.(weight|bias)", name)
        }
        if left_out:
            notes.append(f"left out {', '.join(sorted(left_out))}")

        wrong = [f"{name} is missing" for name in sorted(missing)]
        wrong += [f"{name} is not known to the model" for name in sorted(unexpected - left_out)]
        wrong += [
            f"{name} has shape {found}, the model {wanted}" for name, (found, wanted) in sorted(mismatched.items())
        ]
        if wrong:
            more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(
                f"the weights of {source} do not fit {type(self).__name__}: {'; '.join(wrong[:5])}{more}. "
                "Only the classifier may differ: check that the sizes asked for are those of the checkpoint (for other image "
                "sizes pass interpolate_pos_encoding=True to the loaded model), and that config.json and file are whole"
            )
        if notes:
            logger.warning(f"{type(self).__name__} from {source}: {'; '.join(notes)}.")


class HFViTPooler(nn.Module):
    """The dense layer of checkpoints such as google/vit-base-patch16-224-in21k: activation(W x + b)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.pooler_act]

    def forward(self, pooled):
        return self.activation(self.dense(pooled))  # (B, D)


class HFViTModel(HFViTPreTrainedModel):
    """Pixels to tokens: embeddings, layers, final norm, and one pooled vector an image.

    Args:
        config: the architecture.
        add_pooling_layer: whether the dense layer of `config.pooler_act` is built, where there is one.
    """

    def __init__(self, config: HFViTConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = HFViTEmbeddings(config)
        self.layers = nn.ModuleList([HFViTLayer(config, index) for index in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = HFViTPooler(config) if add_pooling_layer and config.pooler_act is not None else None
        self.post_init()

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False, **kwargs
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            `last_hidden_state` (B, T, D) after the final norm, `pooler_output` (B, D), and when asked for
            `hidden_states`, the input of the first layer and the output of each, (B, T, D) before the final norm,
            and `attentions`, (B, A, T, T) a layer.

        Raises:
            ValueError: if pixel_values has other channels, another size or another kind of numbers than the model.
        """
        weight = self.embeddings.patch_embeddings.projection.weight
        if pixel_values.is_floating_point():
            pixel_values = pixel_values.to(weight.dtype)
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)  # (B, C, H, W) -> (B, T, D)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)  # (B, T, D)
        hidden_states = self.layernorm(hidden_states)  # (B, T, D)
        if self.config.pooling == "cls":
            pooled = hidden_states[:, 0]  # (B, T, D) -> (B, D)
        else:
            pooled = hidden_states[:, self.config.num_prefix_tokens :].mean(dim=1)  # (B, T, D) -> (B, D)
        if self.pooler is not None:
            pooled = self.pooler(pooled)  # (B, D)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class HFViTForImageClassification(HFViTPreTrainedModel):
    """The pooled vector and one dense layer: pixels to logits."""

    def __init__(self, config: HFViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = HFViTModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self.classifier:  # zero head: the first loss is exactly log(L) (arXiv 2010.11929, appendix B.1.1)
            init.zeros_(module.weight)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs,
    ) -> ImageClassifierOutput:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            labels: (B,) class indices, or (B, L) probabilities, see `classification_loss`.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            `logits` (B, L), `loss` where labels are given, `hidden_states` and `attentions` when asked for.
        """
        outputs = self.vit(pixel_values, interpolate_pos_encoding, **kwargs)
        logits = self.classifier(outputs.pooler_output)  # (B, D) -> (B, L)
        return ImageClassifierOutput(
            loss=None if labels is None else classification_loss(logits, labels, self.config.problem_type),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def classification_loss(logits: torch.Tensor, labels: torch.Tensor, problem_type: str | None = None) -> torch.Tensor:
    """Mean cross-entropy in float32; nothing is guessed from the first batch and nothing is written to the config.

    Args:
        logits: (B, L).
        labels: (B,) class indices in [0, L), or (B, L) probabilities (mixup, distillation).
        problem_type: None, "single_label_classification", or, only where the config names it,
            "multi_label_classification": labels (B, L) in {0, 1} and one binary cross-entropy a label.

    Raises:
        ValueError: if the labels have another shape, or (on CPU, where looking is free) another range.
    """
    batch, num_labels = logits.shape
    logits = logits.float()
    if labels.shape == logits.shape and (labels.is_floating_point() or problem_type == "multi_label_classification"):
        if problem_type == "multi_label_classification":
            return nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        return nn.functional.cross_entropy(logits, labels.float())
    if (
        labels.shape != (batch,)
        or labels.is_floating_point()
        or problem_type not in (None, "single_label_classification")
    ):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}, problem_type {problem_type!r}; wanted "
            f"({batch},) integers, or ({batch}, {num_labels}) float probabilities"
        )
    look = labels.device.type == "cpu" and batch > 0 and not torch.compiler.is_compiling()
    if look and not 0 <= int(labels.min()) <= int(labels.max()) < num_labels:
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())} but the model has {num_labels} labels "
            f"(0 to {num_labels - 1}): load it with the data's num_labels, or mend the labels"
        )
    return nn.functional.cross_entropy(logits, labels.long())


__all__ = ["HFViTPreTrainedModel", "HFViTModel", "HFViTForImageClassification"]
