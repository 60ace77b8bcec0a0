"""Claims about the command line of all scripts."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vit.system.command_line import Parser, from_here, shell_line
from hf_vit.training.arguments import GROUPS, TrainArguments, build_parser, parse_args


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
        ("--epochs", "--num_train_epochs"), ("--batch_size", "--per_device_train_batch_size"), ("--lr", "--learning_rate"),
        ("--batch-size", "--per_device_train_batch_size"), ("--model", "--model_name_or_path"), ("--data", "--dataset_name"),
        ("--dataset", "--dataset_name"), ("--output", "--output_dir"), ("--workers", "--num_workers"), ("--wd", "--weight_decay"),
        ("--fp16", "--mixed_precision fp16"), ("--bf16", "--mixed_precision bf16"), ("--learning_rat", "--learning_rate"),
        ("-lr", "--learning_rate"), ("--Learning-Rate", "--learning_rate"), ("--batchsize", "--per_device_train_batch_size"),
        ("--img_size", "--image_size"), ("--steps", "--max_train_steps"), ("--arch", "--preset"), ("--warmup_steps", "--warmup_ratio"),
        ("--resume_from_checkpoint", "--resume"), ("--overwrite_output_dir", "--overwrite"), ("--scheduler", "--lr_scheduler_type"),
        ("--val_split", "--eval_split"), ("--wandb", "--report_to"), ("--save_steps", "--checkpointing_steps"),
    ],
)  # fmt: skip
def test_a_name_from_elsewhere_or_a_misspelt_one_names_the_real_flag(typed, meant, said):
    sentence = said(lambda: parse_args([*TRAIN, f"{typed}=3"]))
    assert sentence.startswith(f"{typed} is not a flag of ")
    assert sentence.endswith(f": did you mean {meant}?")


@pytest.mark.parametrize("typed", ["--device", "--gpu", "--gpus", "--cpu", "--no_cuda", "--num-gpus"])
def test_whoever_asks_for_a_device_hears_how_it_is_chosen(typed, said):
    assert "ACCELERATE_USE_CPU=1 before the command keeps it on the CPU" in said(lambda: parse_args([*TRAIN, typed]))
    assert said(lambda: Parser("What it does.", "MODEL").parse_args([typed])).endswith(": it computes on the CPU")


def test_what_is_like_no_flag_gets_no_suggestion(said):
    assert said(lambda: parse_args([*TRAIN, "--zzzz"])).endswith(
        "--zzzz is not a flag of " + Parser("", "").prog + "; --help lists them"
    )


def test_a_word_without_a_flag_is_told_how_flags_are_given(said):
    assert said(lambda: parse_args(["photos"])).startswith("'photos' belongs to no flag; wanted ")


def test_a_model_that_stands_without_a_flag_is_named_so(said):
    parser = Parser("What it does.", "MODEL IMAGE")
    parser.add_argument("model", metavar="MODEL")
    assert said(lambda: parser.parse_args(["--model", "runs/demo"])).endswith(": MODEL goes without a flag")


def test_hyphens_are_underscores_in_flags_and_keys_and_stay_in_values(tmp_path):
    (tmp_path / "p.yaml").write_text("weight-decay: 0.5\n")
    args = parse_args(
        ["--config", str(tmp_path / "p.yaml"), *TRAIN, "--num-workers", "3", "--train-split=a-b", "--no-flip"]
    )
    assert (args.weight_decay, args.num_workers, args.train_split, args.flip) == (0.5, 3, "a-b", False)
    (tmp_path / "p.yaml").write_text("preset: tiny-patch16-224\n")
    flags = ["--dataset_name", "x", "--output_dir", "y", "--config", str(tmp_path / "p.yaml")]
    assert parse_args([*flags, "--model-name-or-path", "z"]).preset is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--crop", "sideways"], "argument --crop: invalid choice: 'sideways' (choose from "),
        (["--learning_rate", "fast"], "argument --learning_rate: 'fast' was given, a number was wanted"),
        (["--learning_rate", "nan"], "argument --learning_rate: 'nan' was given, a number was wanted"),
        (["--max_train_steps", "1e4"], "argument --max_train_steps: '1e4' was given, a whole number was wanted"),
        (["--flip", "perhaps"], "argument --flip: 'perhaps' was given, true or false was wanted"),
        (["--seed", "-1"], "argument --seed: -1 was given, 0 or more was wanted"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_wanted(flags, sentence, said):
    assert said(lambda: parse_args([*TRAIN, *flags])).startswith(sentence)


def test_a_preset_goes_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a folder of that name is no preset
    assert parse_args(["--config", "demo"]) == parse_args(["--config=demo.yaml"])
    assert parse_args(["--config", "demo"]).dataset_name == "fashion-mnist-mini"
    (tmp_path / "demo.yaml").write_text("\n".join(f"{TRAIN[i][2:]}: {TRAIN[i + 1]}" for i in (0, 2, 4)))
    assert parse_args(["--config", "demo.yaml"]).dataset_name == "photos"  # the file that is here comes first


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--preset", "cifar10"], "--preset cifar10: cifar10 is a training preset: --config cifar10"),
        (["--preset", "recipes/configs/cifar10.yaml"], "cifar10 is a training preset: --config cifar10"),
        (
            ["--config", "cifr10"],
            "--config cifr10: no such file, and no preset of that name; did you mean --config cifar10?",
        ),
        (["--config", "elsewhere/demo.yaml"], "did you mean --config demo?"),
        (["--config", "qqq"], "those in recipes/configs are cifar10"),
        (["--config", "."], "--config . is a folder; wanted a YAML file"),
    ],
)
def test_a_preset_in_the_wrong_place_or_misspelt_is_told_where_it_goes(flags, sentence, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in said(lambda: parse_args([*TRAIN, *flags]))


def test_a_misspelt_key_of_a_file_gets_a_suggestion(said, tmp_path):
    for key, meant in (("epochs", "num_train_epochs"), ("learning_rat", "learning_rate"), ("lr", "learning_rate")):
        (tmp_path / "p.yaml").write_text(f"{key}: 3\n")
        sentence = said(lambda: parse_args([*TRAIN, "--config", str(tmp_path / "p.yaml")]))
        assert sentence == f"--config {tmp_path / 'p.yaml'}: {key!r} is not a key: did you mean {meant!r}?"


def test_help_shows_every_flag_in_its_group_with_its_default():
    shown = " ".join(build_parser("Train.\n\n    an example").format_help().split())
    assert "Train. an example" in shown
    places = [shown.index(f" {title}: --{first}") for first, title in GROUPS.items()]
    assert places == sorted(places)
    for name, default in vars(TrainArguments()).items():
        assert f" --{name} " in shown
        if isinstance(default, str | float) or type(default) is int:
            assert f"(default: {default})" in shown.partition(f" --{name} ")[2].partition(" --")[0].replace(
                "- ", "-"
            ), name
    assert "(default: None)" not in shown
    assert "--no_flip" not in shown


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone.jpg", "gone.jpg cannot be read as an image: No such file here"),
        (
            "https://example.org/cat.jpg",
            "https://example.org/cat.jpg is an address: download the image, and name its file",
        ),
        (
            "my photos",
            "my photos is a folder, not an image and no data set: name its images, such as 'my photos'/*.jpg",
        ),
        ("empty", "empty is a folder, not an image and no data set"),
    ],
)
def test_what_cannot_be_classified_is_told_at_once(name, sentence, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "my photos").mkdir()
    (tmp_path / "my photos" / "1.jpg").touch()
    assert said(lambda: Parser("", "").check_images([name], or_data=True), code=1).startswith(sentence)
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    Parser("", "").check_images(["classes"], or_data=True)
    (tmp_path / "photo.heic").touch()  # whose content decides
    for name in ("fashion-mnist-mini", "photo.heic"):
        Parser("", "").check_images([name], or_data=True)
    assert "is a folder" in said(lambda: Parser("", "").check_images(["classes"]), code=1)
    assert "No such file" in said(lambda: Parser("", "").check_images(["fashion-mnist-mini"]), code=1)


@pytest.mark.parametrize(
    ("file", "why"), [("no/scores.json", "lies in no folder that is there (no)"), (".", "is a folder")]
)
def test_a_file_that_cannot_be_written_is_told_before_the_work(file, why, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said(lambda: Parser("", "").check_output_file(file), code=1).startswith(
        f"--output_file {file} {why}; wanted "
    )
    Parser("", "").check_output_file("scores.json")
    Parser("", "").check_output_file(None)


def test_a_path_that_is_not_there_is_told_at_once(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = said(lambda: Parser("", "").refuse_mistyped_paths(MODEL="google/vit", dataset_name="./photos"), code=1)
    assert sentence.startswith("--dataset_name ./photos: there is no such folder or file here")


def test_a_printed_command_runs_as_it_is_printed_from_the_working_directory(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "its script.py").write_text("import sys; print(sys.argv[1:])")
    for here in (tmp_path, folder, Path("/")):
        monkeypatch.chdir(here)
        line = shell_line(folder / "its script.py", "a b", from_here(folder / "$x"), 3)
        printed = subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout
        assert eval(printed) == ["a b", from_here(folder / "$x"), "3"]
        assert str(here) == "/" or str(here) not in shlex.split(line)[1]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert shlex.split(shell_line(folder / "its script.py"))[0] == "python"
