"""`hf-vit`, from the wheel: all that the recipes need is in it, and a clone is not."""

import os
import shutil
import subprocess
import sys

import cli
import pytest
from runs import HOUSE, TINY, results_of


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """installed(line, cwd) runs `hf-vit` of a wheel that was just built, in a folder with no clone in sight."""
    home = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = home / "source"
    for name in ("hf_vit", "recipes"):
        shutil.copytree(HOUSE / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HOUSE / name, source)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", home, source]
    subprocess.run(build, check=True, capture_output=True, timeout=100)
    (wheel,) = home.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", home / "site", wheel], check=True, timeout=100)

    def run(line, cwd=home):
        environment = {**os.environ, "PYTHONPATH": str(home / "site"), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, home / "site" / "bin" / "hf-vit", *line.split()]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_the_wheel_trains_predicts_and_names_commands_that_run_without_a_clone(installed, tmp_path):
    line = f"train --config demo --max_train_steps 2 --shots 20 --config_overrides {TINY}"
    done = installed(line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = results_of(tmp_path / "runs" / "demo")
    assert results["command"] == f"hf-vit {line}"
    (following,) = [line for line in done.stdout.splitlines() if line.startswith("next: ")]
    following = following.removeprefix("next: hf-vit ")
    assert following.startswith("classify ")
    seen = installed(following, cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert "%" in seen.stdout.splitlines()[0]
    card = installed("publish runs/demo --repo alice/demo --license mit", cwd=tmp_path)
    assert card.returncode == 0, card.stderr


@pytest.mark.slow
def test_several_processes_are_those_of_accelerate(installed, tmp_path):
    done = installed("train --config demo --max_train_steps 1 --shots 20 --num-processes 2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = results_of(tmp_path / "runs" / "demo")
    assert results["command"].startswith("hf-vit train --num_processes 2 --config demo")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_answers_help_under_its_own_name(installed, name):
    done = installed(f"{name} --help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: hf-vit {name} ")
    assert "python recipes/" not in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("trian", "trian train pretrain"),
        ("train --lr 1", "--lr --learning_rate"),
        ("train --num_processes", "--num_processes"),
    ],
)
def test_a_wrong_word_is_named_with_what_was_meant(installed, words, named):
    done = installed(words)
    assert done.returncode == 2
    assert all(name in done.stderr for name in named.split())
