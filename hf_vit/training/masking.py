"""Which patches of a training image are masked, and what a masked autoencoder makes of an image, to look at."""

import torch

from hf_vit.data.normalization import denormalize
from hf_vit.data.sampling import uniform


STREAM = 1024  # of the first patch; above all that `augment` draws


def masking_noise(index: torch.Tensor, seed: int, epoch: int, num_patches: int) -> torch.Tensor:
    """Numbers in [0, 1), (B, N), that say which patches of each image are masked in an epoch, see `random_masking`.

    A function of (seed, epoch, image id, patch) alone, the same in every process and on every device.

    Args:
        index: (B,) ids of the images.
        num_patches: N.
    """
    patches = torch.arange(num_patches, device=index.device).unsqueeze(1)  # (N, 1)
    return uniform(index, seed, epoch, STREAM + patches).T  # (N, B) -> (B, N)


@torch.no_grad()
def reconstruction_pictures(model, pixel_values: torch.Tensor, noise: torch.Tensor, spec) -> list[torch.Tensor]:
    """Images, the same without their masked patches, and with the model's answer there: uint8 (B, C, H, W) on the CPU, each.

    Args:
        model: an `HFViTForPreTraining`.
        pixel_values: (B, C, H, W) as the model takes them.
        noise: (B, N).
        spec: the `ImageSpec` of the model's images.
    """
    was_training = model.training
    outputs = model.eval()(pixel_values, noise=noise)
    model.train(was_training)
    masked, answers = model.reconstruct(pixel_values, outputs)
    return [denormalize(pictures, spec).cpu() for pictures in (pixel_values.float(), masked, answers)]
