"""What does not fit is one error with every name; what is not whole, or holds code, is refused."""

import json
import os
import pickle
import re

import numpy as np
import parity
import pytest
import torch
import transformers
from checkpoint_writers import jax_file, save, to_timm
from safetensors.torch import load_file

from hf_vit import HFViTConfig, HFViTForImageClassification, HFViTModel


LOAD, READ = HFViTForImageClassification.from_pretrained, HFViTForImageClassification.from_checkpoint
D, NAN, INF = 32, float("nan"), float("inf")


@pytest.fixture
def folder(tiny_fields, randomize, tmp_path):
    """folder(native class) -> where a tiny one with random weights is saved."""

    def make(native_class=transformers.Dinov2ForImageClassification, **arguments):
        fields = {name: value for name, value in tiny_fields.items() if name != "intermediate_size"}
        native = randomize(native_class(native_class.config_class(**fields), **arguments))
        native.save_pretrained(tmp_path / "native")
        return tmp_path / "native"

    return make


def raw_file(folder, name="vit.pth", change=lambda w: None):
    native = transformers.ViTForImageClassification(transformers.ViTConfig(**parity.SIZE | dict(num_hidden_layers=2)))
    tensors = to_timm(parity.randomize(native))
    if name.endswith("npz"):
        tensors = dict(np.load(jax_file()(native, folder)))
    change(tensors)
    return save(tensors, folder / name)


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save(tensors, folder / "model.safetensors")


LAYER, BLOCK = "dinov2.encoder.layer.1.", "blocks.1.attn."
IN_A_FOLDER = [
    (lambda w: (w.pop(f"{LAYER}mlp.fc1.bias"), w.update({f"{LAYER}norm2.weight": torch.ones(8)})),
     ["layers.1.mlp.fc1.bias is missing", "layernorm_after.weight has shape (8,), the model (32,)"]),
    (lambda w: w.update({"dinov2.layers.1.layernorm_before.bias": torch.ones(D)}), ["layers.1.layernorm_before.bias", f"{LAYER}norm1.bias"]),
    (lambda w: w[f"{LAYER}mlp.fc1.weight"][D // 2, D // 2].fill_(NAN), ["layers.1.mlp.fc1.weight holds NaN"]),
    (lambda w: w["dinov2.embeddings.patch_embeddings.projection.weight"][9, 0, 0].fill_(-INF), ["projection.weight holds NaN or infinity"]),
    (lambda w: w.update({f"{LAYER}attention.rel_pos": torch.ones(3), "x": torch.ones(3)}), ["layers.1.attention.rel_pos", "x is not known"]),
    (lambda w: w.update({"classifier.weight": torch.ones(3, D)}), ["classifier.weight has shape (3, 32), the model (3, 64)"]),
]  # fmt: skip
IN_A_FILE = [
    (lambda w: w.pop(f"{BLOCK}qkv.weight"), [f"layers.1.attention.{part}_proj.weight is missing" for part in "kqv"]),
    (lambda w: w.update({"layers.1.attention.q_proj.weight": torch.ones(1)}), ["layers.1.attention.q_proj.weight is there 2 times"]),
    (lambda w: w.update({"fc_norm.weight": torch.ones(192)}), ["norm.weight", "fc_norm.weight"]),
    (lambda w: w[f"{BLOCK}qkv.weight"][193].fill_(NAN), ["attention.k_proj.weight holds NaN"]),
]  # fmt: skip


FAULTS = [(True, *fault) for fault in IN_A_FOLDER] + [(False, *fault) for fault in IN_A_FILE]


@pytest.mark.parametrize(("native", "change", "named"), FAULTS)
def test_every_difference_is_named_in_one_error(folder, tmp_path, native, change, named):
    path = folder() if native else raw_file(tmp_path, change=change)
    if native:
        edit(path, change)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, named))):
        (LOAD if native else READ)(path)


def test_no_tensor_can_be_missing_but_the_mask_and_the_bias_of_patches_that_clip_lacks(folder, tmp_path):
    path, loaded = folder(), []
    tensors = load_file(path / "model.safetensors")
    raw = torch.load(raw_file(tmp_path))
    for found, file, load in ((tensors, path / "model.safetensors", LOAD), (raw, tmp_path / "raw.pth", READ)):
        for name in found.keys() - {"head.weight"}:
            save({other: tensor for other, tensor in found.items() if other != name}, file)
            try:
                load(path if load is LOAD else file)
                loaded.append(name)
            except ValueError:
                pass
    assert sorted(loaded) == ["dinov2.embeddings.mask_token", "patch_embed.proj.bias"]


def test_a_deit_with_one_of_its_two_heads_is_an_error(folder):
    path = folder(transformers.DeiTForImageClassificationWithTeacher)
    edit(path, lambda weights: weights.pop("distillation_classifier.bias"))
    with pytest.raises(ValueError, match="wants two heads"):
        LOAD(path)


def test_half_a_pooler_is_an_error_and_a_native_base_model_without_one_gives_the_class_token(folder, caplog):
    model = HFViTModel.from_pretrained(folder(transformers.ViTModel, add_pooling_layer=False))
    assert model.pooler is None
    assert "no pooler in the checkpoint" in caplog.text
    path = folder(transformers.ViTModel)
    edit(path, lambda weights: weights.pop("pooler.dense.bias"))
    with pytest.raises(ValueError, match=r"pooler\.dense\.bias is missing"):
        HFViTModel.from_pretrained(path)


@pytest.mark.parametrize("part", ["pooler", "attention_pooling"])
def test_a_part_of_our_encoder_that_lacks_all_its_tensors_is_an_error(tmp_path, tiny_fields, part):
    fields = dict(pooler_act="tanh") if part == "pooler" else dict(pooling="map")
    HFViTModel(HFViTConfig(**tiny_fields, **fields)).save_pretrained(tmp_path)
    edit(tmp_path, lambda weights: [weights.pop(name) for name in list(weights) if name.startswith(f"{part}.")])
    with pytest.raises(ValueError, match=rf"{part}\.\S+ is missing"):
        HFViTModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("reset", [False, True])
def test_another_number_of_labels_resets_only_the_head_and_says_so(folder, caplog, reset):
    path = folder()
    kept = LOAD(path, num_labels=3).state_dict()
    assert "reset" not in caplog.text
    model = LOAD(path, num_labels=10, ignore_mismatched_sizes=reset)
    assert "classifier reset" in caplog.text
    assert model.classifier.weight.eq(0).all()
    other = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, kept[name])]
    assert other == ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize("override", [dict(num_hidden_layers=3), dict(qkv_bias=False), dict(num_register_tokens=2)])
def test_an_override_that_the_weights_do_not_fit_is_an_error(folder, override):
    with pytest.raises(ValueError, match="do not fit HFViTForImageClassification"):
        LOAD(folder(), **override, ignore_mismatched_sizes=True)


def test_old_names_under_our_config_are_an_error_and_never_a_random_encoder(folder):
    path = folder(transformers.ViTForImageClassification)
    config = HFViTConfig.from_pretrained(path)
    config.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for load in (lambda: LOAD(path), lambda: LOAD(None, state_dict=tensors, config=config)):
        with pytest.raises(ValueError, match=r"layers\.0\.attention\.k_proj\.bias is missing"):
            load()


def test_a_native_config_object_is_refused_and_ours_reads_a_native_folder(folder):
    path = folder()
    with pytest.raises(ValueError, match="Dinov2Config"):
        LOAD(path, config=transformers.AutoConfig.from_pretrained(path))
    model = LOAD(path, config=HFViTConfig.from_pretrained(path, id2label=dict(enumerate("abc"))))
    assert model.config.id2label[2] == "c"


def test_an_adapter_loads_on_a_base_of_any_family_and_refuses_one_that_it_does_not_fit(folder, tmp_path, pixels):
    from peft import LoraConfig, get_peft_model

    path, images = folder(), pixels()
    model = get_peft_model(LOAD(path), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    wanted = model(images).logits
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(LOAD(tmp_path / "adapter").eval()(images).logits, wanted)
    edit(path, lambda weights: weights.pop(f"{LAYER}norm1.bias"))
    with pytest.raises(ValueError, match=r"layernorm_before\.bias is missing"):
        LOAD(tmp_path / "adapter")
    LOAD(folder(transformers.ViTForImageClassification), hidden_size=32).save_pretrained(path)
    wider = HFViTConfig(**json.loads((path / "config.json").read_text()) | dict(hidden_size=64))
    HFViTForImageClassification(wider).save_pretrained(path)
    with pytest.raises(ValueError, match=r"adapter.*q_proj\.lora_A"):
        LOAD(tmp_path / "adapter")


# ----------------------------------------------------------------------------------------------------------------------
# Broken and hostile files


@pytest.mark.parametrize("name", ["vit.safetensors", "vit.pth", "vit.npz", "model.safetensors", "pytorch_model.bin"])
def test_a_file_that_is_not_whole_is_an_error_that_names_it(folder, tmp_path, name):
    if name.startswith("vit"):
        path, load = raw_file(tmp_path, name), READ
        file = path
    else:
        path, load = folder(), LOAD
        tensors = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        file = save(tensors, path / name)
    load(path)
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1], b"<!DOCTYPE html><p>404: Not Found</p>"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            load(path)


class Evil:
    """Its pickle makes a file when it is opened."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def evil(tmp_path):
    """An object whose pickle runs code; fails if it was run."""
    yield Evil(tmp_path / "marker")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["new.pth", "old.pth", "bare.pth", "pytorch_model.bin"])
def test_code_in_a_pickle_is_never_run(folder, tmp_path, evil, name):
    path = folder()
    if name == "pytorch_model.bin":
        (path / "model.safetensors").unlink()
    file = (path if name == "pytorch_model.bin" else tmp_path) / name
    if name == "bare.pth":
        file.write_bytes(pickle.dumps(evil, protocol=2))
    else:
        save({"model": {"x": torch.ones(3)}, "args": evil}, file)
    with pytest.raises(ValueError, match=r"\((posix|nt)\.system\)"):
        LOAD(path) if name == "pytorch_model.bin" else READ(file)


@pytest.mark.parametrize("kind", ["text", "object"])
def test_text_and_objects_in_an_npz_are_refused(tmp_path, evil, kind):
    note = np.array("hello") if kind == "text" else np.array(evil, dtype=object)
    with pytest.raises(ValueError, match="note holds"):
        READ(raw_file(tmp_path, "vit.npz", lambda arrays: arrays.update(note=note)))


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), {"epoch": 3}, {"weight": torch.ones(3)}, {}], ids=repr)
def test_a_pickle_without_a_vit_is_refused_by_name(tmp_path, content):
    with pytest.raises(ValueError, match=r"vit\.pth"):
        READ(save(content, tmp_path / "vit.pth"))


def test_a_config_of_another_family_lists_the_known_ones_and_files_are_told_where_they_belong(folder, tmp_path):
    path = folder()
    with pytest.raises(ValueError, match="give the folder to from_pretrained"):
        READ(path / "model.safetensors")
    for load, wrong in ((LOAD, path / "model.safetensors"), (READ, path), (READ, path / "no.pth")):
        with pytest.raises(ValueError, match=re.escape(str(wrong))):
            load(wrong)
    (path / "config.json").write_text(json.dumps({"model_type": "swin"}))
    with pytest.raises(ValueError, match=r"swin.* vit, .*timm"):
        LOAD(path)


def test_a_tensor_in_two_shards_is_an_error(folder):
    path = folder(transformers.SiglipVisionModel)
    tensors, index = load_file(path / "model.safetensors"), {}
    (path / "model.safetensors").unlink()
    for number, part in enumerate((tensors, dict(list(tensors.items())[:1]))):
        save(part, path / f"{number}.bin")
        index |= {f"{name}{number}": f"{number}.bin" for name in part}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(dict(metadata={}, weight_map=index)))
    with pytest.raises(ValueError, match=f"{re.escape(min(part))} 2 times"):
        HFViTModel.from_pretrained(path)
