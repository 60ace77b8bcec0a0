# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_vit[recipes]"]
# tool.uv.sources.hf_vit = { path = "..", editable = true }
# ///
"""Train or fine-tune a Vision Transformer on any image data set: one run, top to bottom.

    python recipes/train.py --config demo
    python recipes/train.py --dataset_name photos --model_name_or_path google/vit-base-patch16-224-in21k --output_dir runs/photos
    python recipes/train.py --dataset_name photos --preset tiny-patch16-224 --output_dir runs/scratch
    accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes 2 recipes/train.py --config cifar10

--config names a preset of recipes/configs or a YAML file of flags (`hf_vit.training.arguments.TrainArguments`); flags override it.
--dry_run prints what would be read and the plan, and ends. A run that was killed continues by the same command, as if nothing had
happened. The run folder then holds

    config.yaml     the plan and the resolved arguments; `--config` on it repeats the run
    metrics.jsonl   a line per log step and per evaluation
    checkpoints/    step-N: all that decides the rest of the run; best-N: the best weights so far
    model/          config, weights, image processor, code and card: ready for `from_pretrained` and for the Hub
    last/           the last weights, if model/ holds those of an earlier, better evaluation
    results.json    metrics with their intervals, scores of each class, times, seed, commit, command, hardware, versions, data
    confusion_matrix.csv   a row per true class, a column per predicted class; of several labels an image, counts of each
    predictions.csv   a row per evaluated image: row, file, label, predicted class, confidence, correct
    samples.safetensors    a few of the evaluated images, drawn at random, and the most confident mistakes, with label and logits

Exit codes: 0 when the run is finished, 75 when SIGTERM, SIGINT or SIGUSR1 stopped it and it can continue, 1 after an error, 2 for a
wrong flag. `accelerate launch` turns all but 0 into 1.
"""

from pathlib import Path


if __name__ == "__main__":  # the imports take seconds
    from command_line import training_arguments

    from hf_vit.training.arguments import TrainArguments

    ARGUMENTS = training_arguments(__doc__, TrainArguments)

import pandas as pd

from hf_vit import run_figures
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.system.run_files import PREDICTIONS
from hf_vit.training.train import train_as_script


def draw(folder: Path, run, log: list[dict], scores: dict, samples: dict):
    """The pictures of the card."""
    data, args = run.data, run.plan.args
    if args.problem_type == "regression":
        model, table = load_classifier(str(folder.parent), regression=True), pd.read_csv(run.folder / PREDICTIONS)
        run_figures.draw_regression(folder, log, table, samples, data.spec, model.to(run.accelerator.device))
        return
    has_examples = not (data.is_stream or args.cache_features or data.spec.processor is not None)
    model, examples = load_classifier(str(folder.parent)), run.batches.examples if has_examples else None
    run_figures.draw_run(
        folder, log, scores, samples, data.labels, data.spec, model.to(run.accelerator.device), examples
    )


if __name__ == "__main__":
    train_as_script(ARGUMENTS, None, draw)
