"""Claims about flags and YAML presets."""

import contextlib
import inspect
import io
import re
from pathlib import Path

import pytest
import yaml

from hf_vit.data.columns import read_label_names
from hf_vit.system.errors import UserError
from hf_vit.training import arguments, pretrain_arguments
from hf_vit.training.arguments import changed_arguments, parse_args, parse_overrides, to_yaml


NEEDED = ["--dataset_name", "photos", "--output_dir", "runs/x", "--preset", "tiny-patch16-224"]
CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "configs").glob("*.yaml"))


def parse_yaml(tmp_path, text, *flags):
    (tmp_path / "preset.yaml").write_text(text)
    return parse_args(["--config", str(tmp_path / "preset.yaml"), *NEEDED, *flags])


def test_yaml_scientific_notation_is_a_number(tmp_path):
    """YAML 1.1 takes 3e-4 for text."""
    assert parse_yaml(tmp_path, "learning_rate: 3e-4").learning_rate == 3e-4


def test_a_tilde_is_the_home_folder_where_no_shell_has_replaced_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    flags = ["--dataset_name", "photos", "--preset", "tiny-patch16-224"]
    assert parse_args([*flags, "--output_dir=~/runs"]).output_dir == "/home/al/runs"


@pytest.mark.parametrize(("written", "meant"), [("False", False), ("no", False), ("false", False), ("true", True)])
def test_a_boolean_means_what_it_says_in_yaml_and_as_a_flag(tmp_path, written, meant):
    assert parse_yaml(tmp_path, f"flip: {written}").flip is meant
    assert parse_args([*NEEDED, "--flip", written]).flip is meant


def test_a_flag_overrides_the_preset_wherever_it_stands(tmp_path):
    assert parse_yaml(tmp_path, "seed: 1", "--seed", "2").seed == 2
    (tmp_path / "p.yaml").write_text("seed: 1")
    assert parse_args(["--seed", "2", *NEEDED, "--config", str(tmp_path / "p.yaml")]).seed == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("crop: sideways", "sideways"),
        ("learning_rat: 1e-3", "did you mean 'learning_rate'"),
        ("learn: 1e-3", "learn"),
        ("learning_rate: fast", "fast"),
        ("seed: 1.5", "1.5"),
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
        ([*NEEDED, "--model_name_or_path", "z"], "either"),
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
        ("eval_epochs", 0),
        ("max_train_steps", 0),
        ("label_smoothing", 4),
        ("mixup", -1),
        ("learning_rate", 0),
        ("eval_crop", 1.2),
        ("eval_crop", 256.0),
        ("eval_crop", 0.0),
    ],
)
def test_a_number_out_of_range_is_refused(name, value, capsys):
    with pytest.raises(SystemExit):
        parse_args([*NEEDED, f"--{name}={value}"])
    assert f"--{name}: {value}" in capsys.readouterr().err


def test_a_checkpoint_on_the_command_line_replaces_the_files_preset(tmp_path):
    (tmp_path / "p.yaml").write_text("preset: tiny-patch16-224\nconfig_overrides: hidden_size=12")
    flags = ["--dataset_name", "x", "--output_dir", "y", "--config", str(tmp_path / "p.yaml")]
    args = parse_args([*flags, "--model_name_or_path", "z"])
    assert (args.preset, args.config_overrides, args.model_name_or_path) == (None, None, "z")
    args = parse_args([*flags, "--model_name_or_path", "z", "--config_overrides", "drop_path_rate=0.1"])
    assert args.config_overrides == "drop_path_rate=0.1"


def test_what_was_resolved_parses_to_the_same_run(tmp_path):
    args = parse_args([*NEEDED, "--learning_rate", "3e-4", "--flip", "false", "--overwrite", "true"])
    (tmp_path / "config.yaml").write_text(to_yaml(args))
    again = parse_args(["--config", str(tmp_path / "config.yaml")])
    args.overwrite = False  # consent to replace a folder is given once
    assert again == args


def test_config_overrides_are_typed():
    assert parse_overrides("hidden_size=64, pooling=mean,use_class_token=false,layerscale_value=null") == {
        "hidden_size": 64,
        "pooling": "mean",
        "use_class_token": False,
        "layerscale_value": None,
    }
    assert parse_overrides("image_size=[32, 48],layerscale_value=1e-4") == {
        "image_size": [32, 48],
        "layerscale_value": 1e-4,
    }
    with pytest.raises(ValueError, match="no value"):
        parse_overrides("hidden_size")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_parses_and_says_how_it_is_run(path):
    script = "pretrain" if path.stem.startswith("pretrain-") else "train"
    {"train": parse_args, "pretrain": pretrain_arguments.parse_args}[script](["--config", str(path)])
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(re.search(rf"(python|--num_processes \d+) recipes/{script}.py .*{path.name}", line) for line in head)
    assert all(isinstance(key, str) for key in yaml.safe_load(path.read_text()))


FINE_TUNE = ["--dataset_name", "photos", "--output_dir", "runs/x", "--model_name_or_path", "some/vit"]
STREAM = [*NEEDED, "--streaming", "true"]
REFUSED = [
    ([*NEEDED, "--train_split", "all", "--eval_split", "all"], "--eval_split", "--train_split"),
    ([*NEEDED, "--crop", "simple", "--shift", "2"], "--crop simple", "--shift"),
    ([*NEEDED, "--lora_save", "adapter"], "--lora_save adapter", "--lora_rank"),
    ([*NEEDED, "--mixup", "0.2", "--per_device_train_batch_size", "1"], "--mixup", "--per_device_train_batch_size 1"),
    ([*NEEDED, "--shots", "5", "--train_fraction", "0.5"], "--shots", "--train_fraction"),
    ([*FINE_TUNE, "--freeze_backbone", "true", "--lora_rank", "8"], "--freeze_backbone", "--lora_rank"),
    ([*FINE_TUNE, "--freeze_layers", "2", "--lora_rank", "8"], "--freeze_layers", "--lora_rank"),
    ([*NEEDED, "--overwrite", "true", "--resume", "runs/x"], "--overwrite", "--resume"),
    ([*FINE_TUNE, "--cache_features", "true"], "--cache_features", "--freeze_backbone true"),
    (
        [*FINE_TUNE, "--freeze_backbone", "true", "--cache_features", "true", "--gradient_checkpointing", "true"],
        "--gradient_checkpointing", "--cache_features",
    ),
    *[
        ([*FINE_TUNE, "--freeze_backbone", "true", "--cache_features", "true", flag, value], "--cache_features", named)
        for flag, value, named in (
            ("--mixup", "0.2", "augmentation"), ("--cutmix", "1", "augmentation"), ("--erase", "0.2", "augmentation"),
            ("--shift", "2", "augmentation"), ("--color_jitter", "0.3", "augmentation"), ("--auto_augment", "rand", "augmentation"),
            ("--streaming", "true", "--streaming"),
            ("--teacher_name_or_path", "some/vit", "--teacher_name_or_path"), ("--first_image_size", "8", "--first_image_size"),
        )
    ],
    *[
        ([*NEEDED, flag, value], flag, "--model_name_or_path")
        for flag, value in (("--freeze_backbone", "true"), ("--freeze_layers", "2"), ("--lora_rank", "8"))
    ],
    *[
        ([*STREAM, "--max_train_steps", "9", flag, value], "--streaming", flag)
        for flag, value in (
            ("--shots", "5"), ("--train_fraction", "0.5"), ("--balance", "weights"), ("--balance", "sampling")
        )
    ],
    (STREAM, "--streaming", "--max_train_steps"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "one", "other"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_go_together_is_refused_and_both_flags_are_named(flags, one, other, capsys):
    with pytest.raises(SystemExit):
        parse_args(flags)
    error = capsys.readouterr().err.rpartition("error:")[2]
    assert one in error
    assert other in error


@pytest.mark.parametrize(
    ("flag", "value", "needed"),
    [
        ("--lora_alpha", "32", "--lora_rank"),
        ("--lora_dropout", "0.1", "--lora_rank"),
        ("--distillation_alpha", "0.3", "--teacher_name_or_path"),
        ("--distillation_temperature", "2", "--teacher_name_or_path"),
        ("--first_stage", "0.5", "--first_image_size"),
        ("--shuffle_buffer", "512", "--streaming"),
    ],
)
def test_a_flag_without_the_one_that_it_belongs_to_is_refused(flag, value, needed, capsys):
    with pytest.raises(SystemExit):
        parse_args([*FINE_TUNE, flag, value])
    assert f"{flag} has no effect without {needed}: give both, or neither" in capsys.readouterr().err


def test_a_checkpoint_in_place_of_the_network_of_a_preset_does_not_take_its_learning_rate():
    flags = ["--config", "demo", "--model_name_or_path", "some/vit"]
    args = parse_args(flags)
    assert (args.preset, args.config_overrides, args.learning_rate) == (None, None, None)
    assert parse_args([*flags, "--learning_rate", "1e-4"]).learning_rate == 1e-4


def test_a_run_with_a_value_that_had_no_effect_goes_on():
    args = parse_args(FINE_TUNE)
    saved = yaml.safe_load(arguments.to_yaml(args))
    assert arguments.changed_arguments({**saved, "lora_alpha": 32.0, "shuffle_buffer": 512}, args) == []
    changed = arguments.changed_arguments({**saved, "lora_rank": 8, "lora_alpha": 32.0}, args)
    assert changed == ["lora_rank was 8 and is 0", "lora_alpha was 32.0 and is 16.0"]


def test_every_contradiction_has_a_test():
    """As many as there are calls of `refuse`, each with another sentence."""
    code = inspect.getsource(arguments.check_combinations)
    said = set()
    for flags, *_ in REFUSED:
        with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as error:
            parse_args(flags)
        said.add(error.getvalue().rpartition("error:")[2])
    assert len(said) == code.count(" refuse(") - 1


@pytest.mark.parametrize(
    "flags",
    [
        [*NEEDED, "--shots", "5", "--balance", "weights"],
        [*NEEDED, "--train_fraction", "0.5", "--balance", "sampling"],
        [*FINE_TUNE, "--freeze_backbone", "true", "--freeze_layers", "2"],
        [*FINE_TUNE, "--lora_rank", "8", "--shots", "5"],
        [
            *FINE_TUNE,
            "--freeze_backbone",
            "true",
            "--cache_features",
            "true",
            "--balance",
            "weights",
            "--ema_decay",
            "0.9",
        ],
        [*STREAM, "--max_train_steps", "9", "--balance", "none", "--train_fraction", "1"],
    ],
)
def test_what_goes_together_is_not_refused(flags):
    parse_args(flags)


def test_cached_features_are_of_images_that_are_neither_cropped_nor_mirrored():
    frozen = [*FINE_TUNE, "--freeze_backbone", "true"]
    for asked in ([], ["--crop", "simple", "--flip", "true"]):
        args = parse_args([*frozen, "--cache_features", "true", *asked])
        assert (args.crop, args.flip) == ("none", False)
    args = parse_args(frozen)
    assert (args.cache_features, args.crop, args.flip) == (False, "resized", True)


def test_a_stream_is_scored_ten_times_unless_told_otherwise():
    assert parse_args([*STREAM, "--max_train_steps", "500"]).eval_steps == 50
    assert parse_args([*STREAM, "--max_train_steps", "5"]).eval_steps == 1
    assert parse_args([*STREAM, "--max_train_steps", "500", "--eval_steps", "7"]).eval_steps == 7
    assert parse_args([*NEEDED, "--max_train_steps", "500"]).eval_steps is None


def test_names_of_labels_are_the_lines_of_a_file(tmp_path):
    (tmp_path / "names.txt").write_text("cat\nd\u00f6g\nthird one\n", encoding="utf-8")
    assert read_label_names(str(tmp_path / "names.txt")) == ["cat", "d\u00f6g", "third one"]
    assert read_label_names(None) is None
    (tmp_path / "names.txt").write_text("cat\ndog\n", encoding="utf-8-sig")  # as an editor on Windows saves it
    assert read_label_names(str(tmp_path / "names.txt")) == ["cat", "dog"]


@pytest.mark.parametrize("text", ["cat\ndog\ncat\n", "cat\n\ndog\n", "cat\n", ""])
def test_names_of_labels_that_are_empty_twice_or_too_few_are_refused(tmp_path, text):
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(UserError, match=r"--label_names .*names.txt"):
        read_label_names(str(tmp_path / "names.txt"))
    with pytest.raises(FileNotFoundError, match=r"nowhere.txt"):
        read_label_names(str(tmp_path / "nowhere.txt"))


def test_a_retired_key_is_read_with_its_old_default_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arguments, "RETIRED", {"of_yesterday": 3})
    assert parse_yaml(tmp_path, "of_yesterday: 3\nseed: 1").seed == 1
    with pytest.raises(SystemExit) as ended:
        parse_yaml(tmp_path, "of_yesterday: 4")
    assert ended.value.code == 2
    assert "of_yesterday: 4" in capsys.readouterr().err
    saved = yaml.safe_load(to_yaml(parse_args(NEEDED)))
    assert changed_arguments({**saved, "of_yesterday": 3}, parse_args(NEEDED)) == []
    with pytest.raises(UserError, match="of_yesterday: 4"):
        changed_arguments({**saved, "of_yesterday": 4}, parse_args(NEEDED))
