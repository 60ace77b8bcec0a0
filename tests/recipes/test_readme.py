"""Every Python block and every command of the README and the handbook runs as printed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from image_data import picture
from loopback_hub import Hub
from publishing import at
from runs import HOUSE, UNDRAWN, save_with_processor
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTModel

from hf_vit.data.sources import load_splits
from hf_vit.training.arguments import parse_args


PAGES = {
    str(page.relative_to(HOUSE)): page.read_text()
    for page in (HOUSE / "README.md", HOUSE / "recipes" / "README.md", *sorted(HOUSE.glob("recipes/docs/*.md")))
}
PYTHON = [
    pytest.param(block, id=f"{name}-{index}")
    for name, page in PAGES.items()
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
]
RUNS = "python recipes/"
NOT_HERE = ("NAME.yaml", "imagenet", "recipes/benchmarks/")  # a placeholder, a data set that is not at hand, an hour
COMMANDS = {
    name: [
        line.strip()
        for line in page.splitlines()
        if line.strip().startswith(RUNS) and not any(name in line for name in NOT_HERE)
    ]
    for name, page in PAGES.items()
}
LONG_PAGES = {
    f"recipes/docs/{name}.md" for name in ("predicting", "pretraining", "regression", "sharing", "your-own-images")
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory, tiny_fields, demo_run):
    """A folder in which the README's relative paths and repository ids exist: small things under the real names."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "recipes").symlink_to(HOUSE / "recipes")
    save_with_processor(ViTModel(ViTConfig(**tiny_fields)), desk / "google" / "vit-base-patch16-224-in21k")
    dinov2 = Dinov2Config(image_size=518, patch_size=14, hidden_size=24, num_hidden_layers=12, num_attention_heads=6)
    Dinov2Model(dinov2).save_pretrained(desk / "facebook" / "dinov2-small")
    shutil.copytree(demo_run, desk / "runs" / "demo")
    for label in ("cat", "dog"):
        (desk / "photos" / label).mkdir(parents=True)
        for index in range(10):
            name = f"{index}.png" if index % 2 == 0 else f"{index}.jpg"
            picture(index, (20, 30)).save(desk / "photos" / label / name)
    rows = [f"photos/{label}/{index}.jpg,{20.5 + index}" for label in ("cat", "dog") for index in (1, 3, 5, 7, 9)]
    (desk / "people.csv").write_text("\n".join(["file_name,age", *rows]))
    for name in ("labelled", "new_photos", "unlabelled", "unsorted"):
        (desk / name).symlink_to(desk / "photos")
    return desk


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set:UserWarning")  # by Trainer, without a GPU
@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    exec(compile(block, "README.md", "exec"), {})
    if "print(" in block:
        assert capsys.readouterr().out.strip() in load_splits("fashion-mnist-mini")["test"].features["label"].names


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG_PAGES)) for page in PAGES]
)
def test_commands_run_in_their_order(page, desk, hub, tmp_path):
    for command in COMMANDS[page]:
        script, *flags = shlex.split(command.replace("USER/", "alice/"))[1:]
        environment, launcher = dict(os.environ), ()
        if "publish.py" in script:
            environment |= at(hub, tmp_path)
        if "train.py" in script:  # and pretrain.py
            flags += ["--max_train_steps", "1", "--per_device_train_batch_size", "4"]
            launcher = UNDRAWN if page != "README.md" else ()
        result = forked.run([sys.executable, "-W", "ignore", *launcher, script, *flags], cwd=desk, env=environment)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


LAUNCHES = [
    line.strip()
    for page in PAGES.values()
    for line in page.splitlines()
    if line.strip().startswith(("accelerate launch", "exec python"))
]


@pytest.mark.parametrize("command", LAUNCHES)
def test_commands_for_several_processes_name_files_and_flags_that_exist(command, monkeypatch):
    monkeypatch.chdir(HOUSE)
    launcher, _, flags = command.rstrip("'").partition(" recipes/train.py ")
    assert "--config_file" not in launcher or Path(launcher.split("--config_file ")[1].split()[0]).is_file()
    parse_args(shlex.split(flags.replace('"$SLURM_CPUS_PER_TASK"', "8")))


# Stand-ins for two commands of SLURM: two tasks that get SIGUSR1 once they have trained a step, and a queue that is a file.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
if [ ! -e queue ]; then until [ -s runs/slurm/metrics.jsonl ]; do sleep 0.1; done; kill -USR1 $(jobs -p); fi
code=0
for task in $(jobs -p); do wait $task || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo $2 >> queue; else echo 127.0.0.1; fi
"""


@pytest.mark.slow
def test_the_slurm_script_requeues_a_stopped_job_and_ends_with_a_finished_one(desk, tmp_path):
    (script,) = re.findall(r"```bash\n(#!.*?)```", PAGES["recipes/docs/slurm.md"], re.DOTALL)
    script = script.replace("29500", forked.free_port())
    flags = "demo.yaml --output_dir runs/slurm --shots 50 --max_train_steps 60 --log_steps 1"
    (desk / ".venv" / "bin").mkdir(parents=True)
    (desk / ".venv" / "bin" / "activate").touch()
    for name, text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "python": f'#!/bin/bash\nexec {sys.executable} -W ignore "$@"',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip
    command = ["bash", "-c", script.replace("imagenet-s16.yaml", flags)]
    stopped, finished = (subprocess.run(command, cwd=desk, capture_output=True, text=True, env=job) for _ in range(2))
    assert (stopped.returncode, (desk / "queue").read_text()) == (75, "7\n"), stopped.stdout + stopped.stderr
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "continuing after step" in finished.stdout
