"""From uint8 images to the normalised floats that a model sees, and back."""

import functools

import torch


@functools.lru_cache(maxsize=64)
def constant_tensor(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Numbers (n,) on a device. They are copied there once: each copy would wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def mean_and_std(spec, images) -> list[torch.Tensor]:
    """The spec's mean and std, each (1, C or 1, 1, 1), on the device of `images`."""
    return [constant_tensor(tuple(values), images.device).view(1, -1, 1, 1) for values in (spec.mean, spec.std)]


def standardize_(images, spec):
    """(x - mean) / std in each channel, in place."""
    mean, std = mean_and_std(spec, images)
    return images.sub_(mean).div_(std)


def normalize(images, spec):
    """uint8 (B, C, H, W) -> float32, as image processors do: (x / 255 - mean) / std in each channel. Floats are returned as
    they are: an image processor has already normalised them."""
    return images if images.is_floating_point() else standardize_(images.float().div_(255), spec)


def denormalize(pixel_values, spec):
    """Normalised (B, C, H, W) -> uint8 to look at: the inverse of `normalize`, clipped to black and white. If the spec does not
    know mean and std, each image is stretched to the full range."""
    if spec.processor is not None:
        low, high = (pixel_values.amin(dim=(1, 2, 3), keepdim=True), pixel_values.amax(dim=(1, 2, 3), keepdim=True))
        return (255 * (pixel_values - low) / (high - low).clamp(min=1e-12)).round().byte()
    mean, std = mean_and_std(spec, pixel_values)
    return (255 * (pixel_values * std + mean)).round().clamp(0, 255).byte()
