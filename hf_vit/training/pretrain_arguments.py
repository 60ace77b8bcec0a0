"""The flags of recipes/pretrain.py: those of train.py but for what is of labels, and those of a masked autoencoder.

It imports the standard library and PyYAML alone, as `arguments` does.
"""

from dataclasses import dataclass

from hf_vit.training import arguments
from hf_vit.training.arguments import TrainArguments, argument


USES_NO_LABELS = (
    "label_separator", "label_columns", "shots", "balance", "loss", "label_smoothing", "calibrate", "mixup", "cutmix",
    "distillation_alpha", "distillation_temperature", "head_learning_rate",
)  # fmt: skip
TRAINS_ALL = (
    "freeze_backbone", "freeze_layers", "cache_features", "lora_rank", "lora_alpha", "lora_dropout", "lora_save",
)  # fmt: skip
FINE_TUNE = "leave it out here, and give it to train.py, which fine-tunes"


@dataclass
class PretrainArguments(TrainArguments):
    """Every number of a run that learns without labels.

    The defaults are those of masked autoencoders (arXiv 2111.06377, table 8) where they are not those of train.py.
    """

    groups = {**arguments.GROUPS, "mask_ratio": "masked autoencoder"}
    refused = {
        **dict.fromkeys(USES_NO_LABELS, f"is of labels, from which pretrain.py does not learn: {FINE_TUNE}"),
        **dict.fromkeys(TRAINS_ALL, f"is for a part of the weights, and pretrain.py trains all: {FINE_TUNE}"),
    }

    label_column: str | None = argument(
        None, "column of labels, for the k-NN accuracy alone; found by its feature type if not given"
    )
    label_names: str | None = argument(
        None, "text file of class names, a line each, where labels are bare numbers, for the k-NN accuracy"
    )
    train_fraction: float = argument(1.0, "part of the images to train on; of labelled ones, of each class")
    model_name_or_path: str | None = argument(
        None, "checkpoint to go on from, with or without a decoder; without it training starts from scratch"
    )
    teacher_name_or_path: str | None = argument(
        None,
        "model of any format that hf_vit reads, whose features of whole images are learned, instead of masked pixels",
    )
    num_train_epochs: float | None = argument(
        None, "passes over the training set; if not given, as many as show 500,000 images, from 10 to 400"
    )
    per_device_train_batch_size: int | None = argument(None, "images a process and a forward pass; if not given 64")
    learning_rate: float | None = argument(None, "peak; if not given, by how wide the model is: 1e-3 at 128")
    adam_beta2: float = argument(0.95, "AdamW")
    crop_scale: float | None = argument(0.2, "crop resized: smallest part of the image's area")
    eval_epochs: int | None = argument(None, "epochs between scorings; if not given, 20 scorings a run")

    mask_ratio: float = argument(
        0.75, "part of the patches that the encoder does not see, and the decoder answers with"
    )
    norm_pix_loss: bool = argument(True, "each patch is learned in units of its own mean and standard deviation")
    decoder_hidden_size: int | None = argument(
        None, "width of the decoder; if not given that of the checkpoint's, else half of the encoder's"
    )
    decoder_num_hidden_layers: int | None = argument(
        None, "its layers; if not given those of the checkpoint's, else a third of the encoder's"
    )
    decoder_num_attention_heads: int | None = argument(
        None, "its attention heads; if not given those of the checkpoint's, else one for 32 channels"
    )
    decoder_intermediate_size: int | None = argument(
        None, "width of its MLPs; if not given that of the checkpoint's, else four times its own"
    )


def parse_args(argv: list[str], text: str | None = None) -> PretrainArguments:
    """As `arguments.parse_args`."""
    return arguments.parse_args(argv, text, PretrainArguments)
