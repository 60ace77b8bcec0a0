"""A classifier in an ONNX file, as recipes/export.py writes it, in the place of a torch model."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit.model.configuration_hf_vit import labels_by_id
from hf_vit.system.errors import UserError
from hf_vit.system.run_files import read_json


def is_onnx(checkpoint: str) -> bool:
    return Path(checkpoint).suffix.lower() == ".onnx" and Path(checkpoint).is_file()


def onnx_model(file: Path):
    """A function pixel_values (B, C, H, W) -> logits (B, L) that ONNX Runtime computes from a file.

    Raises:
        ImportError: without onnxruntime.
        ValueError: if the file cannot be read.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f'{file} needs onnxruntime: pip install -e ".[export]" ({error})') from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, which are no subclass of another
        raise UserError(f"{file} cannot be read as an ONNX model: {error}") from error
    return lambda pixel_values: torch.from_numpy(session.run(["logits"], {"pixel_values": pixel_values.numpy()})[0])


def config_folder(checkpoint: str) -> str:
    """Where config and image processor of a checkpoint are: of an ONNX file, the model that it was made of.

    That is the folder of the file, the one above (as Transformers.js has it), `model/` of the run whose `export/` holds it, or what
    export.json names.

    Raises:
        ValueError: if there is none of them.
    """
    if not is_onnx(checkpoint):
        return checkpoint
    file = Path(checkpoint).resolve()
    above = file.parent.parent
    for folder in (file.parent, above, above.parent / "model"):
        if (folder / "config.json").is_file():
            return str(folder)
    if (above / "export.json").is_file():
        return read_json(above / "export.json", {"model": str})["model"]
    raise UserError(
        f"{checkpoint} says nothing about its labels and its image processor: put config.json and preprocessor_config.json of its "
        "model beside it"
    )


class OnnxClassifier(nn.Module):
    """Pixels (B, C, H, W) -> logits (B, L), computed by ONNX Runtime on the CPU; `config` is that of the model it was made of."""

    def __init__(self, file: str):
        super().__init__()
        self.config = AutoConfig.from_pretrained(config_folder(file), trust_remote_code=False)
        self.config.id2label = labels_by_id(self.config.id2label)
        self.file, self.session = Path(file), onnx_model(Path(file))

    def forward(self, pixel_values):
        return ImageClassifierOutput(logits=self.session(pixel_values.float().cpu()).to(pixel_values.device))
