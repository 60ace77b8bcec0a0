"""Score a saved model on a data set.

accelerate launch recipes/evaluate.py --model_name_or_path runs/demo/model --dataset_name fashion-mnist-mini --split test
"""

import argparse
import json
import sys
from pathlib import Path


# This folder holds evaluate.py, which would hide the library of that name.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

import datasets
import torch
from accelerate import Accelerator
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.utils import logging

import hf_vit  # noqa: F401, makes the Auto classes know the model
from hf_vit import data, training


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model_name_or_path", required=True, help="Hub id or folder of an image classifier")
    parser.add_argument("--dataset_name", required=True, help="Hub id, local folder or file, or fashion-mnist-mini")
    parser.add_argument("--dataset_config", help="configuration of the data set, where it has several")
    parser.add_argument("--split", help="split to score; if not given: validation, else test")
    parser.add_argument("--image_column", help="column of images; found by its feature type if not given")
    parser.add_argument("--label_column", help="column of labels; found by its feature type if not given")
    parser.add_argument("--per_device_eval_batch_size", type=int, default=256)
    parser.add_argument("--num_workers", type=int, default=4, help="processes that decode images")
    parser.add_argument("--mixed_precision", choices=("auto", "no", "bf16", "fp16"), default="auto")
    parser.add_argument("--output_file", help="JSON file for the metrics")
    args = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    accelerator = Accelerator(mixed_precision=training.pick_precision(args.mixed_precision, device_type))
    if accelerator.device.type == "cpu":
        training.use_all_cores()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    with accelerator.main_process_first():
        splits, labels, scored = data.prepare(
            data.load(args.dataset_name, args.dataset_config),
            None, args.split, 0.0, args.image_column, args.label_column, 0,
        )  # fmt: skip
    model = AutoModelForImageClassification.from_pretrained(args.model_name_or_path).to(accelerator.device)
    form = data.image_form(AutoImageProcessor.from_pretrained(args.model_name_or_path), model.config)
    images = data.Images(splits["eval"], form)
    truth = data.match_labels(images.labels, labels, model.config.id2label)
    batches = data.batches_in_order(
        len(images), args.per_device_eval_batch_size, accelerator.process_index, accelerator.num_processes
    )
    logits = training.predict(model, data.loader(images, batches, args.num_workers), form, accelerator, len(images))
    metrics = {**training.score(logits, truth), "images": len(images), "split": scored}
    accelerator.print(json.dumps(metrics, indent=2))
    if args.output_file and accelerator.is_main_process:
        with open(args.output_file, "w") as file:
            json.dump({**metrics, "model": args.model_name_or_path, "data": args.dataset_name}, file, indent=2)
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, StrictDataclassError) as error:  # one sentence; a traceback would hide it
        sys.exit(f"error: {error}")
