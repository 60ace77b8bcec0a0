"""`hf-vit`, from the wheel: all that the recipes need is in it, and a clone is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cli
import pytest


HOUSE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """installed(*words, cwd) runs `hf-vit` of a wheel that was just built, in a folder with no clone in sight."""
    home = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = home / "source"
    subprocess.run(["git", "clone", "--quiet", HOUSE, source], check=True, capture_output=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", home, source]
    subprocess.run(build, check=True, capture_output=True, timeout=100)
    (wheel,) = home.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", home / "site", wheel], check=True, timeout=100)

    def run(*words, cwd=home):
        environment = {**os.environ, "PYTHONPATH": str(home / "site"), "PYTHONWARNINGS": "ignore"}
        line = [sys.executable, home / "site" / "bin" / "hf-vit", *words]
        return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_the_wheel_trains_predicts_and_names_commands_that_run_without_a_clone(installed, tmp_path):
    small = ["--max_train_steps", "2", "--shots", "20"]
    done = installed("train", "--config", "demo", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs" / "demo" / "results.json").read_text())
    assert results["command"] == "hf-vit train --config demo --max_train_steps 2 --shots 20"
    (following,) = [line for line in done.stdout.splitlines() if line.startswith("next: ")]
    words = following.removeprefix("next: ").split()
    assert words[:2] == ["hf-vit", "classify"]
    seen = installed(*words[1:], cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert "%" in seen.stdout.splitlines()[0]
    card = installed("publish", "runs/demo", "--repo", "alice/demo", "--license", "mit", cwd=tmp_path)
    assert card.returncode == 0, card.stderr


@pytest.mark.slow
def test_several_processes_are_those_of_accelerate(installed, tmp_path):
    flags = ["--config", "demo", "--max_train_steps", "1", "--shots", "20", "--num-processes", "2"]
    done = installed("train", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs" / "demo" / "results.json").read_text())
    assert results["command"].startswith("hf-vit train --num_processes 2 --config demo")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_answers_help_under_its_own_name(installed, name):
    done = installed(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: hf-vit {name} ")
    assert "python recipes/" not in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian"], ["trian", "train, pretrain"]),
        (["train", "--lr", "1"], ["--lr", "--learning_rate"]),
        (["train", "--num_processes"], ["--num_processes"]),
    ],
)
def test_a_wrong_word_is_named_with_what_was_meant(installed, words, named):
    done = installed(*words)
    assert done.returncode == 2
    assert all(name in done.stderr for name in named)


def test_every_folder_of_the_package_is_in_the_wheel():
    import tomllib

    listed = set(tomllib.loads((HOUSE / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    rooms = {".".join(file.relative_to(HOUSE).parts[:-1]) for file in (HOUSE / "hf_vit").rglob("*.py")}
    assert listed == rooms | {"hf_vit_recipes"}
