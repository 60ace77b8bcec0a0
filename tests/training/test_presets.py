"""Claims about flags and YAML presets of a run."""

import pytest

from hf_vit.data.columns import read_label_names
from hf_vit.system.errors import UserError
from hf_vit.training.arguments import from_call, parse_args, parse_overrides
from hf_vit.training.pretrain_arguments import PretrainArguments


NEEDED = ["--dataset_name", "photos", "--output_dir", "runs/x"]
SCRATCH = [*NEEDED, "--preset", "tiny-patch16-224"]
FINE_TUNE = [*NEEDED, "--model_name_or_path", "some/vit"]


@pytest.fixture
def parse_yaml(tmp_path):
    """parse_yaml(text, *flags) -> the arguments of a preset with this text."""

    def parse(text, *flags):
        (tmp_path / "p.yaml").write_text(text)
        return parse_args([*flags, "--config", str(tmp_path / "p.yaml")])

    return parse


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("learning_rate", "3e-4", 3e-4),
        ("flip", "false", False),
        ("output_dir", "~/runs", "/home/al/runs"),
    ],
)
def test_a_value_means_the_same_in_yaml_and_as_a_flag(parse_yaml, monkeypatch, key, written, meant):
    """YAML 1.1 takes 3e-4 for text, and no shell replaces a tilde in a file."""
    monkeypatch.setenv("HOME", "/home/al")
    flags = {"dataset_name": "photos", "preset": "tiny-patch16-224", "output_dir": "x"} | {key: written}
    of_flags = parse_args([f"--{name}={value}" for name, value in flags.items()])
    of_yaml = parse_yaml("\n".join(f"{name}: {value}" for name, value in flags.items()))
    assert getattr(of_flags, key) == meant
    assert of_yaml == of_flags


def test_a_flag_overrides_the_preset_wherever_it_stands(parse_yaml):
    assert parse_yaml("seed: 1", *SCRATCH, "--seed", "2").seed == 2
    assert parse_args(["--config", "demo", "--seed", "2"]).seed == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rat: 1e-3", "--learning_rate"),
        ("seed: [1, 2]", "seed"),
        ("- a list", "a list"),
        ("a: b: c", "p.yaml"),
    ],
)
def test_a_wrong_file_of_flags_stops_and_is_named(parse_yaml, text, named, capsys):
    with pytest.raises(SystemExit):
        parse_yaml(text, *SCRATCH)
    assert named in capsys.readouterr().err


REFUSED = [  # flags after others, and those that the error names
    ([], "--dataset_name x --preset tiny-patch16-224", "--output_dir"),
    (NEEDED, "", "--model_name_or_path --preset"),
    (SCRATCH, "--model_name_or_path z", "--preset --model_name_or_path"),
    (SCRATCH, "--train_split all --eval_split all", "--eval_split --train_split"),
    (SCRATCH, "--overwrite --resume runs/x", "--overwrite --resume"),
    (SCRATCH, "--streaming", "--streaming --max_train_steps"),
    (SCRATCH, "--streaming --max_train_steps 9 --shots 5", "--streaming --shots"),
    (FINE_TUNE, "--lora_save adapter", "--lora_save --lora_rank"),
    (FINE_TUNE, "--freeze_layers 2 --lora_rank 8", "--freeze_layers --lora_rank"),
    (FINE_TUNE, "--freeze_backbone --cache_features --mixup 0.2", "--cache_features --mixup"),
]


@pytest.mark.parametrize(("start", "flags", "named"), REFUSED)
def test_what_is_missing_or_does_not_go_together_is_refused_and_the_flags_are_named(start, flags, named, capsys):
    with pytest.raises(SystemExit):
        parse_args([*start, *flags.split()])
    error = capsys.readouterr().err.rpartition("error:")[2]
    assert all(name in error for name in named.split())


def test_a_checkpoint_on_the_command_line_replaces_the_network_of_a_preset_and_its_learning_rate():
    demo = ["--config", "demo", "--model_name_or_path", "some/vit"]
    args = parse_args(demo)
    assert (args.preset, args.config_overrides, args.learning_rate) == (None, None, None)
    assert args.model_name_or_path == "some/vit"
    args = parse_args([*demo, "--learning_rate", "1e-4", "--config_overrides", "drop_path_rate=0.1"])
    assert (args.learning_rate, args.config_overrides) == (1e-4, "drop_path_rate=0.1")


def test_config_overrides_are_typed():
    given = "hidden_size=64, pooling=mean,use_class_token=false,layerscale_value=null,image_size=[32, 48],drop_path_rate=1e-1"
    assert list(parse_overrides(given).values()) == [64, "mean", False, None, [32, 48], 0.1]
    with pytest.raises(ValueError, match="hidden_size"):
        parse_overrides("hidden_size")


def test_cached_features_are_of_images_that_are_neither_cropped_nor_mirrored():
    for asked in ([], ["--crop", "simple", "--flip", "true"]):
        args = parse_args([*FINE_TUNE, "--freeze_backbone", "--cache_features", *asked])
        assert (args.crop, args.flip) == ("none", False)


def test_a_call_takes_values_and_names_the_flag_that_is_wrong():
    args = from_call(config="demo", learning_rate=1e-3, flip=False, label_columns=["a", "b"], output_dir="runs/x")
    assert (args.learning_rate, args.flip, args.label_columns) == (1e-3, False, "a,b")
    for flags, named in (({"lr": 1e-3}, "learning_rate"), ({"seed": -1}, "seed"), ({"config": "dmeo"}, "demo")):
        with pytest.raises(UserError, match=named):
            from_call(**{"config": "demo", **flags})


def test_flags_of_labels_are_none_of_pre_training(capsys):
    with pytest.raises(SystemExit):
        parse_args([*SCRATCH, "--mixup", "1"], kind=PretrainArguments)
    assert "--mixup" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # as an editor on Windows saves it
def test_names_of_labels_are_the_lines_of_a_file(tmp_path, encoding):
    (tmp_path / "names.txt").write_text("cat\nd\u00f6g\nthird one\n", encoding=encoding)
    assert read_label_names(str(tmp_path / "names.txt")) == ["cat", "d\u00f6g", "third one"]


@pytest.mark.parametrize("text", ["cat\ndog\ncat\n", "cat\n\ndog\n", "cat\n"])
def test_names_of_labels_that_are_empty_twice_or_too_few_are_refused(tmp_path, text):
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(UserError, match=r"--label_names .*names.txt"):
        read_label_names(str(tmp_path / "names.txt"))
