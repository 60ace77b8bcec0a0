"""A masked autoencoder: the encoder sees some of the patches, a light decoder answers with the pixels of the others.

That of "Masked Autoencoders Are Scalable Vision Learners" (arXiv 2111.06377, section 3 and appendix A.1), with any HFViTConfig as
the encoder. This file goes with the weights of such a model alone: a classifier does without.

The letters of the shapes are those of modeling_hf_vit.py, with M patches that are visible, and E the width of the decoder.
"""

from typing import Unpack

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEForPreTrainingOutput
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .configuration_hf_vit import HFViTConfig, as_pair
from .modeling_hf_vit import HFViTLayer, HFViTModel, HFViTPreTrainedModel
from .patches import patchify, unpatchify
from .positions import resample_position_embeddings, sincos_2d
from .resizing import check_pixel_values


def num_visible_patches(num_patches: int, mask_ratio: float) -> int:
    """M, how many of N patches the encoder sees; ValueError if that is none or all of them."""
    visible = int(num_patches * (1 - mask_ratio))  # rounded as in transformers
    if not 0 < visible < num_patches:
        raise ValueError(
            f"mask_ratio {mask_ratio} leaves {visible} of {num_patches} patches visible; wanted at least one visible and one "
            "masked: choose another mask_ratio, or an image_size and patch_size of more patches"
        )
    return visible


def random_masking(noise, mask_ratio: float):
    """Numbers (B, N) -> the patches of the M smallest, (B, M); the mask, (B, N), 1 for the others; and the ranks, (B, N)."""
    visible = num_visible_patches(noise.shape[1], mask_ratio)
    order = noise.argsort(dim=1, stable=True)  # the same patches on every device, also where two numbers are equal
    ranks = order.argsort(dim=1)
    return order[:, :visible], (ranks >= visible).float(), ranks


def patch_statistics(patches):
    """Mean and standard deviation of each patch, (B, N, 1) each (arXiv 2111.06377, section 3)."""
    variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
    return mean, (variance + 1e-6).sqrt()


def masked_patch_loss(logits, targets, mask):
    """Mean squared error of the masked patches, (): logits and targets (B, N, P * P * C), mask (B, N)."""
    errors = (logits.float() - targets).square().mean(dim=2)  # (B, N)
    return (errors * mask).sum() / mask.sum()


class HFViTDecoder(nn.Module):
    """Visible tokens to the pixels of every patch: pre-norm layers of a width of their own, with fixed sine-cosine positions."""

    def __init__(self, config: HFViTConfig):
        super().__init__()
        self.config = config
        width = config.decoder_hidden_size
        layer_config = HFViTConfig(
            hidden_size=width,
            num_attention_heads=config.decoder_num_attention_heads,
            intermediate_size=config.decoder_intermediate_size,
            hidden_act=config.hidden_act,
            qkv_bias=config.qkv_bias,
            hidden_dropout_prob=config.hidden_dropout_prob,
            layer_norm_eps=config.layer_norm_eps,
            position_embedding="sincos2d",  # which the width must fit
        )
        self.decoder_embed = nn.Linear(config.hidden_size, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("decoder_pos_embed", self.fixed_positions().to(self.mask_token))
        self.decoder_layers = nn.ModuleList(
            [HFViTLayer(layer_config, index) for index in range(config.decoder_num_hidden_layers)]
        )
        for layer in self.decoder_layers:
            layer.attention.config = config  # backend and dropout are the encoder's, also when they change
        self.decoder_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.decoder_pred = self.pixel_head()

    def pixel_head(self) -> nn.Linear:
        """The last dense layer, from a token to the pixels of its patch."""
        height, width = as_pair(self.config.patch_size)
        return nn.Linear(self.config.decoder_hidden_size, height * width * self.config.num_channels)

    def fixed_positions(self):
        """Sine-cosine positions of the patches after zeros for the prefix tokens, (1, R + N, E)."""
        patches = sincos_2d(self.config.grid_size, self.config.decoder_hidden_size)  # (1, N, E)
        prefix = patches.new_zeros(1, self.config.num_prefix_tokens, patches.shape[2])  # (1, R, E)
        return torch.cat([prefix, patches], dim=1)

    def resampled_positions(self, old: tuple[int, int], new: tuple[int, int]):
        """Positions of the prefix tokens and of the patches, (1, R + N, E), on the grid `new`; `old` is that of the table."""
        R = self.config.num_prefix_tokens
        patches = resample_position_embeddings(self.decoder_pos_embed[:, R:], old, new, self.config)  # (1, N, E)
        return torch.cat([self.decoder_pos_embed[:, :R], patches], dim=1)

    def forward(self, tokens, ids_restore, grid):
        """Prefix tokens and visible patches (B, R + M, D) -> the pixels of all patches of the grid, (B, N, P * P * C)."""
        R = self.config.num_prefix_tokens
        tokens = self.decoder_embed(tokens)  # (B, R + M, D) -> (B, R + M, E)
        masked = self.mask_token.expand(len(tokens), ids_restore.shape[1] + R - tokens.shape[1], -1)  # (B, N - M, E)
        patches = torch.cat([tokens[:, R:], masked], dim=1)  # (B, N, E), the visible ones first
        patches = patches.gather(1, ids_restore.unsqueeze(2).expand(-1, -1, patches.shape[2]))  # each in its place
        hidden_states = torch.cat([tokens[:, :R], patches], dim=1)  # (B, T, E)
        hidden_states = hidden_states + self.resampled_positions(self.config.grid_size, grid)
        for layer in self.decoder_layers:
            hidden_states = layer(hidden_states)
        return self.decoder_pred(self.decoder_norm(hidden_states[:, R:]))  # (B, T, E) -> (B, N, P * P * C)


class HFViTForPreTraining(HFViTPreTrainedModel):
    """A masked autoencoder: `vit`, the encoder of any HFViTConfig, and `decoder`, of the config's fields decoder_*.

    The encoder's final norm, if the config has one, is applied to all its tokens. A later classifier begins with a new attention
    pooling, if it has one. The config's patch dropout does not act: masking takes its place.

    Raises:
        ValueError: if `config.mask_ratio` leaves no patch visible, or none masked.
    """

    is_autoencoder = True
    can_merge_tokens = False  # it answers for every patch

    def __init__(self, config: HFViTConfig):
        super().__init__(config)
        num_visible_patches(config.grid_size[0] * config.grid_size[1], config.mask_ratio)
        self.vit = HFViTModel(config, add_pooling_layer=False)
        self.decoder = HFViTDecoder(config)
        self.vit.attention_pooling = None  # no pixel depends on it, and DDP waits for every gradient
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, HFViTDecoder):
            init.normal_(module.mask_token, std=self.config.initializer_range)
            init.copy_(module.decoder_pos_embed, module.fixed_positions())
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def resize_input(self, image_size=None, patch_size=None, num_channels=None) -> list[str]:
        """As in every model; the decoder's positions are resampled too. Pixels of another patch are predicted by a new layer."""
        old, decoder = self.config.grid_size, self.decoder
        notes = super().resize_input(image_size, patch_size, num_channels)
        if any(note.startswith(("patch_size", "num_channels")) for note in notes):
            decoder.decoder_pred = decoder.pixel_head().to(decoder.decoder_pred.weight)
            self._init_weights(decoder.decoder_pred)
            notes.append("decoder_pred reset")
        if old != self.config.grid_size:
            decoder.decoder_pos_embed = decoder.resampled_positions(old, self.config.grid_size)
        return notes

    @can_return_tuple
    def forward(
        self, pixel_values, noise=None, interpolate_pos_encoding=False, **kwargs: Unpack[TransformersKwargs]
    ) -> ViTMAEForPreTrainingOutput:
        """
        Args:
            pixel_values: (B, C, H, W) floats as the model's image processor makes them.
            noise: (B, N) numbers; the patches of the smallest stay visible. None: new random numbers.
            interpolate_pos_encoding: accept any H and W that the patch divides, with resampled positions.

        Returns:
            `loss` (), the mean squared error of the masked patches; `logits` (B, N, P * P * C), the decoder's answer for each patch, see
            `patchify` for the order, where `config.norm_pix_loss` is True in units of the patch's own mean and standard deviation;
            `mask` (B, N), 1 for a masked patch, 0 for a visible one; `ids_restore` (B, N), the rank of each patch's noise; the encoder's
            `hidden_states` and `attentions` when asked for.

        Raises:
            ValueError: if pixel_values or noise has another shape than the model's, or if `config.mask_ratio` leaves no patch
                of these images visible, or none masked.
        """
        check_pixel_values(pixel_values, self.config, interpolate_pos_encoding)  # before anything is masked
        patch_embeddings = self.vit.embeddings.patch_embeddings
        grid = patch_embeddings.grid_size(pixel_values)  # (h, w)
        shape = (len(pixel_values), grid[0] * grid[1])
        if noise is None:
            noise = torch.rand(shape, device=pixel_values.device)
        if tuple(noise.shape) != shape:
            raise ValueError(
                f"noise has shape {tuple(noise.shape)}; wanted {shape}, one number for each patch of each image"
            )
        kept, mask, ids_restore = random_masking(
            noise.to(pixel_values.device, non_blocking=True), self.config.mask_ratio
        )
        outputs = self.vit(pixel_values, interpolate_pos_encoding, kept=kept, **kwargs)
        tokens = outputs.last_hidden_state  # (B, R + M, D)
        # CODEPATH: CLIP and MAE's classifiers norm the pooled vector alone, and here there is none.
        if self.config.final_norm == "pooled":
            tokens = self.vit.layernorm(tokens)
        logits = self.decoder(tokens, ids_restore, grid)  # (B, N, P * P * C)
        targets = patchify(pixel_values.float(), patch_embeddings.patch_size)  # (B, N, P * P * C)
        if self.config.norm_pix_loss:
            mean, deviation = patch_statistics(targets)
            targets = (targets - mean) / deviation
        loss = masked_patch_loss(logits, targets, mask)
        return ViTMAEForPreTrainingOutput(loss, logits, mask, ids_restore, outputs.hidden_states, outputs.attentions)

    @torch.no_grad()
    def reconstruct(self, pixel_values, outputs: ViTMAEForPreTrainingOutput):
        """Pictures of an answer, as pixel_values (B, C, H, W) in float32.

        Args:
            pixel_values: (B, C, H, W), the images that were masked.
            outputs: what `forward` returned for them.

        Returns:
            The images with masked patches at 0, the mean colour of a normalised image; and with the decoder's answer in the
            masked patches. Where patches were normalised, that answer is shown with the mean and deviation of the true patch.
        """
        patch_embeddings = self.vit.embeddings.patch_embeddings
        patch_size, grid = patch_embeddings.patch_size, patch_embeddings.grid_size(pixel_values)
        patches = patchify(pixel_values.float(), patch_size)  # (B, N, P * P * C)
        answer = outputs.logits.float()
        if self.config.norm_pix_loss:
            mean, deviation = patch_statistics(patches)
            answer = answer * deviation + mean
        mask = outputs.mask.unsqueeze(2)  # (B, N, 1)
        visible = patches * (1 - mask)
        return unpatchify(visible, patch_size, grid), unpatchify(visible + answer * mask, patch_size, grid)


__all__ = ["HFViTForPreTraining"]
