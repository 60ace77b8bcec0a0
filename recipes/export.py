"""Export an image classifier for use without Python, or without this package: ONNX in float32 and
int8, and a torch.export program.

    python recipes/export.py runs/demo
    python recipes/export.py runs/photos --dataset_name new_photos --split train
    python recipes/export.py google/vit-base-patch16-224 --output_dir exported \\
        --dataset_name photos

MODEL is a run, a model folder or a Hub id of an image classifier. A run is evaluated on its own
images and exported to RUN/export. Config and image processor stay in the model folder. The output
folder holds

    onnx/model.onnx             pixel_values -> logits, for ONNX Runtime and, with the config of a
                                native model, Transformers.js
    onnx/model_quantized.onnx   the same with int8 weights, if there are images to evaluate it on;
                                dtype "q8" of Transformers.js
    model.pt2                   the same for torch.export.load, which needs torch alone
    export.json                 what was exported and measured

The batch may have any size. With rotary or no position embeddings, height and width may be any
multiple of the patch size, in model.pt2 at least two patches a side (model.onnx ignores rows and
columns of pixels that fill no patch). The files are written only if both float32 ones give torch's
logits for random pixels.
"""

import argparse
import json
import sys
from pathlib import Path

from command_line import COLUMNS, Parser, bad_images


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "MODEL [--flag value ...]")
    parser.add_argument("model", metavar="MODEL", help="run, model folder or Hub id of an image classifier")
    parser.add_argument("--output_dir", help="folder to write; default: RUN/export of a run")
    parser.add_group(
        "data",
        dataset_name="images to evaluate on: Hub id, folder or table file; default: the run's",
        dataset_config="configuration of the data set, if it has several",
        split="split to evaluate; default: the run's, else validation, else test",
        **COLUMNS,
        **bad_images("stop"),
    )
    return parser.parse_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

try:
    from hf_vit.hub import export as exporting
except ImportError as error:
    sys.exit(f'error: {error.name} cannot be imported, which exporting needs: pip install "hf_vit[export]" ({error})')
import datasets
import torch
import transformers

from hf_vit.card import weights_file
from hf_vit.data.columns import column_arguments, match_labels
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.normalization import normalize
from hf_vit.data.sampling import sequential_batches
from hf_vit.data.sources import open_source
from hf_vit.data.splits import prepare_splits
from hf_vit.evaluation.classifiers import load_processor, model_folder
from hf_vit.evaluation.intervals import intervals
from hf_vit.evaluation.multi_label import check_task, thresholds_of
from hf_vit.evaluation.scores import compute_metrics, headline
from hf_vit.system import environment
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.files import atomic_dir, checksum
from hf_vit.system.text import counted, listed
from hf_vit.training import arguments
from hf_vit.training.inputs import load_rows


BATCH_SIZE = 256  # of the evaluation; in int8, the activations of a batch share their scale
EXPORT_FILES = {"onnx", "model.pt2", "export.json"}


def predict(file: Path, images: ImageDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, L) of an ONNX file for all images that can be read, and their labels (n,)."""
    model = exporting.onnx_model(file)
    batches = data_loader(images, sequential_batches(len(images), BATCH_SIZE))
    pairs = [(model(normalize(batch["images"], images.spec)), batch["labels"]) for batch in batches]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return logits, labels


def finished_run(path: str) -> Path | None:
    """The folder of a finished run, as recipes/train.py leaves it; None if it is something else."""
    run = Path(path)
    return run if all((run / name).exists() for name in ("model", "config.yaml", "results.json")) else None


def rows_to_evaluate(args, run: Path | None):
    """Rows of images, their class names, a description of their source, and what to do with broken ones; None without data. Of a run
    they are those that it evaluated, unless others are named."""
    if args.dataset_name is not None:
        choice = {"train_split": None, "eval_split": args.split, **column_arguments(args)}
        splits, labels, split = prepare_splits(open_source(args).splits, **choice)
        source = {"name": args.dataset_name, "config": args.dataset_config, "split": split}
        return splits["eval"], labels, source, args.on_bad_image
    if run is None:
        return None
    trained = arguments.parse_args(["--config", str(run / "config.yaml")])
    if trained.problem_type == "regression":
        return None
    splits, _, labels, split = load_rows(trained, print)
    source = {"name": trained.dataset_name, "config": trained.dataset_config, "split": split}
    return splits["eval"], labels, source, trained.on_bad_image


def check_output_dir(folder: Path):
    """Raise ValueError unless `folder` is new, empty, or an earlier export and nothing else."""
    names = sorted(path.name for path in folder.glob("*"))
    if folder.is_file() or (names and not {"export.json"} <= {*names} <= EXPORT_FILES):
        raise UserError(f"--output_dir {folder} must be new, empty or an earlier export, and holds {listed(names)}")


def megabytes(file: Path) -> float:
    """The size of a file, with that of the weights beside it."""
    return round(sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*")) / 1e6, 3)


def evaluate(files: list[Path], images: ImageDataset, labels: list[str], config) -> tuple[list[dict], int]:
    """The scores of each ONNX file, and the number of images that can be read."""
    thresholds, found = thresholds_of(config), []
    for file in files:
        logits, truth = predict(file, images)
        check_task(truth, thresholds)
        truth = match_labels(truth, labels, config.id2label)
        metric, value = headline(compute_metrics(logits, truth, thresholds))
        found.append({metric: value, "interval": intervals(logits, truth, thresholds)[metric]})
    return found, len(truth)


def export(checkpoint: str, folder: Path, evaluated) -> dict:
    """Write all files into `folder`, an int8 one only with images to evaluate it on; the content of export.json."""
    model = exporting.load_for_export(checkpoint)
    full, small, saved = folder / "onnx" / "model.onnx", folder / "onnx" / "model_quantized.onnx", folder / "model.pt2"
    full.parent.mkdir()
    if evaluated is not None:  # before minutes are spent
        match_labels(torch.zeros(0, dtype=torch.long), evaluated[1], model.config.id2label)
    program = exporting.trace(model)
    torch.export.save(program, saved)
    exporting.to_onnx(program, model.config, full)
    batches, data, weights = exporting.comparison_batches(model.config), None, weights_file(Path(checkpoint))
    files = {
        full: {"difference": exporting.logit_difference(model, exporting.onnx_model(full), batches)},
        saved: {"difference": exporting.logit_difference(model, exporting.torch_program(saved), batches)},
    }
    if evaluated is not None:
        rows, labels, source, on_bad_image = evaluated
        images = ImageDataset(rows, image_spec_of(load_processor(checkpoint), model.config), on_bad_image)
        exporting.quantize(full, small)
        (of_full, of_small), count = evaluate([full, small], images, labels, model.config)
        files[full] |= of_full
        how = "dynamic; weights of MatMul int8, per channel, reduced range; the rest float32"
        files[small] = {**of_small, "quantization": how}
        data = {**source, "images": count, "skipped_images": len(rows) - count, "batch_size": BATCH_SIZE}
    report = {
        "model": checkpoint,
        "weights_sha256": checksum(weights) if weights.is_file() else None,
        "data": data,
        "files": {str(file.relative_to(folder)): {"megabytes": megabytes(file), **row} for file, row in files.items()},
        **environment.environment_info("cpu", 1, "no"),
    }
    (folder / "export.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def lines(report: dict):
    """A line per file: size, difference from torch, accuracy."""
    for name, row in report["files"].items():
        parts = [f"{name}: {row['megabytes']:,.1f} MB"]
        if "difference" in row:
            parts.append(f"logits {row['difference']['relative']:.1e} from torch's, relative to the largest")
        if "interval" in row:
            (metric, value), (low, high), data = headline(row), row["interval"], report["data"]
            parts.append(
                f"{metric.replace('_', ' ')} {value:.2%} ({low:.2%} to {high:.2%}) of {counted(data['images'], 'image')}"
            )
        yield ", ".join(parts)


def main(args: argparse.Namespace):
    checkpoint, run = model_folder(args.model), finished_run(args.model)
    if args.output_dir is None and run is None:
        raise UserError(f"{args.model} is no finished run: pass --output_dir")
    output = Path(args.output_dir or run / "export").resolve()
    check_output_dir(output)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    evaluated = rows_to_evaluate(args, run)
    if evaluated is None:
        print("no int8 file is written without images of classes to evaluate it on (--dataset_name)")
    with atomic_dir(output) as folder:
        report = export(checkpoint, folder, evaluated)
    print("\n".join([*lines(report), f"written to {output}"]))


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))
