"""Claims about the command line of all scripts."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vit.system.command_line import Parser, shell_line
from hf_vit.training.arguments import TrainArguments, parse_args


TRAIN = ["--dataset_name", "photos", "--output_dir", "runs/x", "--preset", "tiny-patch16-224"]


@pytest.fixture
def said(capsys):
    """said(call) -> the last line of an error, after `error: `, that ends the process with exit code `code`."""

    def said(call, code=2):
        with pytest.raises(SystemExit) as ended:
            call()
        text = capsys.readouterr().err if code == 2 else ended.value.code
        assert (ended.value.code == 2) is (code == 2)
        assert "Traceback" not in text
        return text.strip().splitlines()[-1].partition("error: ")[2]

    return said


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--epochs", "--num_train_epochs"), ("--batch-size", "--per_device_train_batch_size"), ("--lr", "--learning_rate"),
        ("--model", "--model_name_or_path"), ("--fp16", "--mixed_precision"), ("--learning_rat", "--learning_rate"),
        ("-lr", "--learning_rate"), ("--resume_from_checkpoint", "--resume"),
    ],
)  # fmt: skip
def test_a_name_from_elsewhere_or_a_misspelt_one_names_the_real_flag(typed, meant, said):
    sentence = said(lambda: parse_args([*TRAIN, f"{typed}=3"]))
    assert typed in sentence
    assert sentence.endswith(f"{meant}?")


@pytest.mark.parametrize("typed", ["--device", "--gpus", "--no_cuda", "--num-gpus"])
def test_whoever_asks_for_a_device_hears_how_it_is_chosen(typed, said):
    assert "ACCELERATE_USE_CPU=1" in said(lambda: parse_args([*TRAIN, typed]))


def test_a_word_without_a_flag_is_named(said):
    assert "'photos'" in said(lambda: parse_args(["photos"]))
    parser = Parser("What it does.", "MODEL IMAGE")
    parser.add_argument("model", metavar="MODEL")
    assert said(lambda: parser.parse_args(["--model", "runs/demo"])).endswith(": MODEL goes without a flag")


def test_hyphens_are_underscores_in_flags_and_keys_and_stay_in_values(tmp_path):
    (tmp_path / "p.yaml").write_text("weight-decay: 0.5\n")
    args = parse_args(
        ["--config", str(tmp_path / "p.yaml"), *TRAIN, "--num-workers", "3", "--train-split=a-b", "--no-flip"]
    )
    assert (args.weight_decay, args.num_workers, args.train_split, args.flip) == (0.5, 3, "a-b", False)
    assert parse_args([*TRAIN, "--output_dir", "no-flip"]).output_dir == "no-flip"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--crop", "sideways"], ["--crop", "'sideways'", "resized"]),
        (["--learning_rate", "nan"], ["--learning_rate", "a number", "'nan'"]),
        (["--max_train_steps", "1e4"], ["--max_train_steps", "an integer", "'1e4'"]),
        (["--flip", "perhaps"], ["--flip", "true or false", "'perhaps'"]),
        (["--seed", "-1"], ["--seed", ">= 0", "-1"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wanted(flags, named, said):
    sentence = said(lambda: parse_args([*TRAIN, *flags]))
    assert all(name in sentence for name in named), sentence


def test_a_preset_goes_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a folder of that name is no preset
    assert parse_args(["--config", "demo"]) == parse_args(["--config=demo.yaml"])
    assert parse_args(["--config", "demo"]).dataset_name == "fashion-mnist-mini"
    (tmp_path / "demo.yaml").write_text("\n".join(f"{TRAIN[i][2:]}: {TRAIN[i + 1]}" for i in (0, 2, 4)))
    assert parse_args(["--config", "demo.yaml"]).dataset_name == "photos"  # the file that is here comes first


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset", "cifar10"], "--config cifar10"),
        (["--config", "cifr10"], "cifar10, "),
    ],
)
def test_a_preset_in_the_wrong_place_or_misspelt_is_told_where_it_goes(flags, named, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named in said(lambda: parse_args([*TRAIN, *flags]))


def test_help_shows_every_flag_in_its_group_with_its_default():
    parser = Parser("Train.\n\n    an example", "")
    parser.add_fields(TrainArguments)
    shown = " ".join(parser.format_help().split())
    for field in dataclasses.fields(TrainArguments):
        name = field.name
        assert f" --{name} " in shown
        assert len(field.metadata["help"].split()) <= 15, name
        if isinstance(field.default, str | float) or type(field.default) is int:
            of_flag = re.split(r" --\w+ (?=[A-Z{\[])", shown.partition(f" --{name} ")[2])[0].replace("- ", "-")
            assert f"(default: {field.default})" in of_flag, name


def test_of_several_processes_the_first_alone_prints_an_error(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        parse_args([*TRAIN, "--zzzz"])
    assert (ended.value.code, capsys.readouterr().err) == (2, "")


@pytest.mark.parametrize(
    ("file", "named"), [("no/scores.csv", "no/scores.csv"), (".", "."), ("a.txt", ".csv"), ("b.csv", "b.csv")]
)
def test_a_file_that_cannot_be_written_is_told_before_the_work(file, named, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("b.csv").touch()
    check = lambda **how: Parser("", "").check_output_files(Path(file), endings=(".csv",), **how)
    assert named in said(lambda: check(overwrite=False), code=1)
    Parser("", "").check_output_files(Path("scores.csv"), Path("b.csv"), endings=(".csv",))


def test_a_printed_command_runs_as_it_is_printed_from_the_working_directory(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "its script.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    for here in (tmp_path, folder, Path("/")):
        monkeypatch.chdir(here)
        line = shell_line(folder / "its script.py", "a b", "$x", 3)
        printed = subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout
        assert eval(printed) == ["a b", "$x", "3"]
