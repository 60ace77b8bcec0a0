"""A plain Vision Transformer, from pixels to logits, top to bottom.

The letters of every shape:
    B batch, C channels, H W image height and width, P patch side, h w rows and columns of patches, N = h * w patches,
    R prefix tokens (class tokens, distillation, registers), T = R + N tokens, D hidden size, A heads, K = D / A head size,
    F width of the MLP, L labels, M patches that patch dropout or masking keeps, Q queries: Q = T, but the class tokens alone in the last layer if
    no more tokens than these are pooled (`pooled_only`). The network is that of "An Image is Worth 16x16 Words" (arXiv 2010.11929, figure 1).
"""

from typing import Unpack

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .attention_maps import AttentionMapsMixin
from .configuration_hf_vit import HFViTConfig, as_pair
from .loading import LoadingMixin
from .patches import drop_patches, keep_patches, patchify
from .pooled_queries import num_pooled_tokens
from .positions import apply_rotary, fixed_position_embeddings, resample_position_embeddings, rotary_2d
from .resizing import ResizingMixin, check_pixel_values
from .token_merging import TokenMerging, TokenMergingMixin, mean_patch, proportional_attention_bias


# ----------------------------------------------------------------------------------------------------------------------
# Pixels to tokens


class HFViTPatchEmbeddings(nn.Module):
    """Cut the image into patches and project each: a convolution whose stride is its kernel, or a dense layer between norms."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_size = as_pair(config.patch_size)
        self.by_convolution = config.patch_projection == "conv"
        if self.by_convolution:
            self.projection = nn.Conv2d(
                config.num_channels, config.hidden_size, self.patch_size, self.patch_size, bias=config.patch_bias
            )
        else:
            flat = config.num_channels * self.patch_size[0] * self.patch_size[1]
            self.layernorm_before = nn.LayerNorm(flat, eps=config.layer_norm_eps)
            self.projection = nn.Linear(flat, config.hidden_size)
            self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        """The type of pixels it takes; the weight of a quantised dense layer does not tell."""
        return (self.projection if self.by_convolution else self.layernorm_after).weight.dtype

    def grid_size(self, pixel_values) -> tuple[int, int]:
        """Rows and columns of patches, (h, w), of images (B, C, H, W)."""
        return pixel_values.shape[2] // self.patch_size[0], pixel_values.shape[3] // self.patch_size[1]

    def forward(self, pixel_values):
        if self.by_convolution:
            patches = self.projection(pixel_values)  # (B, C, H, W) -> (B, D, h, w)
            return patches.flatten(2).transpose(1, 2)  # (B, D, h, w) -> (B, N, D)
        patches = patchify(pixel_values, self.patch_size)  # (B, C, H, W) -> (B, N, P * P * C)
        return self.layernorm_after(self.projection(self.layernorm_before(patches)))  # (B, N, D)


class HFViTEmbeddings(nn.Module):
    """Class token, distillation token, registers, then the patches with their positions."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        self.patch_embeddings = HFViTPatchEmbeddings(config)
        hidden_size, (rows, columns) = config.hidden_size, config.grid_size
        learned = lambda count: nn.Parameter(torch.empty(1, count, hidden_size)) if count else None
        self.cls_token = learned(config.num_class_tokens)
        self.distillation_token = learned(int(config.use_distillation_token))
        self.register_tokens = learned(config.num_register_tokens)
        # Class tokens and distillation token have learned and sincos1d positions, registers never (arXiv 2309.16588, section 3).
        self.num_positioned = config.num_class_tokens + int(config.use_distillation_token)
        if config.position_embedding == "learned":
            self.position_embeddings = learned(self.num_positioned + rows * columns)
        self.layernorm = (
            nn.LayerNorm(hidden_size, eps=config.layer_norm_eps) if config.embedding_norm else nn.Identity()
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def positions_on_grid(self, grid):
        """Positions of the prefix tokens that have one, (1, 0 or more, D), and of the patches, (1, N, D), on this grid (h, w)."""
        config = self.config
        if config.position_embedding == "learned":
            num_patches = self.position_embeddings.shape[1] - self.num_positioned
            prefix, patches = self.position_embeddings.split([self.num_positioned, num_patches], dim=1)
            return prefix, resample_position_embeddings(patches, config.grid_size, grid, config)
        device, dtype = self.patch_embeddings.projection.weight.device, self.patch_embeddings.dtype
        table = fixed_position_embeddings(
            config.position_embedding, self.num_positioned, grid, config.hidden_size, device, dtype
        )
        return table.split([table.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], dim=1)

    def forward(self, pixel_values, interpolate_pos_encoding=False):
        check_pixel_values(pixel_values, self.config, interpolate_pos_encoding)  # the flag only permits other sizes
        patches = self.patch_embeddings(pixel_values)  # (B, C, H, W) -> (B, N, D)
        prefix = [
            token for token in (self.cls_token, self.distillation_token) if token is not None
        ]  # (1, 1 or more, D) each
        if self.config.position_embedding not in ("rotary", "none"):
            grid = self.patch_embeddings.grid_size(pixel_values)  # (h, w)
            prefix_positions, patch_positions = self.positions_on_grid(grid)
            patches = patches + patch_positions
            if prefix_positions.shape[1]:
                prefix = [torch.cat(prefix, dim=1) + prefix_positions]  # (1, 1 or more, D)
        if self.register_tokens is not None:
            prefix.append(self.register_tokens)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in prefix]
        return self.dropout(self.layernorm(torch.cat([*prefix, patches], dim=1)))  # (B, T, D)


# ----------------------------------------------------------------------------------------------------------------------
# The transformer layer


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """softmax(q k^T / sqrt(K)) v: q (B, A, Q, K), k and v (B, A, T, K) -> (B, Q, A, K), and the weights (B, A, Q, T)."""
    weights = query @ key.transpose(2, 3) * scaling  # (B, A, Q, T)
    if attention_mask is not None:
        weights = weights + attention_mask  # (B, 1, 1, T)
    precision = torch.promote_types(query.dtype, torch.float32)
    weights = nn.functional.softmax(weights, dim=-1, dtype=precision).to(query.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


def split_heads(tokens: torch.Tensor, head_dim: int) -> torch.Tensor:
    return tokens.view(*tokens.shape[:2], -1, head_dim).transpose(1, 2)  # (B, T, D) -> (B, A, T, K)


class HFViTAttention(nn.Module):
    """Multi-head self-attention, computed by the backend that `attn_implementation` names."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False  # otherwise sdpa hides every later patch
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias and config.key_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()

    def project(self, hidden_states, num_queries=None, rotary=None):
        """Tokens (B, T, D) -> queries (B, A, Q, K) of the first `num_queries` (None: all), keys and values (B, A, T, K)."""
        query = self.q_norm(split_heads(self.q_proj(hidden_states[:, :num_queries]), self.head_dim))  # (B, A, Q, K)
        key = self.k_norm(split_heads(self.k_proj(hidden_states), self.head_dim))  # (B, A, T, K)
        value = split_heads(self.v_proj(hidden_states), self.head_dim)  # (B, A, T, K)
        if rotary is not None:
            query = apply_rotary(query, *rotary) if num_queries is None else query  # a few are all prefix tokens
            key = apply_rotary(key, *rotary)
        return query, key, value

    def forward(self, hidden_states, num_queries=None, rotary=None, token_merging=None, **kwargs):
        """Tokens (B, T, D) -> what the first `num_queries` of them (None: all) attend to, (B, Q, D), and the weights."""
        query, key, value = self.project(hidden_states, num_queries, rotary)
        wants_weights = kwargs.get("output_attentions", self.config.output_attentions)  # "eager" alone returns them
        backend, bias = "eager" if wants_weights else self.config._attn_implementation, None
        if token_merging is not None:
            token_merging.key = key  # read when `HFViTLayer.merge` calls it
            bias = proportional_attention_bias(token_merging.sizes, query)  # (B, 1, 1, T)
            if bias is not None and backend != "eager":
                backend = "sdpa"  # not every backend takes a mask of floats
        if backend == "sdpa" and query.is_cuda and query.shape[2] == 1:
            backend = "eager"  # as fast; the backward pass of cuDNN's kernel fails for one query (pytorch#138529)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        attended, weights = attend(self, query, key, value, bias, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(attended.flatten(2)), weights  # (B, Q, A, K) -> (B, Q, D), (B, A, Q, T)


class HFViTMLP(nn.Module):
    """Two dense layers with an activation between them, applied to each token."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.fc2(self.activation(self.fc1(hidden_states)))  # (..., D) -> (..., F) -> (..., D)


class HFViTGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): three dense layers; SwiGLU if the activation is "silu" (arXiv 2002.05202, equation 6)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        gate = self.activation(self.gate_proj(hidden_states))  # (..., D) -> (..., F)
        return self.down_proj(gate * self.up_proj(hidden_states))  # (..., F) -> (..., D)


class HFViTLayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (arXiv 2103.17239, section 2)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states):
        return hidden_states * self.lambda1  # (..., D)


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


class HFViTLayer(GradientCheckpointingLayer):
    """Pre-norm transformer layer: attention, then MLP, each with a residual (arXiv 2010.11929, equations 2 and 3)."""

    def __init__(self, config: HFViTConfig, index: int):
        super().__init__()
        self.num_merged = 0  # patches merged here in evaluation, see `set_token_merging`
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = HFViTAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HFViTGatedMLP(config) if config.gated_mlp else HFViTMLP(config)
        has_scale = config.layerscale_value is not None
        self.layer_scale1 = HFViTLayerScale(config) if has_scale else nn.Identity()
        self.layer_scale2 = HFViTLayerScale(config) if has_scale else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = HFViTDropPath(config.drop_path_rate * index / max(1, config.num_hidden_layers - 1))

    def merge(self, hidden_states, num_queries, token_merging):
        """Tokens (B, Q, D) between attention and MLP, fewer of them where patches are merged."""
        if token_merging is None or num_queries is not None:
            return hidden_states
        return token_merging(hidden_states, self.num_merged)

    def forward(self, hidden_states, num_queries=None, token_merging=None, **kwargs):
        """Tokens (B, T, D) -> the first `num_queries` of them (None: all), (B, Q, D)."""
        normed = self.layernorm_before(hidden_states)  # (B, T, D)
        attended, _ = self.attention(normed, num_queries, token_merging=token_merging, **kwargs)  # (B, Q, D)
        hidden_states = hidden_states[:, :num_queries] + self.drop_path(self.layer_scale1(self.dropout(attended)))
        hidden_states = self.merge(hidden_states, num_queries, token_merging)
        transformed = self.mlp(self.layernorm_after(hidden_states))  # (B, Q, D)
        return hidden_states + self.drop_path(self.layer_scale2(self.dropout(transformed)))


class HFViTPostNormLayer(HFViTLayer):
    """Post-norm layer: `layernorm_before` and `layernorm_after` follow the two sums (arXiv 1706.03762, section 3.1)."""

    def forward(self, hidden_states, num_queries=None, token_merging=None, **kwargs):
        """Tokens (B, T, D) -> the first `num_queries` of them (None: all), (B, Q, D)."""
        attended, _ = self.attention(hidden_states, num_queries, token_merging=token_merging, **kwargs)  # (B, Q, D)
        hidden_states = hidden_states[:, :num_queries] + self.drop_path(self.layer_scale1(self.dropout(attended)))
        hidden_states = self.merge(self.layernorm_before(hidden_states), num_queries, token_merging)
        transformed = self.mlp(hidden_states)  # (B, Q, D)
        return self.layernorm_after(hidden_states + self.drop_path(self.layer_scale2(self.dropout(transformed))))


# ----------------------------------------------------------------------------------------------------------------------
# Tokens to one vector


class HFViTPooler(nn.Module):
    """The dense layer of checkpoints such as google/vit-base-patch16-224-in21k: activation(W x + b)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.pooler_act]

    def forward(self, pooled):
        return self.activation(self.dense(pooled))  # (B, D)


class HFViTAttentionPooling(nn.Module):
    """A learned probe attends to the patches, then an MLP with a residual: "MAP" (arXiv 2106.04560, section 2.1)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HFViTGatedMLP(config) if config.gated_mlp else HFViTMLP(config)

    def project(self, patches):
        """Patches (B, N, D) -> the probe's query (B, A, 1, K), keys and values (B, A, N, K)."""
        query = split_heads(self.q_proj(self.probe), self.head_dim)  # (1, A, 1, K)
        key, value = (split_heads(project(patches), self.head_dim) for project in (self.k_proj, self.v_proj))
        return query.expand(patches.shape[0], -1, -1, -1), key, value

    def forward(self, patches, sizes=None):
        query, key, value = self.project(patches)
        bias = proportional_attention_bias(sizes, query)  # (B, 1, 1, N)
        attended, _ = eager_attention_forward(self, query, key, value, bias, self.head_dim**-0.5)  # (B, 1, A, K)
        pooled = self.o_proj(attended.reshape(patches.shape[0], -1))  # (B, D)
        return pooled + self.mlp(self.layernorm(pooled))


# ----------------------------------------------------------------------------------------------------------------------
# Models


class HFViTPreTrainedModel(LoadingMixin, ResizingMixin, TokenMergingMixin, AttentionMapsMixin, PreTrainedModel):
    """What every model shares: config class, initial weights, and the methods of loading.py, resizing.py and the other siblings."""

    config_class = HFViTConfig
    base_model_prefix = "vit"
    is_classifier = is_autoencoder = False
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # Trainer then divides the loss by the accumulation steps itself
    _no_split_modules = ["HFViTEmbeddings", "HFViTLayer", "HFViTPostNormLayer"]
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
        # LeCun normal for patches and Xavier uniform for dense layers, as in the ViT paper's code; a small normal for tokens.
        # Only functions of `transformers.initialization`: they leave alone what from_pretrained has already loaded.
        std = self.config.initializer_range
        if isinstance(module, nn.Conv2d):
            init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if module.bias is not None:
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
            for token in (module.cls_token, module.distillation_token, module.register_tokens):
                if token is not None:
                    init.normal_(token, std=std)
            if self.config.position_embedding == "learned":
                init.normal_(module.position_embeddings, std=std)
        elif isinstance(module, HFViTAttentionPooling):
            init.normal_(module.probe, std=std)
        else:  # modules of a subclass, and those without weights
            super()._init_weights(module)


class HFViTModel(HFViTPreTrainedModel):
    """Pixels to tokens: embeddings, layers, final norm, and one pooled vector an image.

    Args:
        config: the architecture.
        add_pooling_layer: whether the dense layer of `config.pooler_act` is built, where there is one.
    """

    def __init__(self, config: HFViTConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = HFViTEmbeddings(config)
        layer_class = HFViTLayer if config.norm_first else HFViTPostNormLayer
        self.layers = nn.ModuleList([layer_class(config, index) for index in range(config.num_hidden_layers)])
        has_norm = config.final_norm != "none"
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if has_norm else nn.Identity()
        self.attention_pooling = HFViTAttentionPooling(config) if config.pooling == "map" else None
        self.pooler = HFViTPooler(config) if add_pooling_layer and config.pooler_act is not None else None
        if self.pooler is not None and config.pooled_size != config.hidden_size:
            raise ValueError(
                f'pooler_act takes {config.hidden_size} channels, not the two vectors of pooling "{config.pooling}"'
            )
        self.post_init()

    def encode(self, pixel_values, interpolate_pos_encoding=False, num_queries=None, kept=None, **kwargs):
        """Pixels (B, C, H, W) -> tokens (B, T, D) before the final norm, or the first `num_queries`; of the patches `kept` (B, M) or all."""
        if kwargs.pop("attention_mask", None) is not None:  # PEFT passes None
            raise ValueError("attention_mask: every patch is attended to; leave it out, or pass None")
        config, patch_embeddings = self.config, self.embeddings.patch_embeddings
        if pixel_values.is_floating_point():
            pixel_values = pixel_values.to(patch_embeddings.dtype)
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)  # (B, C, H, W) -> (B, T, D)
        rotary = None
        if config.position_embedding == "rotary":
            grid, head_dim = patch_embeddings.grid_size(pixel_values), config.hidden_size // config.num_attention_heads
            rotary = rotary_2d(grid, head_dim, config.rope_theta, hidden_states)  # (N, K) each
        if kept is not None:
            hidden_states = keep_patches(hidden_states, config.num_prefix_tokens, kept)  # (B, R + M, D)
        elif self.training and config.patch_dropout_rate > 0:
            hidden_states, kept = drop_patches(hidden_states, config.num_prefix_tokens, config.patch_dropout_rate)
        if kept is not None and rotary is not None:
            rotary = tuple(table[kept].unsqueeze(1) for table in rotary)  # (N, K) -> (B, 1, M, K)
        *layers, last_layer = self.layers
        for layer in layers:
            hidden_states = layer(hidden_states, rotary=rotary, **kwargs)  # (B, T, D)
        return last_layer(hidden_states, num_queries, rotary=rotary, **kwargs)  # (B, Q, D)

    @capture_outputs(tie_last_hidden_states=False)
    def features(self, pixel_values, interpolate_pos_encoding, **kwargs):  # `encode`, with hidden states by hooks
        return BaseModelOutput(last_hidden_state=self.encode(pixel_values, interpolate_pos_encoding, **kwargs))

    def pool(self, hidden_states, sizes=None):
        """Tokens (B, T, D) -> the vector that `config.pooling` names, (B, D), or (B, 2 D) where it names two.

        `sizes` (B, T, 1): how many patches are in each token; None while each is one.
        """
        patches = hidden_states[:, self.config.num_prefix_tokens :]  # (B, T, D) -> (B, N, D)
        sizes = None if sizes is None else sizes[:, self.config.num_prefix_tokens :]  # (B, T, 1) -> (B, N, 1)
        class_token = hidden_states[:, : self.config.n_cls_tokens].mean(dim=1)  # (B, D), of several their mean
        if self.config.pooling == "cls":
            return class_token
        if self.config.pooling == "mean":
            return mean_patch(patches, sizes)  # (B, D)
        if self.config.pooling == "cls_mean":
            return torch.cat([class_token, mean_patch(patches, sizes)], dim=1)  # (B, 2 D)
        if self.config.pooling == "cls_distillation":
            return torch.cat([class_token, hidden_states[:, self.config.n_cls_tokens]], dim=1)  # (B, 2 D)
        return self.attention_pooling(patches, sizes)  # (B, N, D) -> (B, D)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values, interpolate_pos_encoding=False, pooled_only=False, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.
            pooled_only: compute no more than `pooler_output` needs: where a class token is pooled, the last layer computes
                that token alone, and `last_hidden_state` is (B, 1, D). With hooks on that layer, or when `hidden_states` or
                `attentions` are asked for, all tokens are computed.

        Returns:
            `last_hidden_state` (B, T, D), after the final norm where `config.final_norm` is "tokens"; `pooler_output`
            (B, D), or (B, 2 D) where two vectors are pooled; and when asked for `hidden_states`, the input of the first
            layer and the output of each, (B, T, D) before the final norm, and `attentions`, (B, A, T, T) per layer.

        Raises:
            ValueError: if pixel_values has other channels, another size or another kind of numbers than the model.
        """
        num_queries = num_pooled_tokens(self, **kwargs) if pooled_only else None
        merges = not self.training and any(layer.num_merged for layer in self.layers)
        token_merging = TokenMerging(self.config.num_prefix_tokens) if merges else None
        kwargs["token_merging"] = token_merging
        hidden_states = self.encode(pixel_values, interpolate_pos_encoding, num_queries, **kwargs)  # (B, T, D)
        if self.config.final_norm == "tokens":
            hidden_states = self.layernorm(hidden_states)
        pooled = self.pool(hidden_states, token_merging.sizes if merges else None)  # (B, T, D) -> (B, D)
        if self.config.final_norm == "pooled":
            pooled = self.layernorm(pooled)
        if self.pooler is not None:
            pooled = self.pooler(pooled)  # (B, D)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class HFViTForImageClassification(HFViTPreTrainedModel):
    """The pooled vector and one dense layer, after a tanh layer where `config.representation_size` asks: pixels to logits."""

    is_classifier = True

    def __init__(self, config: HFViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = HFViTModel(config, add_pooling_layer=False)
        hidden, width = config.representation_size, config.representation_size or config.pooled_size
        self.pre_logits = nn.Linear(config.pooled_size, hidden) if hidden is not None else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self.classifier:  # zero head: the first loss is exactly log(L) (arXiv 2010.11929, appendix B.1.1)
            init.zeros_(module.weight)

    @can_return_tuple
    def forward(
        self, pixel_values, labels=None, interpolate_pos_encoding=False, **kwargs: Unpack[TransformersKwargs]
    ) -> ImageClassifierOutput:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            labels: as transformers takes them, by `config.problem_type` or, where that is None, by what they look like: (B,) or
                (B, 1) class indices, of which -100 do not count; (B, L) floats in [0, 1], a binary cross-entropy a label; with one
                label, floats, a squared error. `model.loss_function = f` takes another loss.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            `logits` (B, L), `loss` where labels are given, `hidden_states` and `attentions` when asked for.

        Raises:
            IndexError: of the cross-entropy on the CPU, for class indices that the model does not have.
        """
        outputs = self.vit(pixel_values, interpolate_pos_encoding, pooled_only=True, **kwargs)
        pooled = outputs.pooler_output  # (B, D) or (B, 2 D)
        if self.pre_logits is not None:
            pooled = self.dropout(self.pre_logits(pooled).tanh())
        logits = self.classifier(pooled)  # (B, L)
        loss = None if labels is None else self.compute_loss(logits, labels, **kwargs)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    def compute_loss(self, logits, labels, **kwargs):
        """`self.loss_function`; the problem type that it guesses from one batch is not kept, nor written to config.json."""
        problem_type = self.config.problem_type
        if problem_type == "multi_label_classification":
            labels = labels.float()
        try:
            return self.loss_function(labels, logits.float(), self.config, **kwargs)
        finally:
            self.config.problem_type = problem_type


class HFViTBackbone(BackboneMixin, HFViTModel):
    """Pixels to feature maps, for detectors, segmenters and any head of your own.

    `config.out_indices` (0 the embeddings, i the output of layer i) or `config.out_features` ("stem", "stage1", ...) name
    the layers; both may be given to `from_pretrained`.
    """

    def __init__(self, config: HFViTConfig):
        config.set_output_features_output_indices(config.out_features, config.out_indices)
        if config.patch_dropout_rate > 0:
            raise ValueError("a backbone gives maps of all patches: patch_dropout_rate must be 0")
        super().__init__(config, add_pooling_layer=False)
        self.attention_pooling = None  # maps are not pooled
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    def set_token_merging(self, r):
        raise ValueError("a backbone gives maps of all patches: merge tokens in an HFViTModel or a classifier")

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self, pixel_values, interpolate_pos_encoding=True, **kwargs: Unpack[TransformersKwargs]
    ) -> BackboneOutput:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions, as the
                detectors and segmenters of transformers expect.

        Returns:
            `feature_maps`, (B, D, h, w) for each layer asked for, or (B, T, D) where `config.reshape_hidden_states` is False,
            through the final norm where `config.final_norm` is "tokens" and `config.apply_layernorm`; `hidden_states` and
            `attentions` when asked for.
        """
        outputs = self.features(pixel_values, interpolate_pos_encoding, **kwargs)
        grid, maps = self.embeddings.patch_embeddings.grid_size(pixel_values), []  # (h, w)
        for index in self.out_indices:
            tokens = outputs.hidden_states[index]  # (B, T, D)
            if self.config.final_norm == "tokens" and self.config.apply_layernorm:
                tokens = self.layernorm(tokens)
            if self.config.reshape_hidden_states:
                patches = tokens[:, self.config.num_prefix_tokens :]  # (B, N, D)
                tokens = patches.transpose(1, 2).unflatten(2, grid)  # (B, N, D) -> (B, D, h, w)
            maps.append(tokens)
        return BackboneOutput(tuple(maps), outputs.hidden_states, outputs.attentions)


__all__ = ["HFViTPreTrainedModel", "HFViTModel", "HFViTForImageClassification", "HFViTBackbone"]
