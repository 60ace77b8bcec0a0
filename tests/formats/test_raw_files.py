"""Raw files and repositories of timm, Google, torchvision, OpenCLIP and Meta: what their tensors tell, and what is assumed."""

import re

import numpy as np
import parity
import pytest
import torch
import transformers
from checkpoint_writers import dinov3_file, jax_file, save, timm_repo, to_eva, to_timm, torchvision_file

from hf_vit import HFViTForImageClassification, HFViTModel
from hf_vit.formats.timm_processor import timm_processor


ROUNDING = 1e-5  # of the largest output
BASE, CLASSIFIER = HFViTModel, HFViTForImageClassification
D = 192  # the narrowest of the published ViTs
SIZE = dict(
    image_size=32, patch_size=8, hidden_size=D, num_attention_heads=3, num_hidden_layers=2, intermediate_size=256
)
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reference(randomize):
    """reference(class, **fields) -> a native model with random weights, two layers deep and with 64 channels a head."""

    def make(model_class=transformers.ViTForImageClassification, **fields):
        fields = {**SIZE, "layer_norm_eps": 1e-6, "num_labels": 5, **fields}
        return randomize(model_class(model_class.config_class(**fields)))

    return make


@pytest.fixture
def difference(tmp_path):
    """difference(content, wanted, model_class, **given): between the outputs of what is loaded from tensors, a file or a folder and
    those of a reference, or `wanted` themselves."""

    @torch.no_grad()
    def measure(content, wanted, model_class=CLASSIFIER, images=IMAGES, **given):
        if isinstance(content, dict):
            is_jax = isinstance(next(iter(content.values())), np.ndarray)
            content = save(content, tmp_path / ("vit.npz" if is_jax else "vit.pth"))
        load = model_class.from_pretrained if content.is_dir() else model_class.from_checkpoint
        wanted = wanted if isinstance(wanted, dict) else parity.outputs(wanted, images)
        return parity.difference(parity.outputs(load(str(content), **given), images), wanted)

    return measure


def jax_arrays(native, folder, **how):
    return dict(np.load(jax_file(**how)(native, folder)))


@pytest.mark.parametrize(
    ("written", "called"), [("vit.safetensors", "vit.pth"), ("vit.npz", "vit.bin"), ("vit.pth", "vit")]
)
def test_the_family_is_found_whatever_the_file_is_called(reference, difference, tmp_path, written, called):
    native = reference()
    tensors = jax_arrays(native, tmp_path) if written.endswith("npz") else to_timm(native)
    assert difference(save(tensors, tmp_path / written).rename(tmp_path / called), native) <= ROUNDING


@pytest.mark.parametrize(
    ("prefix", "beside"),
    [("module.backbone.", "module.head.weight"), ("_orig_mod.", "queue"), ("teacher.", "semantic.patch_embed.proj.weight"),
     ("params/img/", "params/txt/head/kernel")],
)  # fmt: skip
def test_what_stands_outside_the_prefix_is_left_out_and_said(reference, difference, tmp_path, caplog, prefix, beside):
    native = reference()
    if "/" in prefix:
        tensors = jax_arrays(native, tmp_path, prefix=prefix) | {beside: np.ones(3)}
    else:
        tensors = {beside: torch.ones(3)} | {prefix + name: t for name, t in to_timm(native).items()}
    assert difference(tensors, native) <= ROUNDING
    assert f"left out what is not in {prefix.replace('/', '.')}" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("others", "average"),
    [("model/", "model_ema/"), ("state_dict/", "state_dict_ema/"), ("student/", "teacher/"), ("epoch/", "state_dict/model/"),
     ("opt.0.", "params."), ("student.", "teacher.")],
)  # fmt: skip
def test_of_what_a_training_script_saves_the_averaged_weights_are_read(reference, tmp_path, others, average):
    """In dicts of dicts (/), or by the prefixes of names; no moment of an optimizer is taken for a network."""
    content, tensors = {}, to_timm(reference())
    for path, saved in ((others, to_timm(reference())), (average, tensors)):
        inner, (*keys, prefix) = content, path.split("/")
        for key in keys:
            inner = inner.setdefault(key, {})
        inner.update({prefix + name: tensor for name, tensor in saved.items()})
    loaded = CLASSIFIER.from_checkpoint(save(content, tmp_path / "vit.pth"))
    assert torch.equal(loaded.classifier.weight, tensors["head.weight"])


def test_a_timm_repo_may_hold_a_pickle_or_be_a_wrapper_of_transformers(reference, difference, tmp_path):
    native = reference()
    wrapped = lambda native: {f"timm_model.{name}": tensor for name, tensor in to_timm(native).items()}
    for number, how in enumerate((dict(file="pytorch_model.bin"), dict(names=wrapped, model_type="timm_wrapper"))):
        assert difference(timm_repo(**how)(native, tmp_path / str(number)), native) <= ROUNDING


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (dict(model_args=dict(act_layer="relu", depth=2, drop_rate=0.1)), dict(hidden_act="relu")),
        (dict(architecture="vit_base_patch16_clip_quickgelu_224"), dict(hidden_act="quick_gelu")),
        (dict(architecture="vit_so400m_patch16_siglip_gap_512"), dict(hidden_act="gelu_pytorch_tanh")),
        (dict(architecture="vit_large_patch16_siglip_512"), dict(hidden_act="gelu_pytorch_tanh")),
        (dict(global_pool="avg"), dict(pooling="mean", final_norm="tokens")),
        (dict(label_names=list("abcde")), dict(id2label=dict(enumerate("abcde")))),
    ],
)
def test_what_a_timm_repo_says_is_read(reference, tmp_path, said, read):
    config = CLASSIFIER.from_pretrained(timm_repo(**said)(reference(), tmp_path)).config
    assert {name: getattr(config, name) for name in read} == read


def test_the_image_processor_of_a_timm_repo_has_its_mean_and_its_deviation():
    processor = timm_processor({"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}, "repo")
    assert (list(processor.image_mean), list(processor.image_std)) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (dict(model_args={"norm_layer": "rmsnorm"}), "norm_layer='rmsnorm'"),
        (dict(model_args={"act_layer": "hard_mish"}), "hard_mish"),
        (dict(global_pool="rot_attn"), "rot_attn"),
        *((dict(architecture=name), name) for name in ("vit_base_patch16_rpn_224", "eva02_tiny_patch14_224", "test_vit",
          "vit_base_patch16_rope_ape_224", "vit_pe_core_base_patch16_224")),
    ],
)  # fmt: skip
def test_what_a_timm_repo_says_and_no_field_expresses_is_refused_by_name(reference, tmp_path, said, named):
    folder = timm_repo(**said)(reference(), tmp_path)
    with pytest.raises(ValueError, match=named):
        CLASSIFIER.from_pretrained(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.update({"rope.freqs": torch.ones(2, 2, 96)}),
        lambda w: w.update({"blocks.0.attn.q_bias": w.pop("blocks.0.attn.qkv.bias")[:D]}),
        lambda w: w.update({"norm_pre.weight": w.pop("norm.weight")}),
        lambda w: w.pop("pos_embed"),
    ],
)
def test_a_raw_file_of_another_network_with_timms_names_is_refused(reference, tmp_path, change):
    tensors = to_timm(reference())
    change(tensors)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "vit.pth"))):
        CLASSIFIER.from_checkpoint(save(tensors, tmp_path / "vit.pth"))


@torch.no_grad()
def test_fc_norm_of_timm_norms_the_mean_of_the_patches(reference, difference, tmp_path):
    native, kept = reference(), []
    native.vit.layernorm.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    native(IMAGES)
    tensors = {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in to_timm(native).items()}
    wanted = {"logits": native.classifier(native.vit.layernorm(kept[0][:, 1:].mean(dim=1)))}
    assert difference(tensors, wanted) <= ROUNDING


def test_a_timm_register_takes_its_row_of_the_positions_in(reference, difference, tmp_path):
    native = reference(transformers.Dinov2WithRegistersModel, mlp_ratio=4, num_register_tokens=3)
    tensors, of_registers = to_timm(native), torch.randn(1, 3, D)
    cls, patches = tensors["pos_embed"].split([1, 16], dim=1)
    tensors["pos_embed"] = torch.cat([cls, of_registers, patches], dim=1)
    tensors["reg_token"] = tensors["reg_token"] - of_registers
    assert difference(tensors, native, BASE) <= ROUNDING


def test_what_a_raw_dinov3_cannot_tell_is_assumed_and_said_unless_it_is_given(reference, difference, tmp_path, caplog):
    native = reference(transformers.DINOv3ViTModel, num_register_tokens=3, rope_theta=7.0, layer_norm_eps=0.1)
    assert difference(to_eva(native), native, BASE, pooling="cls") > 1e-2
    assert "rope_theta 100.0, layer_norm_eps 1e-05" in caplog.messages[-1]
    given = dict(rope_theta=7.0, layer_norm_eps=0.1, position_embedding="rotary", pooling="cls")
    assert difference(to_eva(native), native, BASE, **given) <= ROUNDING
    assert "rope_theta" not in caplog.messages[-1]


def test_a_repo_of_timms_dinov3_says_its_size_pooling_and_rotary_base(reference, tmp_path):
    said = dict(architecture="vit_small_patch16_dinov3", global_pool="token", model_args=dict(rope_temperature=7.0))
    repo = timm_repo(to_eva, **said, pretrained_cfg={"input_size": [3, 32, 48]})
    config = BASE.from_pretrained(repo(reference(transformers.DINOv3ViTModel, num_register_tokens=3), tmp_path)).config
    assert (config.image_size, config.pooling, config.rope_theta) == ([32, 48], "cls", 7.0)


def test_metas_dinov3_is_refused_unless_its_periods_are_those_of_the_rotary_base(reference, difference, tmp_path):
    native = reference(transformers.DINOv3ViTModel, rope_theta=7.0, key_bias=False, layer_norm_eps=1e-5)
    file = dinov3_file(native, tmp_path)
    with pytest.raises(ValueError, match="pass rope_theta="):
        BASE.from_checkpoint(file)
    assert difference(file, native, BASE, rope_theta=7.0) <= ROUNDING


@pytest.mark.parametrize(
    ("content", "antialias"),
    [
        (lambda w: {"model": w}, False),
        (lambda w: {"target_encoder": w}, False),
        (lambda w: {"state_dict": w}, True),
        (lambda w: w, True),
    ],
    ids=["DeiT, MAE", "I-JEPA", "timm, training", "timm, with a head"],
)
def test_a_pickle_resamples_positions_as_the_code_that_wrote_it(reference, tmp_path, content, antialias):
    """DINO, DINOv2, torchvision, JAX and OpenCLIP are rows of the table of formats."""
    tensors = to_timm(reference())
    file = save(content(tensors), tmp_path / "vit.pth")
    found = CLASSIFIER.from_checkpoint(file, image_size=48).vit.embeddings.position_embeddings[:, 1:]
    grid = tensors["pos_embed"][:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    wanted = torch.nn.functional.interpolate(grid, size=6, mode="bicubic", antialias=antialias).flatten(2).mT
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_old_torchvision_names_load_too(reference, difference, tmp_path):
    native = reference()
    tensors, names = torch.load(torchvision_file(native, tmp_path)), {".mlp.0.": "1.", ".mlp.3.": "2."}
    for old, number in names.items():
        tensors = {name.replace(old, f".mlp.linear_{number}"): tensor for name, tensor in tensors.items()}
    assert difference(tensors, native) <= ROUNDING


def test_bfloat16_arrays_of_an_npz_are_read_although_numpy_has_no_such_type(reference, difference, tmp_path):
    native = reference().bfloat16()
    halves = {name: torch.from_numpy(a).bfloat16() for name, a in jax_arrays(native.float(), tmp_path).items()}
    arrays = {name: half.view(torch.int16).numpy().view("V2") for name, half in halves.items()}
    assert difference(arrays, native, dtype=torch.float32) <= ROUNDING


@torch.no_grad()
def test_pre_logits_of_jax_are_the_tanh_layer_of_a_classifier(reference, difference, tmp_path):
    native, kernel, bias, head = reference(), torch.randn(D, 24) / 14, torch.randn(24), torch.randn(24, 5)
    more = {"pre_logits/kernel": kernel, "pre_logits/bias": bias, "head/kernel": head}
    arrays = jax_arrays(native, tmp_path) | {name: tensor.numpy() for name, tensor in more.items()}
    cls = native.vit(IMAGES).last_hidden_state[:, 0]
    wanted = {"logits": (cls @ kernel + bias).tanh() @ head + native.classifier.bias}
    assert difference(arrays, wanted) <= ROUNDING


def test_the_probe_of_big_vision_pools_as_siglip_does(reference, difference, tmp_path):
    native = reference(transformers.SiglipVisionModel, hidden_act="gelu")
    assert difference(jax_arrays(native, tmp_path, big_vision=True), native, BASE) <= ROUNDING


def test_a_class_token_that_big_vision_gives_no_position_has_none(reference, difference, tmp_path):
    native = reference()
    native.base_model.embeddings.position_embeddings.data[:, 0] = 0
    arrays = jax_arrays(native, tmp_path, big_vision=True)
    arrays["pos_embedding"] = arrays["pos_embedding"][:, 1:]
    assert difference(arrays, native) <= ROUNDING


@pytest.mark.parametrize("fields", [dict(hidden_size=96, num_attention_heads=2), dict(num_attention_heads=6)])
def test_the_number_of_heads_is_assumed_or_asked_for_and_can_be_given(reference, difference, tmp_path, caplog, fields):
    native, given = reference(**fields), dict(num_attention_heads=fields["num_attention_heads"])
    for file in (save(to_timm(native), tmp_path / "vit.pth"), torchvision_file(native, tmp_path)):
        if "hidden_size" in fields:
            with pytest.raises(ValueError, match="pass num_attention_heads="):
                CLASSIFIER.from_checkpoint(file)
        else:
            assert difference(file, native) > 1e-2
            assert "num_attention_heads 3 assumed" in caplog.messages[-1]
        assert difference(file, native, **given) <= ROUNDING


def test_a_rectangular_grid_needs_its_image_size_and_a_timm_repo_says_it(reference, difference, tmp_path):
    native, images = reference(image_size=(16, 40)), torch.randn(2, 3, 16, 40)
    for file in (
        save(to_timm(native), tmp_path / "vit.pth"),
        torchvision_file(native, tmp_path),
        save(jax_arrays(native, tmp_path), tmp_path / "vit.npz"),
    ):
        with pytest.raises(ValueError, match=r"11 positions .* pass image_size="):
            CLASSIFIER.from_checkpoint(file, image_size=(16, 48))
        assert difference(file, native, images=images, image_size=(16, 40)) <= ROUNDING
    folder = timm_repo(pretrained_cfg={"input_size": [3, 16, 40]})(native, tmp_path / "repo")
    assert difference(folder, native, images=images) <= ROUNDING


def test_positions_that_may_be_a_square_are_one_whatever_size_is_asked_for(reference, tmp_path):
    file = save(to_timm(reference()), tmp_path / "vit.pth")  # 4 x 4 patches, or 2 x 8
    asked, resized = CLASSIFIER.from_checkpoint(file, image_size=(16, 64)), CLASSIFIER.from_checkpoint(file)
    resized.resize_input(image_size=(16, 64))
    assert torch.equal(*(model.vit.embeddings.position_embeddings for model in (asked, resized)))
