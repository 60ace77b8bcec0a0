"""A classifier as ONNX files and a torch program: writing them, running them, and comparing their logits with the model's.

Not by `transformers.exporters`: its programs (5.23) load with transformers only, and its ONNX files name folders of this machine.
"""

import contextlib
import logging
import warnings
from pathlib import Path

import onnx
import onnx_ir.passes.common
import onnxruntime
import onnxscript  # noqa: F401, torch.onnx writes with it
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import nn

from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.model.configuration_hf_vit import as_pair
from hf_vit.model.modeling_hf_vit import HFViTForImageClassification
from hf_vit.system.errors import UserError


OPSET = 18
MAX_DIFFERENCE = 1e-4  # of logits from those of torch, relative to the largest logit
MAX_EMBEDDED_BYTES = 2**31 - 2**24  # of weights within an ONNX file: protobuf holds 2 GiB, and the graph needs some

# Messages known to be harmless, by logger.
NOISE = {
    "torch.onnx._internal.exporter._registration": "torchvision is not installed",  # none of its operators is used
    "onnxscript.optimizer._constant_folding": "Skipping constant folding for op Split",  # positions of learned tokens
    "root": "Please consider to run pre-processing",  # measured: the int8 file is as close without it
}
for name, start in NOISE.items():
    logging.getLogger(name).addFilter(lambda record, start=start: not record.getMessage().startswith(start))


@contextlib.contextmanager
def ignore_treespec_warning():
    """Hide what torch says about the way it copies its own graph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        yield


def load_for_export(checkpoint: str) -> HFViTForImageClassification:
    """Any image classifier that hf_vit reads, in float32 and eval mode; ValueError if it has no trained head."""
    return (
        load_classifier(checkpoint, trained=True, regression=True, ours=True, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )


def onnx_model(file: Path):
    """A function pixel_values (B, C, H, W) -> logits (B, L) that ONNX Runtime computes from a file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda pixel_values: torch.from_numpy(session.run(["logits"], {"pixel_values": pixel_values.numpy()})[0])


def takes_any_size(config) -> bool:
    """Whether the model, and so the exported files, take images of any height and width."""
    return config.position_embedding in ("rotary", "none")


class Logits(nn.Module):
    """Pixels (B, C, H, W) -> logits (B, L), as a tensor instead of an output class of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values).logits


def dynamic_shapes(config) -> tuple[dict]:
    """The dimensions of pixel_values that may vary, as torch.export takes them."""
    shapes = {0: torch.export.Dim("batch")}
    if takes_any_size(config):
        height, width = as_pair(config.patch_size)
        # torch specialises on a single row or column of patches
        rows, columns = torch.export.Dim("rows", min=2), torch.export.Dim("columns", min=2)
        shapes |= {2: height * rows, 3: width * columns}
    return (shapes,)


def trace(model: HFViTForImageClassification) -> torch.export.ExportedProgram:
    """The computation from pixels to logits as a torch program."""
    config = model.config
    height, width = as_pair(config.image_size)
    if takes_any_size(config):
        patch_height, patch_width = as_pair(config.patch_size)
        height, width = max(height, 2 * patch_height), max(width, 2 * patch_width)
    pixel_values = torch.zeros(2, config.num_channels, height, width)
    with ignore_treespec_warning():
        program = torch.export.export(Logits(model).eval(), (pixel_values,), dynamic_shapes=dynamic_shapes(config))
    for node in program.graph.nodes:  # each carries a stack trace, with paths of this machine
        node.meta.pop("stack_trace", None)
    return program


def to_onnx(program: torch.export.ExportedProgram, config, file: Path):
    """Write an ONNX file; weights of more than `MAX_EMBEDDED_BYTES` go into `file`.data beside it."""
    with ignore_treespec_warning():
        names = dict(input_names=["pixel_values"], output_names=["logits"])
        shapes = dynamic_shapes(config)
        onnx_program = torch.onnx.export(program, opset_version=OPSET, dynamic_shapes=shapes, verbose=False, **names)
        # Records of where each node came from are a tenth of a small model's file.
        onnx_ir.passes.common.ClearMetadataAndDocStringPass()(onnx_program.model)
        is_large = sum(tensor.nbytes for tensor in program.state_dict.values()) > MAX_EMBEDDED_BYTES
        onnx_program.save(file, external_data=is_large)


def quantize(source: Path, target: Path):
    """Write an ONNX file with int8 weights in its matrix products; activations are quantized at run time.

    Measured on the demo's 2,000 test images in batches of 250, on one core of an EPYC with VNNI: 87.95% and 0.152 ms an image,
    against 87.80% and 0.258 ms in float32. The accuracies of 16 variants are within the noise; the reduced range (7 bits) keeps
    sums from saturating on CPUs without VNNI. All images of a batch share the scale of their activations.
    """
    model = onnx.load(source)
    del model.graph.value_info[:]  # shapes of weights that will be transposed; they are inferred again
    quantize_dynamic(model, target, op_types_to_quantize=["MatMul"], per_channel=True, reduce_range=True)


def torch_program(file: Path):
    """A function pixel_values (B, C, H, W) -> logits (B, L), computed by torch from a saved program."""
    with ignore_treespec_warning():
        return torch.export.load(file).module()


@torch.no_grad()
def logit_difference(model, exported, batches: list[torch.Tensor]) -> dict[str, float]:
    """The largest difference between the logits of an exported file and of its model: "absolute", and "relative" to the largest logit.

    ValueError if that is more than `MAX_DIFFERENCE`.
    """
    expected = [model(pixel_values).logits for pixel_values in batches]
    found = [exported(pixel_values) for pixel_values in batches]
    absolute = max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))
    largest = max(float(logits.abs().max()) for logits in expected)
    relative = absolute / max(largest, 1e-12)  # an untrained head gives zeros
    if not relative <= MAX_DIFFERENCE:
        raise UserError(
            f"the exported logits differ from torch's by {relative:.1e} of the largest logit; wanted {MAX_DIFFERENCE:.0e} "
            "or less: nothing is written; try the versions in constraints.txt"
        )
    return {"absolute": absolute, "relative": relative}


def comparison_batches(config) -> list[torch.Tensor]:
    """A batch of 1, one of 3, and one of another size if the model takes it, of random pixels."""
    size = (3, config.num_channels, *as_pair(config.image_size))
    pixel_values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    batches = [pixel_values[:1], pixel_values]
    if takes_any_size(config):
        height, width = as_pair(config.patch_size)
        larger = (3 * height, 2 * width + pixel_values.shape[3] // width * width)
        batches.append(nn.functional.interpolate(pixel_values, size=larger, mode="bilinear"))
    return batches
