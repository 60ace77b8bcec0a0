"""Which images a model reads, and how it is adapted to another image size, patch size or number of channels.

Letters of the shapes: D hidden size, C channels, P patch side.
"""

import copy

import torch
from torch import nn

from .configuration_hf_vit import as_pair


INPUT_FIELDS = ("image_size", "patch_size", "num_channels")  # what `resize_input` adapts


def check_pixel_values(pixel_values, config, interpolate_pos_encoding: bool):
    """Raise ValueError unless pixel_values is a float (B, C, H, W) that a model of this config can read."""
    if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels or not pixel_values.is_floating_point():
        raise ValueError(
            f"pixel_values is {pixel_values.dtype} of shape {tuple(pixel_values.shape)}; wanted floats of shape (batch, "
            f"{config.num_channels}, height, width): prepare the images with the model's image processor"
        )
    size, patch_size = tuple(pixel_values.shape[2:]), as_pair(config.patch_size)
    any_size = interpolate_pos_encoding or config.position_embedding in ("rotary", "none")
    if not any_size and size != as_pair(config.image_size):
        raise ValueError(
            f"pixel_values is {size} pixels (height, width) but the model takes {as_pair(config.image_size)}: "
            "resize or crop the images, pass interpolate_pos_encoding=True, or load the model with image_size="
        )
    if size[0] % patch_size[0] or size[1] % patch_size[1]:
        raise ValueError(
            f"pixel_values is {size} pixels, which patches of {patch_size} do not divide: resize or crop them"
        )


def resample_patches(kernel, new: tuple[int, int]):
    """Patch kernel (D, C, P, P) -> (D, C, *new), such that resized patches give the tokens they gave before.

    The pseudo-inverse resize of FlexiViT (arXiv 2212.08013, section 3.4): where `B x` resizes a patch x bilinearly, the new
    kernel minimises |(B x)^T w_new - x^T w|; to zero where the patch grows.
    """
    old = tuple(kernel.shape[2:])
    if old == tuple(new):
        return kernel
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).reshape(-1, 1, *old)  # one image per pixel
    resize = nn.functional.interpolate(pixels, size=new, mode="bilinear", align_corners=False).flatten(1)  # (old, new)
    flat = kernel.detach().double().cpu().flatten(2)  # (D, C, P, P) -> (D, C, old)
    return (flat @ torch.linalg.pinv(resize).T).reshape(*kernel.shape[:2], *new).to(kernel)  # (D, C, *new)


def resample_channels(kernel, new: int):
    """Patch kernel (D, C, P, P) -> (D, new, P, P), as timm does it.

    One channel is the sum of the old ones, so that a grey image gives the tokens its RGB copy gave; any other number repeats
    the old ones in turn, scaled by C / new so that the tokens keep their size.
    """
    old = kernel.shape[1]
    if new == 1:
        return kernel.sum(dim=1, keepdim=True)
    return kernel[:, torch.arange(new) % old] * (old / new)  # (D, new, P, P)


def resize_patch_projection(model, wanted):
    """Adapt the patch projection in place to the patches and channels of the config `wanted`."""
    config, patches, new = model.config, model.base_model.embeddings.patch_embeddings, as_pair(wanted.patch_size)
    if (config.num_channels, as_pair(config.patch_size)) == (wanted.num_channels, new):
        return
    if config.patch_projection != "conv":
        raise ValueError(
            f"a {config.patch_projection} projection cannot be adapted: keep patch_size {config.patch_size} and "
            f"num_channels {config.num_channels}"
        )
    weight = patches.projection.weight
    kernel = resample_patches(weight.cpu().double(), new)  # (D, C, P, P); MPS has no float64, and it is rounded last
    kernel = resample_channels(kernel, wanted.num_channels)
    patches.projection.weight = nn.Parameter(kernel.to(weight).contiguous(), weight.requires_grad)
    patches.projection.in_channels = wanted.num_channels
    patches.projection.kernel_size = patches.projection.stride = patches.patch_size = new


class ResizingMixin:
    """`resize_input` of every model."""

    @torch.no_grad()
    def resize_input(self, image_size=None, patch_size=None, num_channels=None) -> list[str]:
        """Adapt the model in place to other images, weights and config; None leaves a size as it is.

        Learned positions are resampled to the new grid (`resample_position_embeddings`), patch kernels to the new patch
        (`resample_patches`) and the new channels (`resample_channels`). An optimizer made before still holds the old weights.

        Args:
            image_size, patch_size: in pixels, one int or a pair (height, width).
            num_channels: channels of the input.

        Returns:
            What was changed, such as "image_size 224 -> 384".

        Raises:
            ValueError: if the patch does not divide the image, or the patch projection cannot be adapted.
        """
        wanted = copy.deepcopy(self.config)
        for name, size in (("image_size", image_size), ("patch_size", patch_size), ("num_channels", num_channels)):
            if size is not None:
                setattr(wanted, name, size)
        wanted.validate_architecture()
        resize_patch_projection(self, wanted)
        if self.config.grid_size != wanted.grid_size and self.config.position_embedding == "learned":
            embeddings = self.base_model.embeddings
            positions = torch.cat(embeddings.positions_on_grid(wanted.grid_size), dim=1)
            embeddings.position_embeddings = nn.Parameter(positions, embeddings.position_embeddings.requires_grad)
        notes = []  # last: `positions_on_grid` reads the old grid from this config, which all modules share
        for name in INPUT_FIELDS:
            old, new = getattr(self.config, name), getattr(wanted, name)
            setattr(self.config, name, new)
            if as_pair(old) != as_pair(new):
                notes.append(f"{name} {old} -> {new}")
        return notes
