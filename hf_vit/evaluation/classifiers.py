"""Any saved image classifier, its image processor, and what it says of images."""

import os
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedConfig, ViTImageProcessorPil
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from transformers.utils import is_timm_available

from hf_vit.data.columns import match_labels
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.loader import data_loader
from hf_vit.data.sampling import sequential_batches
from hf_vit.evaluation.multi_label import check_task, class_names, thresholds_of
from hf_vit.evaluation.prediction import predict
from hf_vit.formats.timm_processor import timm_processor
from hf_vit.model.configuration_hf_vit import HFViTConfig, as_pair, labels_by_id
from hf_vit.model.loading import base_of_adapter, non_finite
from hf_vit.model.modeling_hf_vit import HFViTForImageClassification
from hf_vit.system.command_line import script_name
from hf_vit.system.errors import UserError, as_user_errors
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.system.progress import progress_bar, warn
from hf_vit.system.text import listed


class SavedClassifier:
    """The model of a run, folder or Hub id on the device of an accelerator; its `ImageSpec`, class names and, where it gives several
    labels an image, thresholds (L,).

    Args:
        loading: as of `load_classifier`.
    """

    def __init__(self, checkpoint: str, accelerator, **loading):
        self.folder, self.accelerator = model_folder(checkpoint), accelerator
        self.model = load_classifier(self.folder, **loading).to(accelerator.device)
        self.spec = image_spec_of(load_processor(self.folder), self.model.config)
        self.names, self.thresholds = class_names(self.model.config), thresholds_of(self.model.config)

    def predict(
        self, rows: Dataset, on_bad_image: str = "stop", batch_size: int = 32, num_workers: int | None = 0, **how
    ) -> tuple[ImageDataset, torch.Tensor, torch.Tensor]:
        """The images of these rows, what the model gives for those that can be read, and their places (n,).

        Args:
            how: as of `prediction.predict`: `features=True`, for example.
        """
        images = ImageDataset(rows, self.spec, on_bad_image, decode_first=False)
        of_process = self.accelerator.process_index, self.accelerator.num_processes
        share = sequential_batches(len(images), batch_size, *of_process)
        batches = progress_bar("predicting", "batches", len(share), data_loader(images, share, num_workers))
        try:
            return images, *predict(self.model, batches, self.spec, self.accelerator, len(images), **how)
        except UserError as error:
            if len(images.skipped) < len(images):
                raise
            raise UserError(f"{error}; {next(iter(images.skipped))}") from error

    def match_labels(self, labels: torch.Tensor, names: list[str]) -> torch.Tensor:
        """Labels of a data set with the classes `names` -> those of the model, see `columns.match_labels`; ValueError if one has
        several labels an image and the other one."""
        check_task(labels, self.thresholds)
        return match_labels(labels, names, self.model.config.id2label)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, L) in [0, 1], which sum to 1 unless an image has several labels."""
        return logits.softmax(dim=1) if self.thresholds is None else logits.sigmoid()


def model_folder(checkpoint: str) -> str:
    """A Hub id or model folder as it is; of a run folder, its model/.

    Raises:
        ValueError: if it is a file; if there is no such folder, and the name looks like a path (`refuse_mistyped_path`).
    """
    checkpoint = os.path.expanduser(checkpoint)
    if Path(checkpoint).is_file():
        raise UserError(f"MODEL {checkpoint} is a file: name a run, a model folder, or USER/NAME on the Hub")
    folder, inside = Path(checkpoint), Path(checkpoint) / "model"
    is_model = (folder / "config.json").exists()
    if (folder / "config.yaml").is_file() and not is_model and not inside.is_dir():
        raise UserError(
            f"MODEL {checkpoint} is a run that is not finished: continue it with the command that started it"
        )
    found = str(inside) if inside.is_dir() and not is_model else checkpoint
    return refuse_mistyped_path(found, "MODEL")


@as_user_errors()
def load_classifier(checkpoint: str, trained: bool = False, regression: bool = False, ours: bool = False, **kwargs):
    """Any `AutoModelForImageClassification`, or else any format that hf_vit reads, or the base and adapter that a LoRA run saved.

    Args:
        trained: refuse a checkpoint without a head, which would be a new one.
        regression: take a model of numbers too.
        ours: read transformers' own classifiers, too, as an `HFViTForImageClassification`.
        kwargs: passed to `from_pretrained`, such as `dtype=`.

    Raises:
        ValueError: if it is no image classifier, a weight is not finite, a class has no name, an adapter no base, or what is
            `trained` no head.
    """
    base_of_adapter(checkpoint if Path(checkpoint).is_dir() else None, {})
    is_native = not ours and _is_native(checkpoint)
    model_class = AutoModelForImageClassification if is_native else HFViTForImageClassification
    model, info = model_class.from_pretrained(checkpoint, trust_remote_code=False, output_loading_info=True, **kwargs)
    reset = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
    if trained and reset:
        raise UserError(
            f"{checkpoint} is no trained classifier, it lacks {min(reset)}: fine-tune it first, with "
            + script_name("train")
        )
    if is_regression(model.config) and not (regression and model.config.num_labels == 1):
        raise UserError(f"{checkpoint} gives numbers and no classes (regression): wanted an image classifier")
    model.config.id2label = labels_by_id(model.config.id2label)
    if found := non_finite(model.state_dict()):  # transformers' own classes do not look
        raise UserError(f"the weights of {checkpoint} are not finite: {listed(found)} hold NaN or infinity")
    return model


def _is_native(checkpoint: str) -> bool:
    """Whether transformers has a classifier of the checkpoint's kind; of timm's, whether timm is installed."""
    config = PreTrainedConfig.get_config_dict(checkpoint)[0]
    if "pretrained_cfg" in config:
        return is_timm_available()
    return config.get("model_type") in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES


def is_regression(config) -> bool:
    """Whether a model gives numbers and no classes; transformers' own take a single logit for one."""
    return config.problem_type == "regression" or (
        config.problem_type is None and config.num_labels == 1 and config.model_type != HFViTConfig.model_type
    )


@as_user_errors()
def load_processor(checkpoint: str):
    """The image processor of a checkpoint; of a timm repo, what its `pretrained_cfg` says; else, with a warning, ViT's own."""
    config = PreTrainedConfig.get_config_dict(checkpoint)[0]
    if config.get("pretrained_cfg") is not None:
        return timm_processor(config["pretrained_cfg"], checkpoint)
    try:
        return AutoImageProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    except OSError:
        lacks = f"{checkpoint} has no readable preprocessor_config.json: save its image processor beside it"
        try:
            height, width = as_pair(HFViTConfig.from_pretrained(checkpoint).image_size)
        except ValueError:
            raise UserError(lacks) from None
        warn(f"{lacks}; until then, images are normalised with mean 0.5 and std 0.5")
        return ViTImageProcessorPil(size={"height": height, "width": width})
    except ValueError:
        raise
    except Exception as error:  # whatever a wrong kind of value leads to
        raise UserError(
            f"the preprocessor_config.json of {checkpoint} cannot be read as an image processor: {error!r}"
        ) from error
