"""Claims about flags and YAML presets of a run."""

import re
from pathlib import Path

import pytest
import yaml

from hf_vit.data.columns import read_label_names
from hf_vit.system.errors import UserError
from hf_vit.training.arguments import TrainArguments, from_call, parse_args, parse_overrides
from hf_vit.training.pretrain_arguments import PretrainArguments


NEEDED = ["--dataset_name", "photos", "--output_dir", "runs/x", "--preset", "tiny-patch16-224"]
CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "configs").glob("*.yaml"))


def parse_yaml(tmp_path, text, *flags):
    (tmp_path / "preset.yaml").write_text(text)
    return parse_args(["--config", str(tmp_path / "preset.yaml"), *NEEDED, *flags])


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("learning_rate", "3e-4", 3e-4),
        ("flip", "false", False),
        ("flip", "true", True),
        ("output_dir", "~/runs", "/home/al/runs"),
    ],
)
def test_a_value_means_the_same_in_yaml_and_as_a_flag(tmp_path, monkeypatch, key, written, meant):
    """YAML 1.1 takes 3e-4 for text, and no shell replaces a tilde in a file."""
    monkeypatch.setenv("HOME", "/home/al")
    flags = ["--dataset_name", "photos", "--preset", "tiny-patch16-224"] + ["--output_dir=x"] * (key != "output_dir")
    (tmp_path / "p.yaml").write_text(f"{key}: {written}")
    for given in (["--config", str(tmp_path / "p.yaml")], [f"--{key}={written}"]):
        assert getattr(parse_args([*flags, *given]), key) == meant


def test_a_flag_overrides_the_preset_wherever_it_stands(tmp_path):
    assert parse_yaml(tmp_path, "seed: 1", "--seed", "2").seed == 2
    (tmp_path / "p.yaml").write_text("seed: 1")
    assert parse_args(["--seed", "2", *NEEDED, "--config", str(tmp_path / "p.yaml")]).seed == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("crop: sideways", "sideways"),
        ("learning_rat: 1e-3", "did you mean --learning_rate"),
        ("seed: [1, 2]", "seed"),
        ("- a list", "a list"),
        ("a: b: c", "not YAML"),
    ],
)
def test_a_wrong_key_or_value_stops_and_is_named(tmp_path, text, named, capsys):
    with pytest.raises(SystemExit):
        parse_yaml(tmp_path, text)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dataset_name", "x", "--preset", "tiny-patch16-224"], "--output_dir"),
        (["--dataset_name", "x", "--output_dir", "y"], "--model_name_or_path"),
        ([*NEEDED, "--model_name_or_path", "z"], "--preset"),
        ([*NEEDED, "--config", "nowhere.yaml"], "no such file"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(flags, named, capsys):
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_train_steps", 0),
        ("label_smoothing", 4),
        ("eval_crop", 256.0),
    ],
)
def test_a_number_out_of_range_is_refused(name, value, capsys):
    with pytest.raises(SystemExit):
        parse_args([*NEEDED, f"--{name}={value}"])
    assert f"--{name} must be " in capsys.readouterr().err


def test_a_checkpoint_on_the_command_line_replaces_the_files_preset(tmp_path):
    (tmp_path / "p.yaml").write_text("preset: tiny-patch16-224\nconfig_overrides: hidden_size=12")
    flags = ["--dataset_name", "x", "--output_dir", "y", "--config", str(tmp_path / "p.yaml")]
    args = parse_args([*flags, "--model_name_or_path", "z"])
    assert (args.preset, args.config_overrides, args.model_name_or_path) == (None, None, "z")
    args = parse_args([*flags, "--model_name_or_path", "z", "--config_overrides", "drop_path_rate=0.1"])
    assert args.config_overrides == "drop_path_rate=0.1"


def test_a_checkpoint_in_place_of_the_network_of_a_preset_does_not_take_its_learning_rate():
    flags = ["--config", "demo", "--model_name_or_path", "some/vit"]
    args = parse_args(flags)
    assert (args.preset, args.config_overrides, args.learning_rate) == (None, None, None)
    assert parse_args([*flags, "--learning_rate", "1e-4"]).learning_rate == 1e-4


def test_config_overrides_are_typed():
    given = "hidden_size=64, pooling=mean,use_class_token=false,layerscale_value=null,image_size=[32, 48],drop_path_rate=1e-1"
    assert parse_overrides(given) == dict(
        hidden_size=64,
        pooling="mean",
        use_class_token=False,
        layerscale_value=None,
        image_size=[32, 48],
        drop_path_rate=0.1,
    )
    with pytest.raises(ValueError, match="hidden_size"):
        parse_overrides("hidden_size")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_parses_and_says_how_it_is_run(path):
    script = "pretrain" if path.stem.startswith("pretrain-") else "train"
    parse_args(["--config", str(path)], kind=PretrainArguments if script == "pretrain" else TrainArguments)
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(re.search(rf"(python|--num_processes \d+) recipes/{script}.py .*{path.name}", line) for line in head)
    assert all(isinstance(key, str) for key in yaml.safe_load(path.read_text()))


FINE_TUNE = ["--dataset_name", "photos", "--output_dir", "runs/x", "--model_name_or_path", "some/vit"]


STREAM = [*NEEDED, "--streaming", "true"]


PROBE = [*FINE_TUNE, "--freeze_backbone"]
REFUSED = [
    ([*NEEDED, "--train_split", "all", "--eval_split", "all"], "--eval_split", "--train_split"),
    ([*FINE_TUNE, "--lora_save", "adapter"], "--lora_save", "--lora_rank"),
    ([*PROBE, "--lora_rank", "8"], "--freeze_backbone", "--lora_rank"),
    ([*FINE_TUNE, "--freeze_layers", "2", "--lora_rank", "8"], "--freeze_layers", "--lora_rank"),
    ([*NEEDED, "--overwrite", "--resume", "runs/x"], "--overwrite", "--resume"),
    ([*FINE_TUNE, "--cache_features"], "--cache_features", "--freeze_backbone"),
    ([*PROBE, "--cache_features", "--mixup", "0.2"], "--cache_features", "--mixup"),
    ([*NEEDED, "--lora_rank", "8"], "--lora_rank", "--preset"),
    ([*STREAM, "--max_train_steps", "9", "--shots", "5"], "--streaming", "--shots"),
    (STREAM, "--streaming", "--max_train_steps"),
    ([*FINE_TUNE, "--shuffle_buffer", "512"], "--shuffle_buffer", "--streaming"),
]


@pytest.mark.parametrize(("flags", "one", "other"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_go_together_is_refused_and_both_flags_are_named(flags, one, other, capsys):
    with pytest.raises(SystemExit):
        parse_args(flags)
    error = capsys.readouterr().err.rpartition("error:")[2]
    assert one in error
    assert other in error


def test_cached_features_are_of_images_that_are_neither_cropped_nor_mirrored():
    frozen = [*FINE_TUNE, "--freeze_backbone", "true"]
    for asked in ([], ["--crop", "simple", "--flip", "true"]):
        args = parse_args([*frozen, "--cache_features", "true", *asked])
        assert (args.crop, args.flip) == ("none", False)
    args = parse_args(frozen)
    assert (args.cache_features, args.crop, args.flip) == (False, "resized", True)


def test_a_call_takes_values_and_names_the_flag_that_is_wrong():
    args = from_call(config="demo", learning_rate=1e-3, flip=False, label_columns=["a", "b"], output_dir="runs/x")
    assert (args.learning_rate, args.flip, args.label_columns) == (1e-3, False, "a,b")
    for flags, named in (({"lr": 1e-3}, "learning_rate"), ({"seed": "fast"}, "seed"), ({"config": "dmeo"}, "demo")):
        with pytest.raises(UserError, match=named):
            from_call(**{"config": "demo", **flags})
    with pytest.raises(UserError, match="--seed"):
        TrainArguments("photos", preset="tiny-patch16-224", output_dir="o", seed=-1)


def test_flags_of_labels_are_none_of_pre_training(capsys):
    for flag in ("--mixup", "--lora_rank"):
        with pytest.raises(SystemExit):
            parse_args([*NEEDED, flag, "1"], kind=PretrainArguments)
        assert flag in capsys.readouterr().err


def test_names_of_labels_are_the_lines_of_a_file(tmp_path):
    (tmp_path / "names.txt").write_text("cat\nd\u00f6g\nthird one\n", encoding="utf-8")
    assert read_label_names(str(tmp_path / "names.txt")) == ["cat", "d\u00f6g", "third one"]
    (tmp_path / "names.txt").write_text("cat\ndog\n", encoding="utf-8-sig")  # as an editor on Windows saves it
    assert read_label_names(str(tmp_path / "names.txt")) == ["cat", "dog"]


@pytest.mark.parametrize("text", ["cat\ndog\ncat\n", "cat\n\ndog\n", "cat\n", ""])
def test_names_of_labels_that_are_empty_twice_or_too_few_are_refused(tmp_path, text):
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(UserError, match=r"--label_names .*names.txt"):
        read_label_names(str(tmp_path / "names.txt"))
