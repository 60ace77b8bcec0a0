"""A plain Vision Transformer, from pixels to logits, top to bottom.

The letters of every shape:
    B batch, C channels, H W image height and width, P patch side, h w rows and columns of patches, N = h * w patches,
    R prefix tokens (class tokens, distillation, registers), T = R + N tokens, D hidden size, A heads, K = D / A head size,
    F width of the MLP, L labels, M patches that patch dropout or masking keeps, Q queries: all T tokens, except where `pooled_only`
    asks the last layer for the pooled ones alone.
The network is that of arXiv 2010.11929, figure 1. CODEPATH notes name the public checkpoints that take a branch of the config.
"""

from collections import OrderedDict
from typing import Unpack

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .attention_maps import attention_distances, attention_maps, attention_query
from .branches import HFViTDropPath, HFViTGatedMLP, HFViTLayerScale
from .configuration_hf_vit import HFViTConfig
from .fields import as_pair
from .loading import LoadingMixin
from .patches import keep_patches, patchify, random_patches
from .pooled_queries import num_pooled_tokens
from .positions import apply_rotary, fixed_position_embeddings, resample_position_embeddings, rotary_2d
from .resizing import ResizingMixin, check_pixel_values
from .token_merging import set_token_merging


class HFViTPatchEmbeddings(nn.Module):
    """Cut the image into patches and project each: a convolution whose stride is its kernel, or a dense layer between norms."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.patch_size, self.by_convolution = as_pair(config.patch_size), config.patch_projection == "conv"
        if self.by_convolution:
            size, bias = self.patch_size, config.patch_bias
            self.projection = nn.Conv2d(config.num_channels, config.hidden_size, size, size, bias=bias)
        else:
            flat = config.num_channels * self.patch_size[0] * self.patch_size[1]
            self.layernorm_before = nn.LayerNorm(flat, eps=config.layer_norm_eps)
            self.projection = nn.Linear(flat, config.hidden_size)
            self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

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
    """Class tokens, distillation token, registers, then the patches with their positions."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        self.patch_embeddings = HFViTPatchEmbeddings(config)
        learned = lambda count: nn.Parameter(torch.empty(1, count, config.hidden_size)) if count else None
        self.cls_token = learned(config.num_class_tokens)
        self.distillation_token = learned(int(config.use_distillation_token))
        self.register_tokens = learned(config.num_register_tokens)
        # Class tokens and distillation token have learned and sincos1d positions, registers never (arXiv 2309.16588, section 3).
        self.num_positioned = config.num_prefix_tokens - config.num_register_tokens
        # CODEPATH: learned in ViT, DeiT, DINOv2, CLIP, SigLIP; sincos2d in big_vision's ViT-S/16; rotary in DINOv3.
        if config.position_embedding == "learned":
            self.position_embeddings = learned(self.num_positioned + config.grid_size[0] * config.grid_size[1])
        # CODEPATH: CLIP has it. None elsewhere: PEFT would take an empty module of this name for a norm.
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def positions_on_grid(self, grid):
        """Positions of the prefix tokens that have one, (1, 0 or more, D), and of the patches, (1, N, D), on this grid (h, w)."""
        config, N = self.config, grid[0] * grid[1]
        # CODEPATH: learned in ViT, DeiT, DINOv2, CLIP, SigLIP, MAE as it is stored; sincos2d in big_vision's ViT-S/16.
        if config.position_embedding == "learned":
            prefix, patches = self.position_embeddings.tensor_split([self.num_positioned], dim=1)
            return prefix, resample_position_embeddings(patches, config.grid_size, grid, config)
        kind, P, D = config.position_embedding, self.num_positioned, config.hidden_size
        weight = next(self.patch_embeddings.parameters())
        table = fixed_position_embeddings(kind, P, grid, D, weight.device, weight.dtype)
        return table.split([table.shape[1] - N, N], dim=1)

    def forward(self, pixel_values, interpolate_pos_encoding=False):
        check_pixel_values(pixel_values, self.config, interpolate_pos_encoding)  # the flag only permits other sizes
        weight = next(self.patch_embeddings.parameters())  # of a convolution or a norm, which are not quantised
        patches = self.patch_embeddings(pixel_values.to(weight.dtype))  # (B, C, H, W) -> (B, N, D)
        prefix = [token for token in (self.cls_token, self.distillation_token) if token is not None]  # (1, 1+, D) each
        # CODEPATH: DINOv3 is rotary; all others add positions to the patches.
        if self.config.position_embedding not in ("rotary", "none"):
            grid = self.patch_embeddings.grid_size(pixel_values)  # (h, w)
            prefix_positions, patch_positions = self.positions_on_grid(grid)
            patches = patches + patch_positions
            if prefix_positions.shape[1]:
                prefix = [torch.cat(prefix, dim=1) + prefix_positions]  # (1, 1+, D)
        if self.register_tokens is not None:
            prefix.append(self.register_tokens)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in prefix]
        hidden_states = torch.cat([*prefix, patches], dim=1)  # (B, T, D)
        if self.layernorm is not None:
            hidden_states = self.layernorm(hidden_states)
        return self.dropout(hidden_states)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """softmax(q k^T / sqrt(K)) v: q (B, A, Q, K), k and v (B, A, T, K) -> (B, Q, A, K), and the weights (B, A, Q, T)."""
    weights = query @ key.transpose(2, 3) * scaling  # (B, A, Q, T)
    if attention_mask is not None:
        weights = weights + attention_mask  # (B, 1, 1, T)
    precision = torch.promote_types(query.dtype, torch.float32)
    weights = nn.functional.softmax(weights, dim=-1, dtype=precision).to(query.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


def split_heads(tokens, head_dim: int):
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
        # CODEPATH: timm's models with qk_norm (arXiv 2302.05442); not ViT, DeiT, DINO, CLIP, SigLIP.
        norm = lambda: nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.q_norm, self.k_norm = norm(), norm()

    def project(self, queries, hidden_states, rotary=None):
        """Tokens that ask (B, Q, D) and that are asked (B, T, D) -> queries (B, A, Q, K), keys and values (B, A, T, K)."""
        query = self.q_norm(split_heads(self.q_proj(queries), self.head_dim))  # (B, A, Q, K)
        key = self.k_norm(split_heads(self.k_proj(hidden_states), self.head_dim))  # (B, A, T, K)
        value = split_heads(self.v_proj(hidden_states), self.head_dim)  # (B, A, T, K)
        if rotary is not None:
            key = apply_rotary(key, *rotary)
            if queries.shape[1] == hidden_states.shape[1]:  # else they are pooled tokens, which have no place
                query = apply_rotary(query, *rotary)
        return query, key, value

    def attend(self, query, key, value, attention_mask=None, **kwargs):
        """Queries (B, A, Q, K), keys and values (B, A, T, K) -> tokens (B, Q, D), and the weights where they are asked for."""
        wants_weights = kwargs.get("output_attentions", self.config.output_attentions)  # "eager" alone returns them
        backend = "eager" if wants_weights else self.config._attn_implementation
        if attention_mask is not None and backend != "eager":
            backend = "sdpa"  # not every backend takes a mask of floats
        if backend == "sdpa" and query.is_cuda and query.shape[2] == 1:
            backend = "eager"  # the backward pass of cuDNN's kernel fails for one query (pytorch#138529)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        options = dict(scaling=self.scaling, dropout=dropout, **kwargs)
        attended, weights = attention(self, query, key, value, attention_mask, **options)
        return self.o_proj(attended.flatten(2)), weights  # (B, Q, A, K) -> (B, Q, D), (B, A, Q, T)

    def forward(self, queries, hidden_states, rotary=None, **kwargs):
        return self.attend(*self.project(queries, hidden_states, rotary), **kwargs)


class HFViTMLP(nn.Module):
    """Two dense layers with an activation between them, applied to each token."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.fc2(self.activation(self.fc1(hidden_states)))  # (..., D) -> (..., F) -> (..., D)


class HFViTLayer(GradientCheckpointingLayer):
    """Pre-norm transformer layer: attention, then MLP, each with a residual (arXiv 2010.11929, equations 2 and 3)."""

    def __init__(self, config: HFViTConfig, index: int):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = HFViTAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        # CODEPATH: gated in DINOv2 giant and DINOv3 huge+; two dense layers in ViT, DeiT, MAE, CLIP, SigLIP.
        self.mlp = HFViTGatedMLP(config) if config.gated_mlp else HFViTMLP(config)
        # CODEPATH: DINOv2, DINOv3 and DeiT III have LayerScale; ViT, DeiT, CLIP, MAE do not.
        scale = lambda: HFViTLayerScale(config) if config.layerscale_value is not None else nn.Identity()
        self.layer_scale1, self.layer_scale2 = scale(), scale()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = HFViTDropPath(config.drop_path_rate * index / max(1, config.num_hidden_layers - 1))

    def attend(self, hidden_states, num_queries=None, **kwargs):
        """Tokens (B, T, D) -> the first `num_queries` of them (None: all) plus what they attend to, (B, Q, D)."""
        normed = self.layernorm_before(hidden_states)  # (B, T, D)
        attended, _ = self.attention(normed[:, :num_queries], normed, **kwargs)  # (B, Q, D)
        return hidden_states[:, :num_queries] + self.drop_path(self.layer_scale1(self.dropout(attended)))

    def transform(self, hidden_states):
        transformed = self.mlp(self.layernorm_after(hidden_states))  # (B, Q, D)
        return hidden_states + self.drop_path(self.layer_scale2(self.dropout(transformed)))

    def forward(self, hidden_states, num_queries=None, **kwargs):
        return self.transform(self.attend(hidden_states, num_queries, **kwargs))  # (B, T, D) -> (B, Q, D)


class HFViTPostNormLayer(HFViTLayer):
    """Post-norm layer: `layernorm_before` and `layernorm_after` follow the two sums (arXiv 1706.03762, section 3.1)."""

    def attend(self, hidden_states, num_queries=None, **kwargs):
        queries = hidden_states[:, :num_queries]
        attended, _ = self.attention(queries, hidden_states, **kwargs)  # (B, Q, D)
        return self.layernorm_before(queries + self.drop_path(self.layer_scale1(self.dropout(attended))))

    def transform(self, hidden_states):
        transformed = self.layer_scale2(self.dropout(self.mlp(hidden_states)))  # (B, Q, D)
        return self.layernorm_after(hidden_states + self.drop_path(transformed))


class HFViTAttentionPooling(nn.Module):
    """A learned probe attends to the patches, then an MLP with a residual: "MAP" (arXiv 2106.04560, section 2.1)."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        projections = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = projections
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        # CODEPATH: SigLIP and timm's "map" models have two dense layers; DINOv3 huge+ would have a gated one.
        self.mlp = HFViTGatedMLP(config) if config.gated_mlp else HFViTMLP(config)

    def forward(self, patches):
        """Patches (B, N, D) -> one vector (B, D), and the probe's weights (B, A, 1, N)."""
        split = lambda tokens: split_heads(tokens, self.head_dim)
        query = split(self.q_proj(self.probe)).expand(patches.shape[0], -1, -1, -1)  # (B, A, 1, K)
        key, value = split(self.k_proj(patches)), split(self.v_proj(patches))  # (B, A, N, K) each
        attended, weights = eager_attention_forward(self, query, key, value, None, self.head_dim**-0.5)  # (B, 1, A, K)
        pooled = self.o_proj(attended.reshape(patches.shape[0], -1))  # (B, D)
        return pooled + self.mlp(self.layernorm(pooled)), weights


class HFViTPreTrainedModel(LoadingMixin, ResizingMixin, PreTrainedModel):
    """What every model shares: config class, initial weights, and the methods of the sibling files."""

    config_class = HFViTConfig
    base_model_prefix = "vit"
    is_classifier = is_autoencoder = False
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # Trainer then divides the loss by the accumulation steps itself
    _no_split_modules = ["HFViTEmbeddings", "HFViTLayer", "HFViTPostNormLayer"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HFViTLayer, "attentions": HFViTAttention}
    _input_embed_layer = "patch_embeddings"
    can_merge_tokens = True
    set_token_merging = set_token_merging
    attention_maps = attention_maps
    attention_query = property(attention_query)
    attention_distances = attention_distances

    @torch.no_grad()
    def _init_weights(self, module):
        # LeCun normal for patches and Xavier uniform for dense layers, as in the ViT paper's code; a small normal for tokens.
        # Only functions of `transformers.initialization`: they leave alone what from_pretrained has already loaded.
        if isinstance(module, nn.Conv2d):
            init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, HFViTLayerScale):
            init.constant_(module.lambda1, self.config.layerscale_value)
        elif isinstance(module, (HFViTEmbeddings, HFViTAttentionPooling)):  # tokens, learned positions, the probe
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, std=self.config.initializer_range)
        else:  # norms, and modules of a subclass
            super()._init_weights(module)
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
            init.zeros_(module.bias)


class HFViTModel(HFViTPreTrainedModel):
    """Pixels to tokens, and one pooled vector an image: through a dense layer too, if `add_pooling_layer` and `config.pooler_act`."""

    def __init__(self, config: HFViTConfig, add_pooling_layer: bool = True):
        config.validate_architecture()  # it may have been changed since it was made
        super().__init__(config)
        D = config.hidden_size
        self.embeddings = HFViTEmbeddings(config)
        # CODEPATH: published checkpoints are all pre-norm; write-ups of a ViT from scratch have post-norm.
        layer_class = HFViTLayer if config.norm_first else HFViTPostNormLayer
        self.layers = nn.ModuleList([layer_class(config, index) for index in range(config.num_hidden_layers)])
        # CODEPATH: "none" in CLIP's classifiers, InternViT and post-norm models; all others have a final norm.
        self.layernorm = nn.LayerNorm(D, eps=config.layer_norm_eps) if config.final_norm != "none" else None
        # CODEPATH: SigLIP and timm's map models pool by attention; CLIP, DINOv2, MAE and the rest do not.
        self.attention_pooling = HFViTAttentionPooling(config) if config.pooling == "map" else None
        self.pooler = None
        # CODEPATH: "tanh" in google/vit-base-patch16-224-in21k; None in DINOv2, CLIP, SigLIP.
        if add_pooling_layer and config.pooler_act is not None:
            layers = OrderedDict(dense=nn.Linear(D, D), activation=ACT2FN[config.pooler_act])
            self.pooler = nn.Sequential(layers)  # trf-ignore: TRF036, its weights are called pooler.dense
        self.post_init()

    def pool(self, hidden_states):
        """Tokens (B, T, D) -> the vector that `config.pooling` names, (B, D), or (B, 2 D) where it names two."""
        config = self.config
        patches = hidden_states[:, config.num_prefix_tokens :]  # (B, T, D) -> (B, N, D)
        class_token = lambda: hidden_states[:, : config.n_cls_tokens].mean(dim=1)  # (B, D), of several their mean
        if config.pooling == "cls":  # CODEPATH: ViT, DINO, CLIP, Pixio
            pooled = class_token()  # (B, D)
        elif config.pooling == "mean":  # CODEPATH: I-JEPA, classifiers of MAE and CLIP
            pooled = patches.mean(dim=1)  # (B, D)
        elif config.pooling == "cls_mean":  # CODEPATH: classifiers of DINOv2
            pooled = torch.cat([class_token(), patches.mean(dim=1)], dim=1)  # (B, 2 D)
        elif config.pooling == "cls_distillation":  # CODEPATH: distilled DeiT; the others are SigLIP and timm's "map"
            pooled = torch.cat([class_token(), hidden_states[:, config.n_cls_tokens]], dim=1)  # (B, 2 D)
        elif self.attention_pooling is None:  # an autoencoder does not pool
            return None
        else:
            pooled, _ = self.attention_pooling(patches)  # (B, N, D) -> (B, D)
        # CODEPATH: "pooled" in CLIP, and in MAE's classifiers.
        if config.final_norm == "pooled":
            pooled = self.layernorm(pooled)
        return pooled if self.pooler is None else self.pooler(pooled)  # (B, D)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values, interpolate_pos_encoding=False, pooled_only=False, kept=None, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:  # fmt: skip
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.
            pooled_only: where class tokens are pooled, the last layer computes these alone, `last_hidden_state` (B, Q, D);
                all of them with hooks on that layer, or when `hidden_states` or `attentions` are asked for.
            kept: (B, M), the patches that the layers see, as a masked autoencoder chooses them; nothing is pooled then.

        Returns:
            `last_hidden_state` (B, T, D), after the final norm where `config.final_norm` is "tokens"; `pooler_output` (B, D) or
            (B, 2 D); when asked for, `hidden_states`, the input of the first layer and the output of each, (B, T, D) before the
            final norm, and `attentions`, (B, A, T, T) of each layer.
        """
        config, pooled_too = self.config, kept is None
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)  # (B, C, H, W) -> (B, T, D)
        if kept is None and self.training and config.patch_dropout_rate > 0:  # CODEPATH: a choice of each training
            kept = random_patches(hidden_states, config.num_prefix_tokens, config.patch_dropout_rate)  # (B, M)
        if kept is not None:
            hidden_states = keep_patches(hidden_states, config.num_prefix_tokens, kept)  # (B, T, D) -> (B, R + M, D)
        # CODEPATH: DINOv3; all others have added their positions.
        if config.position_embedding == "rotary":
            grid = self.embeddings.patch_embeddings.grid_size(pixel_values)  # (h, w)
            rotary = rotary_2d(grid, self.layers[0].attention.head_dim, config.rope_theta, hidden_states, kept)
            kwargs["rotary"] = rotary  # (N, K) each, or (B, 1, M, K)
        for layer in self.layers[:-1]:
            hidden_states = layer(hidden_states, **kwargs)  # (B, T, D)
        num_queries = num_pooled_tokens(self, **kwargs) if pooled_only else None
        hidden_states = self.layers[-1](hidden_states, num_queries, **kwargs)  # (B, T, D) -> (B, Q, D)
        # CODEPATH: "tokens" in ViT, DeiT, DINO, SigLIP; CLIP and MAE's classifiers norm the pooled vector alone.
        if config.final_norm == "tokens":
            hidden_states = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(hidden_states, self.pool(hidden_states) if pooled_too else None)


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
            labels: as in transformers, by `config.problem_type` or by what they look like: (B,) class indices (-100 does not
                count), or (B, L) floats in [0, 1]; with one label, floats to regress. `model.loss_function = f` takes another loss.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            `logits` (B, L), `loss` where labels are given, `hidden_states` and `attentions` when asked for.
        """
        outputs = self.vit(pixel_values, interpolate_pos_encoding, pooled_only=True, **kwargs)
        pooled = outputs.pooler_output  # (B, D) or (B, 2 D)
        if self.pre_logits is not None:
            pooled = self.dropout(self.pre_logits(pooled).tanh())
        logits = self.classifier(pooled)  # (B, L)
        loss, problem_type = None, self.config.problem_type
        if labels is not None:
            labels = labels.float() if problem_type == "multi_label_classification" else labels
            try:
                loss = self.loss_function(labels, logits.float(), self.config, **kwargs)
            finally:
                self.config.problem_type = problem_type  # what it guesses from one batch is not kept
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class HFViTBackbone(BackboneMixin, HFViTModel):
    """Pixels to feature maps, for detectors, segmenters and any head of your own, of the layers `config.out_indices` (0 the
    embeddings, i the output of layer i) or `config.out_features` ("stem", "stage1", ...)."""

    can_merge_tokens = False  # its maps need the place of each patch

    def __init__(self, config: HFViTConfig):
        config.set_output_features_output_indices(config.out_features, config.out_indices)
        if config.patch_dropout_rate > 0:
            raise ValueError("a backbone gives maps of all patches: patch_dropout_rate must be 0")
        super().__init__(config, add_pooling_layer=False)
        self.attention_pooling = None  # maps are not pooled
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self, pixel_values, interpolate_pos_encoding=True, **kwargs: Unpack[TransformersKwargs]
    ) -> BackboneOutput:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            `feature_maps`, (B, D, h, w) of each layer, or (B, T, D) where `config.reshape_hidden_states` is False, through the
            final norm where `config.final_norm` is "tokens" and `config.apply_layernorm`; `hidden_states`, `attentions`.
        """
        outputs = HFViTModel.forward(self, pixel_values, interpolate_pos_encoding, **kwargs)  # not BackboneMixin's
        grid, maps = self.embeddings.patch_embeddings.grid_size(pixel_values), []  # (h, w)
        for index in self.out_indices:
            tokens = outputs.hidden_states[index]  # (B, T, D)
            # CODEPATH: DINOv2 and DINOv3 set apply_layernorm; detectors of a plain ViT (ViTDet) do not norm their maps.
            if self.config.final_norm == "tokens" and self.config.apply_layernorm:
                tokens = self.layernorm(tokens)
            # CODEPATH: DPT and Depth Anything take tokens (False); other users of a backbone take maps.
            if self.config.reshape_hidden_states:
                patches = tokens[:, self.config.num_prefix_tokens :]  # (B, N, D)
                tokens = patches.transpose(1, 2).unflatten(2, grid)  # (B, N, D) -> (B, D, h, w)
            maps.append(tokens)
        return BackboneOutput(tuple(maps), outputs.hidden_states, outputs.attentions)


__all__ = ["HFViTPreTrainedModel", "HFViTModel", "HFViTForImageClassification", "HFViTBackbone"]
