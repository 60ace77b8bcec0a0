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
# What is typed, and the words that the error has.
WRONG = {
    "--batch-size=3": "--batch-size --per_device_train_batch_size?",
    "-lr 3": "-lr --learning_rate?",
    "--learning_rat=3": "--learning_rat --learning_rate?",
    "--gpus 3": "--gpus ACCELERATE_USE_CPU=1",
    "photos": "'photos'",
    "--crop sideways": "--crop 'sideways' resized",
    "--learning_rate nan": "--learning_rate number 'nan'",
    "--max_train_steps 1e4": "--max_train_steps integer '1e4'",
    "--flip perhaps": "--flip true false 'perhaps'",
    "--seed -1": "--seed >= 0 -1",
    "--label_smoothing 4": "--label_smoothing 4",
    "--eval_crop 256": "--eval_crop 256",
    "--preset cifar10": "--config cifar10",
    "--config cifr10": "--config cifr10 cifar10,",
    "--config qqq": "cifar10, food3",
}


@pytest.fixture
def said(capsys):
    """said(call) -> the last line of an error that ends the process with exit code 2."""

    def said(call):
        with pytest.raises(SystemExit) as ended:
            call()
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]

    return said


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_name_or_value_is_named_with_what_is_meant(typed, said):
    sentence = said(lambda: parse_args([*TRAIN, *typed.split()]))
    assert [word for word in WRONG[typed].split() if word not in sentence] == []


def test_a_word_that_goes_without_a_flag_is_named(said):
    parser = Parser("What it does.", "MODEL IMAGE")
    parser.add_argument("model", metavar="MODEL")
    assert "MODEL" in said(lambda: parser.parse_args(["--model", "runs/demo"]))


def test_hyphens_are_underscores_in_flags_and_keys_and_stay_in_values(tmp_path):
    (tmp_path / "p.yaml").write_text("weight-decay: 0.5\n")
    flags = ["--config", str(tmp_path / "p.yaml"), "--num-workers", "3", "--train-split=a-b", "--no-flip"]
    args = parse_args([*TRAIN, *flags])
    assert (args.weight_decay, args.num_workers, args.train_split, args.flip) == (0.5, 3, "a-b", False)
    assert parse_args([*TRAIN, "--output_dir", "no-flip"]).output_dir == "no-flip"


def test_a_preset_goes_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a folder of that name is no preset
    assert parse_args(["--config", "demo"]) == parse_args(["--config=demo.yaml"])
    assert parse_args(["--config", "demo"]).dataset_name == "fashion-mnist-mini"
    (tmp_path / "demo.yaml").write_text("dataset_name: photos\noutput_dir: runs/x\npreset: tiny-patch16-224")
    assert parse_args(["--config", "demo.yaml"]).dataset_name == "photos"  # the file that is here comes first


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
    with pytest.raises(SystemExit):
        parse_args([*TRAIN, "--zzzz"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("file", ["no/scores.csv", "folder.csv", "a.txt", "b.csv"])
def test_a_file_that_cannot_be_written_is_told_before_the_work(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.csv").mkdir()
    Path("b.csv").touch()
    with pytest.raises(SystemExit, match=file):
        Parser.check_output_files(Path(file), endings=(".csv",), overwrite=False)
    Parser.check_output_files(Path("scores.csv"), Path("b.csv"), endings=(".csv",))


def test_a_printed_command_runs_as_it_is_printed_from_the_working_directory(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "its script.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    for here in (tmp_path, folder):
        monkeypatch.chdir(here)
        line = shell_line(folder / "its script.py", "a b", "$x", 3)
        printed = subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout
        assert eval(printed) == ["a b", "$x", "3"]
