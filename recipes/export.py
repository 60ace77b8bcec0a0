"""Export an image classifier for use without Python, or without this package: ONNX in float32 and int8, and a torch program.

    python recipes/export.py runs/demo
    python recipes/export.py google/vit-base-patch16-224 --output_dir exported --dataset_name photos

MODEL is a run folder, whose data and scored images are then taken and which holds the result in `export/`; or a model folder
or Hub id of an image classifier. Config and image processor stay where they are, in the model folder. The output folder holds

    onnx/model.onnx             pixel_values -> logits, for ONNX Runtime and, beside a native model's config, Transformers.js
    onnx/model_quantized.onnx   the same with int8 weights, where there are images to score it on; dtype "q8" of Transformers.js
    model.pt2                   the same for torch.export.load, which needs torch alone
    export.json                 what was made and measured

The batch is of any size; so are height and width where positions are rotary or none: a multiple of the patch, in model.pt2 two
patches or more a side (model.onnx leaves out the rows and columns of pixels that fill no patch). Nothing is written unless the
logits of both float32 files are those of torch, on the first images of the data or on random ones.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path


try:
    import onnx
    import onnx_ir.passes.common
    import onnxruntime
    import onnxscript  # noqa: F401, torch.onnx writes with it
    from onnxruntime.quantization import QuantType, quantize_dynamic
except ImportError as error:
    sys.exit(f'error: {error.name} cannot be imported, which exporting needs: pip install -e ".[export]" ({error})')
import datasets
import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn

from hf_vit import HFViTForImageClassification
from hf_vit.data import datasets as data
from hf_vit.data.augment import normalize
from hf_vit.hub import sharing
from hf_vit.model.configuration_hf_vit import as_pair
from hf_vit.system import environment
from hf_vit.system.errors import run_script
from hf_vit.system.files import atomic_dir, checksum
from hf_vit.training import arguments as presets
from hf_vit.training import parts as training


OPSET = 18
LARGEST_DIFFERENCE = 1e-4  # of logits to those of torch, as a part of the largest logit
LARGEST_FILE = 2**31 - 2**24  # bytes of weights; protobuf holds 2 GiB, and the graph needs some
BATCH = 256  # images that are scored at a time; int8 rounds the activations of a batch together
WRITTEN = {"onnx", "model.pt2", "export.json"}

# What is said on the way and known to be harmless, by logger.
KNOWN = {
    "torch.onnx._internal.exporter._registration": "torchvision is not installed",  # no operator of it is used
    "onnxscript.optimizer._constant_folding": "Skipping constant folding for op Split",  # the positions of learned tokens
    "root": "Please consider to run pre-processing",  # measured: the int8 file is as near with it as without
}


@contextlib.contextmanager
def without_known_noise():
    filters = {
        name: lambda record, start=start: not record.getMessage().startswith(start) for name, start in KNOWN.items()
    }
    for name, keep in filters.items():
        logging.getLogger(name).addFilter(keep)
    try:
        with warnings.catch_warnings():  # torch, of its own copying of its own graph
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        for name, keep in filters.items():
            logging.getLogger(name).removeFilter(keep)


# ----------------------------------------------------------------------------------------------------------------------
# Model to files


def load(checkpoint: str) -> HFViTForImageClassification:
    """Any image classifier that hf_vit reads, in float32 and eval mode.

    Raises:
        ValueError: if it has no head, which would then be random.
    """
    model, info = HFViTForImageClassification.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    if any(name.startswith("classifier.") for name in info["missing_keys"]):
        raise ValueError(
            f"{checkpoint} has no classifier; wanted a model that gives logits: fine-tune it first, with recipes/train.py"
        )
    return model.eval().requires_grad_(False)


def any_size(config) -> bool:
    """Whether the model takes images of other sizes as they are, and the exported files too."""
    return config.position_embedding in ("rotary", "none")


class Logits(nn.Module):
    """Pixels (B, C, H, W) -> logits (B, L), one tensor and not an object of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values).logits


def dynamic_shapes(config) -> tuple[dict]:
    """The dimensions of pixel_values that may differ from call to call, as torch.export takes them."""
    shapes = {0: torch.export.Dim("batch")}
    if any_size(config):
        height, width = as_pair(config.patch_size)
        # torch specialises on a single row or column of patches
        rows, columns = torch.export.Dim("rows", min=2), torch.export.Dim("columns", min=2)
        shapes |= {2: height * rows, 3: width * columns}
    return (shapes,)


def trace(model: HFViTForImageClassification) -> torch.export.ExportedProgram:
    """The computation from pixels to logits without the Python around it."""
    config = model.config
    height, width = as_pair(config.image_size)
    if any_size(config):
        height, width = (
            max(side, 2 * patch) for side, patch in zip((height, width), as_pair(config.patch_size), strict=True)
        )
    with without_known_noise():
        pixel_values = torch.zeros(2, config.num_channels, height, width)
        traced = torch.export.export(Logits(model).eval(), (pixel_values,), dynamic_shapes=dynamic_shapes(config))
    for node in traced.graph.nodes:  # each carries a stack trace, with paths of this machine
        node.meta.pop("stack_trace", None)
    return traced


def to_onnx(program: torch.export.ExportedProgram, config, file: Path):
    """Write an ONNX file; weights of more than `LARGEST_FILE` bytes lie beside it, in `file`.data."""
    with without_known_noise():
        written = torch.onnx.export(
            program, dynamo=True, input_names=["pixel_values"], output_names=["logits"], opset_version=OPSET,
            dynamic_shapes=dynamic_shapes(config), verbose=False,
        )  # fmt: skip
        # What is left of where each node came from; of a small model it is a tenth of the file.
        onnx_ir.passes.common.ClearMetadataAndDocStringPass()(written.model)
        large = sum(tensor.nbytes for tensor in program.state_dict.values()) > LARGEST_FILE
        written.save(file, external_data=large)


def quantize(source: Path, target: Path):
    """An ONNX file with the weights of its matrix products in int8; activations are quantized where they arise.

    Measured on the demo's 2,000 test images in batches of 250 (87.80% in float32, 0.258 ms an image on one core of an EPYC
    with VNNI): dynamic quantization in 16 variants gives 87.70 to 88.00%, all within the noise. Of these

        MatMul, int8 per channel, reduced range     87.95%, logits off by 2.1%, 0.58 MB, 0.152 ms   <- this one
        MatMul, int8 per channel                    87.90%, 1.9%, 0.58 MB, 0.150 ms
        MatMul, int8 per tensor                     87.80%, 2.1%, 0.57 MB, 0.148 ms
        MatMul, uint8 per channel                   87.75%, 1.6%, 0.59 MB, 0.216 ms
        MatMul and Conv, int8 per channel           87.80%, 2.3%, 0.54 MB, 0.189 ms

    The reduced range (7 bits) costs nothing here and keeps sums from saturating on CPUs without VNNI. The patch convolution,
    one of many products, stays in float32. One scale is taken for the activations of a whole batch, so that answers depend a
    little on the batch: 88.00% in batches of 1 and of 32.
    """
    model = onnx.load(source)
    del model.graph.value_info[:]  # it holds shapes of weights that are transposed now; they are inferred anew
    with without_known_noise():
        quantize_dynamic(
            model, target, op_types_to_quantize=["MatMul"], per_channel=True, reduce_range=True,
            weight_type=QuantType.QInt8,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# What the files compute


def session(file: Path):
    """pixel_values (B, C, H, W) -> logits (B, L), computed by ONNX Runtime from a file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    running = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda pixel_values: torch.from_numpy(running.run(["logits"], {"pixel_values": pixel_values.numpy()})[0])


def program(file: Path):
    """As `session`, computed by torch from a saved program."""
    with without_known_noise():
        return torch.export.load(file).module()


@torch.no_grad()
def difference(model, computed, samples: list[torch.Tensor]) -> dict[str, float]:
    """How far what `computed` gives for each sample is from the model's logits: `absolute`, and `relative` to the largest.

    Raises:
        ValueError: if that is more than `LARGEST_DIFFERENCE`.
    """
    expected = [model(pixel_values).logits for pixel_values in samples]
    found = [computed(pixel_values) for pixel_values in samples]
    absolute = max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))
    largest = max(float(logits.abs().max()) for logits in expected)
    relative = absolute / max(largest, 1e-12)  # an untrained head gives zeros
    if not relative <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"the exported logits differ from torch's by {relative:.1e} of the largest logit; wanted {LARGEST_DIFFERENCE:.0e} "
            "or less: nothing is written; try the versions in constraints.txt"
        )
    return {"absolute": absolute, "relative": relative}


def samples(config, pixel_values: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Pixels to compare on: a batch of 1, one of another size, and where they may be, images of another height and width.

    Args:
        pixel_values: (B, C, H, W) of real images; random ones where there are none.
    """
    if pixel_values is None:
        pixel_values = torch.randn(
            3, config.num_channels, *as_pair(config.image_size), generator=torch.Generator().manual_seed(0)
        )
    chosen = [pixel_values[:1], pixel_values[torch.arange(3) % len(pixel_values)]]
    if any_size(config):
        height, width = as_pair(config.patch_size)
        larger = (3 * height, 2 * width + pixel_values.shape[3] // width * width)
        chosen.append(nn.functional.interpolate(pixel_values, size=larger, mode="bilinear"))
    return chosen


def predict(file: Path, images: data.Images) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, L) of an ONNX file for all images that can be read, and their labels (n,)."""
    computed = session(file)
    batches = data.loader(images, data.batches_in_order(len(images), BATCH), num_workers=min(4, os.cpu_count() or 1))
    pairs = [(computed(normalize(batch["images"], images.form)), batch["labels"]) for batch in batches]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return logits, labels


def accuracy(logits: torch.Tensor, labels: torch.Tensor, names: list[str]) -> dict:
    """{"accuracy", "interval"}: in [0, 1], and its 95% interval."""
    interval = training.report(logits, labels, names)["intervals"]["accuracy"]
    return {"accuracy": training.score(logits, labels)["accuracy"], "interval": interval}


# ----------------------------------------------------------------------------------------------------------------------
# The command


def run_folder(path: str) -> Path | None:
    """A finished run, as recipes/train.py leaves it."""
    run = Path(path)
    return run if all((run / name).exists() for name in ("model", "config.yaml", "results.json")) else None


def rows_to_score(args, run: Path | None):
    """Rows of images as `data.prepare` gives them, their class names, whose they are, and what to do with broken ones; None
    where no data are named.

    Of a run they are the very rows that it scored, unless other data or another split is asked for.

    Raises:
        ValueError: as `data.prepare`; and if the data of a run are no longer those that it scored.
    """
    asked = argparse.Namespace(**vars(args))
    if args.dataset_name is None and run is not None:
        asked = presets.parse(["--config", str(run / "config.yaml")])
        for name in ("dataset_config", "image_column", "label_column", "label_names", "on_bad_image"):
            setattr(asked, name, getattr(args, name) or getattr(asked, name))
    if asked.dataset_name is None:
        return None
    columns = {name: getattr(asked, name) for name in ("image_column", "label_column")}
    columns["label_names"] = presets.read_names(asked.label_names)
    as_trained = asked is not args and args.split is None and args.dataset_name is None
    streaming = as_trained and asked.streaming
    splits = data.load(asked.dataset_name, asked.dataset_config, streaming)
    if streaming:
        _, rows, labels, scored = data.prepare_stream(
            splits, train_split=asked.train_split, eval_split=asked.eval_split, **columns
        )
    elif as_trained:
        sizes = {
            name: getattr(asked, name)
            for name in ("train_split", "eval_split", "eval_fraction", "train_fraction", "shots", "seed")
        }
        splits, labels, scored = data.prepare(splits, **columns, **sizes)
        rows = splits["eval"]
    else:
        splits, labels, scored = data.prepare(splits, train_split=None, eval_split=args.split, **columns)
        rows = splits["eval"]
    if as_trained:
        was = json.loads((run / "results.json").read_text())["data"]
        gone = len(rows) - was["scored_images"]
        if (was["scored"], was["labels"]) != (scored, labels) or gone not in range(was["skipped_images"] + 1):
            raise ValueError(
                f"{run} scored {was['scored_images']} images of {was['name']} ({was['scored']}), where now there are {len(rows)} "
                f"({scored}); wanted the same data: mend them, or name others with --dataset_name or --split"
            )
    source = {"name": asked.dataset_name, "config": asked.dataset_config, "split": scored}
    return rows, labels, source, asked.on_bad_image or "stop"


def check_place(folder: Path):
    """Raise ValueError unless `folder` is free, empty or an earlier export and nothing else."""
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    is_export = "export.json" in there and there <= WRITTEN
    if (folder.exists() and not folder.is_dir()) or (there and not is_export):
        what = ", ".join(sorted(there - WRITTEN or there)[:3])
        raise ValueError(
            f"{folder} is {f'not empty ({what})' if there else 'a file'}; wanted a new or empty folder, or an earlier export: name another "
            "--output_dir"
        )


def weights_sha256(checkpoint: str) -> str | None:
    """SHA-256 of model.safetensors, or of an adapter's file; None where the weights lie in others."""
    for name in (sharing.WEIGHTS, sharing.ADAPTER):
        file = Path(checkpoint, name) if Path(checkpoint).is_dir() else try_to_load_from_cache(checkpoint, name)
        if isinstance(file, str | Path) and Path(file).is_file():
            return checksum(Path(file))
    return None


def describe(config) -> dict:
    """Input and output of the exported files; a dimension that is no number is dynamic."""
    height, width = as_pair(config.image_size)
    if any_size(config):
        height, width = (
            f"{side} * {name}" for side, name in zip(as_pair(config.patch_size), ("rows", "columns"), strict=True)
        )
    return {
        "input": {"name": "pixel_values", "shape": ["batch", config.num_channels, height, width]},
        "output": {"name": "logits", "shape": ["batch", config.num_labels]},
        "dynamic": ["batch", "height", "width"] if any_size(config) else ["batch"],
        "opset": OPSET,
    }


def megabytes(file: Path) -> float:
    """Of a file, with the weights beside it where it has some."""
    return round(sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*")) / 1e6, 3)


def export(checkpoint: str, folder: Path, found) -> dict:
    """Write all files into `folder`, and return what export.json holds.

    Args:
        found: as `rows_to_score` gives it; without images no int8 file is written.
    """
    model = load(checkpoint)
    config, images, pixel_values = model.config, None, None
    names = [config.id2label[index] for index in range(config.num_labels)]
    if found is not None:
        rows, labels, source, on_bad_image = found
        data.match_labels(torch.zeros(0, dtype=torch.long), labels, config.id2label)  # before minutes are spent
        images = data.Images(rows, data.image_form(training.load_processor(checkpoint), config), on_bad_image)
        first = next(data.loader(images, data.batches_in_order(len(images), 3), 0), None)
        pixel_values = None if first is None else normalize(first["images"], images.form)

    full, small, saved = folder / "onnx" / "model.onnx", folder / "onnx" / "model_quantized.onnx", folder / "model.pt2"
    full.parent.mkdir()
    traced = trace(model)
    torch.export.save(traced, saved)
    to_onnx(traced, config, full)
    compared = samples(config, pixel_values)
    files = {
        full: {"difference": difference(model, session(full), compared)},
        saved: {"difference": difference(model, program(saved), compared)},
    }
    told = {
        "model": checkpoint,
        "weights_sha256": weights_sha256(checkpoint),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **describe(config),
        "compared_on": {
            "images": "random" if pixel_values is None else f"{source['name']} ({source['split']})",
            "shapes": [list(sample.shape) for sample in compared],
        },
        "data": None,
    }
    if images is not None:
        quantize(full, small)
        answers = {}
        for file in (full, small):
            logits, truth = predict(file, images)
            truth = data.match_labels(truth, labels, config.id2label)
            files.setdefault(file, {}).update(accuracy(logits, truth, names))
            answers[file] = logits.argmax(dim=1)
        files[small]["answers_as_float32"] = (answers[full] == answers[small]).float().mean().item()
        files[small]["quantization"] = "dynamic; weights of MatMul int8, per channel, reduced range; the rest float32"
        told["data"] = {**source, "images": len(truth), "skipped_images": len(rows) - len(truth), "batch_size": BATCH}
    told["files"] = {
        str(file.relative_to(folder)): {"megabytes": megabytes(file), **measured} for file, measured in files.items()
    }
    told |= environment.environment_info("cpu", 1, "no")
    told["versions"] |= {name: version(name) for name in ("onnx", "onnxruntime", "onnxscript")}
    (folder / "export.json").write_text(json.dumps(told, indent=2) + "\n")
    return told


def table(told: dict) -> str:
    """The files, a line each: size, difference to torch, accuracy."""
    lines = [f"{'file':<26} {'MB':>9}  {'difference':>10}  accuracy"]
    for name, row in told["files"].items():
        apart = f"{row['difference']['relative']:.1e}" if "difference" in row else "-"
        right = (
            f"{row['accuracy']:.2%} ({row['interval'][0]:.2%} to {row['interval'][1]:.2%})"
            if "accuracy" in row
            else "-"
        )
        lines.append(f"{name:<26} {row['megabytes']:>9,.1f}  {apart:>10}  {right}")
    whose = told["data"]
    if whose is not None:
        lines.append(
            f"accuracy, with its 95% interval, on {whose['images']:,} images of {whose['name']} ({whose['split']})"
        )
    lines.append("difference: the largest to a logit of torch, as a part of the largest logit")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="run folder; or model folder or Hub id of an image classifier")
    parser.add_argument("--output_dir", help="folder to write; of a run folder RUN/export if not given")
    parser.add_argument(
        "--dataset_name", help="images to score on: Hub id, local folder or file, or fashion-mnist-mini"
    )
    parser.add_argument("--dataset_config", help="configuration of the data set, where it has several")
    parser.add_argument("--split", help="split to score; if not given: validation, else test; of a run what it scored")
    parser.add_argument("--image_column", help="column of images; found by its feature type if not given")
    parser.add_argument("--label_column", help="column of labels; found by its feature type if not given")
    parser.add_argument("--label_names", help="text file of class names, a line each, where labels are bare numbers")
    parser.add_argument(
        "--on_bad_image", choices=("stop", "skip"), help="images that cannot be read; if not given: stop"
    )
    args = parser.parse_args()

    run = run_folder(args.model)
    if args.output_dir is None and run is None:
        raise ValueError(
            f"{args.model} is no finished run (a folder with model/, config.yaml and results.json), and no folder to write to is named; wanted one "
            "of the two: pass --output_dir"
        )
    if not Path(args.model).exists() and (args.model.startswith((".", "/", "~")) or args.model.count("/") > 1):
        raise ValueError(
            f"{args.model}: there is no such folder; wanted a run, a model folder or a Hub id (owner/name)"
        )
    output = Path(args.output_dir or run / "export").resolve()
    check_place(output)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    found = rows_to_score(args, run)
    if found is None:
        print("no int8 file is written: name images to score it on with --dataset_name")
    with atomic_dir(output) as folder:
        told = export(training.model_folder(args.model), folder, found)
    print(table(told))
    print(f"written to {output}")


if __name__ == "__main__":
    run_script(main)
