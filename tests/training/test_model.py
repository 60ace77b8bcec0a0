"""Claims about the model of a run: its head, what is frozen, low-rank updates, and the images that fit into memory."""

import re
from types import SimpleNamespace

import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from image_data import picture
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hf_vit import HFViTForImageClassification
from hf_vit.data.image_spec import ImageSpec
from hf_vit.evaluation.classifiers import load_classifier
from hf_vit.evaluation.prediction import classification_head
from hf_vit.training.arguments import TrainArguments
from hf_vit.training.classification import Classification
from hf_vit.training.model import add_lora, build_model, find_batch_size, freeze, save_model
from hf_vit.training.run import Run
from hf_vit.training.setup import set_up_accelerator


# PEFT reads a name that transformers calls deprecated.
peft_warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


FORM = ImageSpec(16, 16, 3, 2, (0.5, 0.45, 0.4), (0.25, 0.2, 0.3))


def test_a_checkpoints_head_is_kept_only_for_the_same_labels_and_a_line_says_so(tmp_path, caplog):
    native = ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
            id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
        )
    )  # fmt: skip
    native.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    kept, processor = build_model(["cat", "dog"], str(tmp_path), None, None, {})
    torch.testing.assert_close(kept.classifier.weight, native.classifier.weight)
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    assert "is kept" in caplog.text
    for labels in (["dog", "cat"], ["cat", "dog", "eel"]):
        reset, _ = build_model(labels, str(tmp_path), None, None, {})
        assert not reset.classifier.weight.any()
        assert list(reset.config.id2label.values()) == labels
    assert caplog.text.count("is reset: ") == 1  # the loader tells the other


def test_a_model_from_scratch_has_the_datas_labels_and_a_fitting_processor():
    model, processor = build_model(
        ["a", "b", "c"], None, "tiny-patch16-224", 32, {"num_channels": 1, "hidden_size": 12, "num_hidden_layers": 1}
    )
    assert model.config.label2id == {"a": 0, "b": 1, "c": 2}
    assert dict(processor.size) == {"height": 32, "width": 32}
    assert len(processor.image_mean) == 1


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("flags", "still", "in_eval_mode"),
    [
        ((False, 0), "all", 0),
        ((False, 1), "layers.1|vit.layernorm|classifier", 1),
        ((False, 2), "vit.layernorm|classifier", 2),
        ((True, 0), "classifier", 2),
    ],
)
def test_what_is_frozen_has_no_gradient_and_drops_nothing(tiny_config, flags, still, in_eval_mode):
    model = HFViTForImageClassification(tiny_config(num_register_tokens=2, drop_path_rate=0.5))
    nn.init.normal_(model.classifier.weight)
    every = {name for name, _ in model.named_parameters()}
    modules = freeze(model, *flags)
    wanted = every if still == "all" else {name for name in every if re.search(still, name)}
    model.train()(torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == wanted
    for module in modules:
        module.eval()
    assert [not layer.training for layer in model.vit.layers] == [index < in_eval_mode for index in (0, 1)]
    assert not {id(p) for module in modules for p in module.parameters()} & {id(p) for p in trained(model).values()}


def test_more_frozen_layers_than_there_are_is_an_error(tiny_model):
    with pytest.raises(ValueError, match="--freeze_layers 3"):
        freeze(tiny_model(), backbone=False, layers=3)


@peft_warns
@pytest.mark.parametrize("fields", [{}, dict(gated_mlp=True)])
def test_low_rank_updates_of_every_dense_layer_and_the_head_are_trained(tiny_model, fields):
    model, pixels = tiny_model(pooling="map", **fields), torch.randn(2, 3, 16, 16)
    before = model(pixels).logits
    dense = [name for name, module in model.vit.layers.named_modules() if isinstance(module, nn.Linear)]
    lora = add_lora(model, 2).eval()
    assert {*trained(lora)} == {
        *(f"base_model.model.vit.layers.{name}.lora_{part}.default.weight" for name in dense for part in "AB"),
        *(f"base_model.model.classifier.modules_to_save.default.{kind}" for kind in ("weight", "bias")),
    }
    scales = {module.scaling["default"] for module in lora.modules() if hasattr(module, "lora_A")}
    assert scales == {16 / 2}  # alpha / rank
    torch.testing.assert_close(lora(pixels).logits, before)  # new ones change nothing yet


@pytest.fixture
def lora_run(tmp_path, tiny_model, tiny_fields, randomize):
    """lora_run(native) -> a LoRA run's model for three other labels and larger images than its base folder has."""

    def make(native):
        if native:
            folder = str(tmp_path)
            labels = dict(enumerate("xyzab"))
            fields = {**tiny_fields, "id2label": labels, "label2id": {name: index for index, name in labels.items()}}
            del fields["num_labels"]
            randomize(ViTForImageClassification(ViTConfig(**fields))).save_pretrained(folder)
            ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        else:
            folder = str(tmp_path / "base")
            tiny_model(num_labels=5, id2label=dict(enumerate("xyzab"))).save_pretrained(folder)
            ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        model, _ = build_model(["a", "b", "c"], folder, None, 24, {})
        lora = add_lora(model, 2)
        with torch.no_grad():
            for parameter in lora.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3)
        return lora.eval()

    return make


@peft_warns
@pytest.mark.parametrize("lora_save", ["merged", "adapter"])
@pytest.mark.parametrize("native", [False, True], ids=["ours", "native"])
def test_a_saved_lora_run_loads_with_its_logits_labels_and_size(lora_run, tmp_path, native, lora_save):
    lora, pixels = lora_run(native), torch.randn(2, 3, 24, 24)
    wanted = lora(pixels).logits
    save_model(lora, tmp_path / "model", lora_save)
    assert (tmp_path / "model" / "model.safetensors").exists() == (lora_save == "merged")
    assert (tmp_path / "model" / "adapter_config.json").exists() == (lora_save == "adapter")
    loaded = load_classifier(str(tmp_path / "model"))
    torch.testing.assert_close(loaded(pixels).logits, wanted, rtol=1e-4, atol=1e-4)
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert loaded.config.image_size == 24
    torch.testing.assert_close(lora(pixels).logits, wanted)  # the run goes on


@peft_warns
@pytest.mark.parametrize("lora", [False, True])
def test_only_a_new_head_is_fitted_on_whole_images_and_nothing_else_is(tmp_path, tiny_model, lora, capsys):
    rows = {"image": [picture(number, (40, 24)) for number in range(12)], "label": [0, 1, 2] * 4}
    features = Features(image=ImageFeature(), label=ClassLabel(names=list("abc")))
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "train.parquet")
    checkpoint = tiny_model()
    for labels in (("x", "y", "z"), ("a", "b", "c")):
        checkpoint.config.id2label = dict(enumerate(labels))
        checkpoint.save_pretrained(tmp_path / "checkpoint")
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "checkpoint")
        args = TrainArguments(
            str(tmp_path / "train.parquet"), model_name_or_path=str(tmp_path / "checkpoint"), num_workers=0,
            output_dir=str(tmp_path / "out"), auto_find_batch_size=False, lora_rank=8 * lora,
        )  # fmt: skip
        accelerator, signals = set_up_accelerator(args), SimpleNamespace(received=None)
        run = Run(args, Classification(args), accelerator, signals, 0.0)
        head, is_new = classification_head(run.state.network), labels == ("x", "y", "z")
        assert ("fitting the head" in capsys.readouterr().out) == is_new
        assert head.weight.any()
        assert torch.equal(head.weight, checkpoint.classifier.weight) != is_new
        resumed = Run(args, Classification(args), accelerator, signals, 0.0, run.plan.identity())
        assert classification_head(resumed.state.network).weight.any() != is_new
        assert run.data.train_images.spec.crop_scale == 0.64
        weights = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
            for name, weight in run.state.network.state_dict().items()
        }
        for name, weight in checkpoint.vit.state_dict().items():
            assert torch.equal(weights[f"vit.{name}"], weight)


OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
]


def short_of_memory(model, most, message=OUT_OF_MEMORY[0], kind=RuntimeError):
    """A loss that more than `most` images at once are too many for, and the numbers that it was asked about."""
    asked = []

    def loss(pixel_values):
        asked.append(len(pixel_values))
        if len(pixel_values) > most:
            raise kind(message)
        return model(pixel_values).logits.square().sum()

    return loss, asked


@pytest.mark.parametrize("message", OUT_OF_MEMORY)
@pytest.mark.parametrize(
    ("batch", "most", "tried"),
    [(8, 8, [8]), (8, 5, [8, 4]), (8, 1, [8, 4, 2, 1]), (12, 5, [12, 6, 4]), (15, 14, [15, 5]), (7, 6, [7, 1])],
)
def test_the_batch_size_found_is_the_first_divisor_that_fits(tiny_model, batch, most, tried, message):
    model = tiny_model()
    loss, asked = short_of_memory(model, most, message)
    assert find_batch_size(model, loss, FORM, batch, torch.device("cpu")) == tried[-1]
    assert asked == tried
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_that_ends_in_the_backward_pass_counts_too(tiny_model):
    class Short(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            if len(gradient) > 2:
                raise RuntimeError(OUT_OF_MEMORY[0])
            return gradient

    model = tiny_model()
    loss = lambda pixel_values: Short.apply(model(pixel_values).logits).sum()
    assert find_batch_size(model, loss, FORM, 8, torch.device("cpu")) == 2
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "message"), [(RuntimeError, "shapes do not fit"), (ValueError, OUT_OF_MEMORY[0])])
def test_an_error_that_is_not_about_memory_is_raised_at_once(tiny_model, kind, message):
    loss, asked = short_of_memory(tiny_model(), 1, message, kind)
    with pytest.raises(kind, match=message.partition(".")[0]):
        find_batch_size(tiny_model(), loss, FORM, 4, torch.device("cpu"))
    assert asked == [4]
