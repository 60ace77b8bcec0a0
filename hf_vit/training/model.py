"""The model to train: from a checkpoint or from scratch, whole, frozen in part, or with low-rank updates."""

import copy
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache, find_executable_batch_size
from torch import nn
from transformers import ViTImageProcessorPil

from hf_vit.data.image_spec import ImageSpec, eval_resize, read_settings
from hf_vit.evaluation.classifiers import load_processor
from hf_vit.model.configuration_hf_vit import HFViTConfig, as_pair
from hf_vit.model.modeling_hf_vit import HFViTForImageClassification, HFViTLayer
from hf_vit.system.errors import UserError, as_user_errors
from hf_vit.system.progress import warn
from hf_vit.training.optimizers import layer_id


SINGLE_LABEL = "single_label_classification"  # the `problem_type` that None means here
LORA_ALPHA = 16  # low-rank updates are scaled by it, divided by their rank


@as_user_errors()
def build_model(
    labels: list[str], checkpoint: str | None, preset: str | None, fields: dict, eval_crop: float | None = None
):
    """A model with a head for `labels`, and its image processor: see `load_model`.

    The head of a checkpoint is kept only if it was trained for these labels in this order, and for the same `problem_type`; one of
    numbers is not, because these are learned in another unit.

    Raises:
        ValueError: if a weight is not finite.
    """
    fields = {"problem_type": None, **fields, "id2label": dict(enumerate(labels))}
    model, processor = load_model(HFViTForImageClassification, checkpoint, preset, fields, eval_crop)
    if checkpoint is None:
        return model, processor
    vars(model.config).pop("thresholds", None)  # of the labels that it had
    before, kind = HFViTConfig.from_pretrained(checkpoint), model.config.problem_type or SINGLE_LABEL
    is_kept = (
        list(before.id2label.values()) == labels and kind == (before.problem_type or SINGLE_LABEL) != "regression"
    )
    if model.classifier.weight.any():  # a head of another size was reset with a line
        why = "its classes are" if is_kept else "its classes, or their order or number an image, are not"
        warn(f"the head of {checkpoint} is {'kept' if is_kept else 'reset'}: {why} those of the data")
    if not is_kept:
        nn.init.zeros_(model.classifier.weight)
        nn.init.zeros_(model.classifier.bias)
    return model, processor


@as_user_errors()
def build_encoder(model_class, checkpoint: str | None, preset: str | None, fields: dict, eval_crop=None):
    """An `HFViTForPreTraining` or `HFViTModel`, and its image processor: see `load_model`.

    A decoder that the checkpoint does not have is a light one, unless `fields` say how large it is.
    """
    before = load_config(checkpoint, preset, fields)
    if not any("ForPreTraining" in name for name in before.architectures or ()):
        fields = {**light_decoder(before), **fields}
    return load_model(model_class, checkpoint, preset, fields, eval_crop)


@as_user_errors()
def load_config(checkpoint: str | None, preset: str | None, fields: dict) -> HFViTConfig:
    if checkpoint is None:
        return HFViTConfig.from_preset(preset, **fields)
    return HFViTConfig.from_pretrained(checkpoint, **fields)


def load_model(model_class, checkpoint: str | None, preset: str | None, fields: dict, eval_crop: float | None):
    """(model, image processor): of a checkpoint, or from scratch by a preset; `fields` are those of the config that differ.

    Weights are float32, whatever the checkpoint holds: most steps are too small to change a bfloat16 or float16 number
    ("Mixed Precision Training", arXiv 1710.03740, section 3.1). Its image processor says how images are resized and cropped, unless
    `eval_crop` does (`eval_resize`).
    """
    if checkpoint is None:
        model, source = model_class(load_config(None, preset, fields)), ViTImageProcessorPil()
    else:
        model = model_class.from_pretrained(checkpoint, dtype=torch.float32, **fields)
        if getattr(model, "_hf_peft_config_loaded", False):
            raise UserError(
                f"{checkpoint} is a LoRA adapter: fine-tune its base, or a run that was saved with --lora_save merged"
            )
        source = load_processor(checkpoint)
    return model, build_processor(source, model.config, eval_crop)


def light_decoder(config: HFViTConfig) -> dict[str, int]:
    """A decoder in proportion to the encoder as in MAE's ViT-L (arXiv 2111.06377, section 4.1): half its width, a third of its
    layers, heads of 32 channels."""
    heads = max(1, round(config.hidden_size / 64))
    return {
        "decoder_hidden_size": 32 * heads,
        "decoder_num_hidden_layers": max(1, round(config.num_hidden_layers / 3)),
        "decoder_num_attention_heads": heads,
        "decoder_intermediate_size": 128 * heads,
    }


def build_processor(source, config: HFViTConfig, eval_crop: float | None) -> ViTImageProcessorPil:
    """The image processor of a model: that of its checkpoint, `source`, in the model's size and channels."""
    height, width = as_pair(config.image_size)
    channels = config.num_channels
    per_channel = lambda values: list(values) if len(values) == channels else [sum(values) / len(values)] * channels
    size, center = {"height": height, "width": width}, {}
    resize = eval_resize(read_settings(source, channels), height, width, eval_crop)
    if resize is not None:
        center = {"do_center_crop": True, "crop_size": size}
        size = {"shortest_edge": resize} if isinstance(resize, int) else dict(zip(size, resize, strict=True))
    return ViTImageProcessorPil(
        size=size,
        **center,
        resample=source.resample,
        image_mean=per_channel(source.image_mean),
        image_std=per_channel(source.image_std),
        do_convert_rgb=channels == 3,
    )


def freeze(model: nn.Module, backbone: bool, layers: int) -> list[nn.Module]:
    """Freeze all but the head (`backbone`), or the embeddings and the first `layers` layers; the modules that are frozen.

    Raises:
        ValueError: if the model has fewer layers.
    """
    num_layers = model.config.num_hidden_layers
    if layers > num_layers:
        raise UserError(
            f"--freeze_layers {layers}: the model has {num_layers} layers; to train the head alone pass --freeze_backbone true"
        )
    last = num_layers + 1 if backbone else layers or -1
    for name, parameter in model.named_parameters():
        if not name.startswith("classifier.") and layer_id(name, num_layers) <= last:
            parameter.requires_grad_(False)
    if backbone:
        return [model.vit]
    return [model.vit.embeddings, *model.vit.layers[:layers]] if layers > 0 else []


def add_lora(model, rank: int):
    """The model with low-rank updates of all dense layers of its transformer layers (arXiv 2106.09685, section 4.1), by PEFT.

    The updates and the head are trainable.
    """
    from peft import LoraConfig, get_peft_model  # which need not be installed

    modules = model.vit.layers.named_modules()
    dense = {name.rpartition(".")[2] for name, module in modules if isinstance(module, nn.Linear)}
    targets = rf".*\.layers\..*\.({'|'.join(sorted(dense))})"
    lora = LoraConfig(r=rank, lora_alpha=LORA_ALPHA, target_modules=targets, modules_to_save=["classifier"])
    return get_peft_model(model, lora)


def save_model(model, folder: Path, lora_save: str):
    """Save the model with its low-rank updates merged ("merged"), or only these, with the config of the whole ("adapter")."""
    if not hasattr(model, "merge_and_unload"):
        model.save_pretrained(folder)
    elif lora_save == "merged":
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    else:
        model.save_pretrained(folder)
        model.config.save_pretrained(folder)


def find_batch_size(model, compute_loss, spec: ImageSpec, batch_size: int, device, copies: int = 2) -> int:
    """The largest divisor of `batch_size` whose forward and backward pass fits in memory.

    It must fit beside what else a step holds: the next batch, three times while it is augmented, and `copies` of the
    trainable weights.

    Args:
        compute_loss: pixel_values (B, C, H, W) -> a loss.
        copies: of the trainable weights: AdamW's two moments, an average, the buckets of DDP.

    Raises:
        ValueError: if one image is too many.
    """
    divisors = [size for size in range(batch_size - 1, 0, -1) if batch_size % size == 0]
    # Only even ones of an even number: pairs are mixed.
    smaller = iter([size for size in divisors if size % 2 == batch_size % 2 or size == 1])
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def reduce() -> int:
        if (size := next(smaller, None)) is None:
            raise UserError(
                "not even one image fits in memory: pass --gradient_checkpointing true, or a smaller --image_size or model"
            )
        return size

    @find_executable_batch_size(starting_batch_size=batch_size, reduce_batch_size_fn=reduce)
    def try_step(size: int) -> int:
        try:
            pixel_values = torch.zeros(size, spec.channels, spec.height, spec.width, device=device)
            _beside = torch.empty(copies * trainable + 3 * pixel_values.numel(), device=device)
            compute_loss(pixel_values).backward()
        finally:
            model.zero_grad(set_to_none=True)
        return size

    fitting = try_step()
    clear_device_cache(garbage_collection=True)
    return fitting


def compile_model(model: nn.Module, sharded: bool):
    """Compile in place: the whole model as one graph, or under FSDP, whose hooks break it, each layer.

    Each input size is a graph of its own, because dynamic shapes are slower.
    """
    layers = [module for module in model.modules() if isinstance(module, HFViTLayer)]
    if sharded:
        # Each layer has its own drop path rate, and so its own graphs, in training and evaluation.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
        for layer in layers:
            layer.compile(dynamic=False)
    else:
        model.compile(dynamic=False)


def shard_by_layer(accelerator, model: nn.Module):
    """Tell FSDP the classes of the model's layers, of which each is a part: a launch file names those of one kind of model."""
    layers = {type(module).__name__ for module in model.modules() if isinstance(module, HFViTLayer)}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(layers)
