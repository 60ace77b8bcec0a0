"""Learn from images without labels: masked autoencoding (arXiv 2111.06377), or a larger model's features.

    python recipes/pretrain.py --dataset_name photos --preset tiny-patch16-224 --output_dir runs/pretrained
    python recipes/train.py --dataset_name photos --model_name_or_path runs/pretrained/model --output_dir runs/photos
    python recipes/pretrain.py --config pretrain-fashion-mnist
    python recipes/pretrain.py --dataset_name photos --preset tiny-patch16-224 --teacher_name_or_path facebook/dinov2-base --output_dir runs/distilled

The first two commands belong together: what was learned from all photos is the start of a classifier of those with labels.

Data, flags, resuming, processes, run folder and exit codes are those of train.py (see its --help), without what is of labels. Images
need none: any folder of images will do. Where each image has one, an evaluation also gives the accuracy of its k nearest
neighbours by the encoder's features. model/ opens as `HFViTForPreTraining`, and as `HFViTModel`, `HFViTForImageClassification` and
`HFViTBackbone`; its card shows a few images, what the encoder sees of them, and the decoder's answer.
"""

from pathlib import Path


if __name__ == "__main__":  # the imports take seconds
    from command_line import training_arguments

    from hf_vit.training.pretrain_arguments import PretrainArguments

    ARGUMENTS = training_arguments(__doc__, PretrainArguments)

import torch

from hf_vit import figures
from hf_vit.model.masked_autoencoder import HFViTForPreTraining
from hf_vit.training.pretraining import PreTraining, reconstruction_pictures
from hf_vit.training.train import train_as_script


SHOWN = 6  # images


def draw(folder: Path, run, log: list[dict], _scores: dict, samples: dict):
    """The curves and, of a masked autoencoder as it was saved, a few reconstructions."""
    folder.mkdir()
    figures.save(figures.curves(log, "mean squared error"), folder / "curves.png")
    spec = run.data.spec
    if run.task.teacher is not None or spec.channels not in (1, 3):
        return
    pixel_values = spec.normalize(samples["images"][:SHOWN])
    noise = run.task.noise(pixel_values, torch.arange(len(pixel_values)), 0)
    model = HFViTForPreTraining.from_pretrained(folder.parent)
    cells = [
        cell for row in zip(*reconstruction_pictures(model, pixel_values, noise, spec), strict=True) for cell in row
    ]
    pictures, titles = [figures.as_picture(cell) for cell in cells], ["image", "seen", "answer"]
    figures.save(figures.grid(pictures, titles * len(pixel_values), len(titles)), folder / "reconstructions.png")


if __name__ == "__main__":
    train_as_script(ARGUMENTS, PreTraining, draw)
