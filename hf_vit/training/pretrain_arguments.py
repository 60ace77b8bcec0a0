"""The flags of recipes/pretrain.py: those of train.py but for what is of labels, and those of a masked autoencoder."""

from dataclasses import dataclass

from hf_vit.training.arguments import BELOW_ONE, PART, TrainArguments, argument


USES_NO_LABELS = (
    "problem_type", "label_separator", "label_columns", "shots", "balance", "label_smoothing", "mixup", "cutmix",
    "head_learning_rate",
)  # fmt: skip
TRAINS_ALL = ("freeze_backbone", "freeze_layers", "cache_features", "lora_rank", "lora_save")


@dataclass(frozen=True)
class PretrainArguments(TrainArguments):
    """What a run that learns without labels is asked for.

    The defaults are those of masked autoencoders (arXiv 2111.06377, table 8) where they are not those of train.py.
    """

    hidden = (*USES_NO_LABELS, *TRAINS_ALL)

    teacher_name_or_path: str | None = argument(
        None, "distillation: model whose features are learned instead of masked pixels"
    )
    adam_beta2: float = argument(0.95, "second beta of AdamW", BELOW_ONE)
    crop_scale: float | None = argument(0.2, "minimum area fraction of a random resized crop", PART)

    mask_ratio: float = argument(0.75, "fraction of the patches to mask", BELOW_ONE, group="masked autoencoder")
    norm_pix_loss: bool = argument(True, "normalise the target pixels of each patch")
    decoder_hidden_size: int | None = argument(
        None, "decoder width; default: the checkpoint's, else half of the encoder's"
    )
    decoder_num_hidden_layers: int | None = argument(
        None, "decoder layers; default: the checkpoint's, else a third of the encoder's"
    )
    decoder_num_attention_heads: int | None = argument(
        None, "decoder attention heads; default: the checkpoint's, else one per 32 channels"
    )
    decoder_intermediate_size: int | None = argument(
        None, "decoder MLP width; default: the checkpoint's, else four times the decoder width"
    )
