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

import sys
import time
from pathlib import Path

from command_line import Parser, answer_signals, import_light


if __name__ == "__main__":  # the imports take seconds
    answer_signals()
    ARGUMENTS = import_light("hf_vit.training.pretrain_arguments").parse_args(sys.argv[1:], __doc__)
    paths = ("dataset_name", "model_name_or_path", "teacher_name_or_path")
    Parser.refuse_mistyped_paths(**{flag: getattr(ARGUMENTS, flag) for flag in paths})

import torch
from safetensors.torch import load_file
from train import main

from hf_vit import figures
from hf_vit.card import write_pretraining_card
from hf_vit.model.masked_autoencoder import HFViTForPreTraining
from hf_vit.system.files import write_text
from hf_vit.system.run_files import SAMPLES
from hf_vit.training import report as reports
from hf_vit.training.arguments import to_yaml
from hf_vit.training.conclusion import find_pretraining_faults, pretraining_lines
from hf_vit.training.distributed import exit_with_error
from hf_vit.training.masking import reconstruction_pictures
from hf_vit.training.pretraining import PreTraining
from hf_vit.training.run import Run
from hf_vit.training.run_folder import FINISHED
from hf_vit.training.state import TrainState


TEMPLATE = Path(__file__).resolve().with_name("pretraining_card.md")
SHOWN = 6  # images


def report(run: Run, state: TrainState):
    """Publish the best model with its card and pictures, and write results.json."""
    began = time.monotonic()
    skipped = reports.skipped_images(run)
    reports.save_last_weights(run)
    if not run.accelerator.is_main_process:
        return
    scores, folder = reports.publish_model(run), run.folder / "model"
    try:
        draw(run, folder)
    except Exception as error:  # hours of training are worth more than their pictures
        run.print(f"not all pictures could be drawn ({type(error).__name__}: {error})")
    results = reports.collect_results(run, state, scores, {}, skipped)
    results.seconds["report"] = round(time.monotonic() - began, 1)
    results.warnings = find_pretraining_faults(run.args, results)
    write_pretraining_card(folder, TEMPLATE, results, to_yaml(run.args))
    write_text(run.folder / FINISHED, results.to_json())
    if skipped:
        run.print(f"{len(skipped)} images could not be read and were skipped; {skipped[0]}")
    run.print(pretraining_lines(run, results, __file__))


def draw(run: Run, folder: Path):
    """Write the curves and, of a masked autoencoder as it was saved, a few reconstructions."""
    (folder / "figures").mkdir()
    figures.save(figures.curves(reports.read_log(run.folder), "mean squared error"), folder / "figures" / "curves.png")
    spec = run.data.spec
    if run.task.teacher is not None or spec.channels not in (1, 3):
        return
    pixel_values = spec.normalize(load_file(run.folder / SAMPLES)["images"][:SHOWN])
    noise = run.task.noise(pixel_values, torch.arange(len(pixel_values)), 0)
    model = HFViTForPreTraining.from_pretrained(folder)
    image, seen, answer = reconstruction_pictures(model, pixel_values, noise, spec)
    titles = [[title] * len(image) for title in ("image", "seen", "answer")]
    figures.save(figures.augmentations(image, [seen, answer], titles), folder / "figures" / "reconstructions.png")


if __name__ == "__main__":
    try:
        main(ARGUMENTS, PreTraining, report)
    except Exception as error:
        exit_with_error(error)
