"""Scripts in forks of a process that has imported the libraries: each starts in a fraction of the seconds that these take.

`run` and `Forked` take a command line as `subprocess.run` and `Popen` do. What a script does before its imports, and what it
imports itself, is for tests that start Python anew. `group_of_two` is for two processes that train together.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


LIBRARIES = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "accelerate", "datasets", "evaluate", "huggingface_hub.hf_api",
    "jinja2", "matplotlib.backends.backend_agg", "matplotlib.figure", "pandas", "safetensors.torch",
    "transformers.image_processing_utils", "transformers.modeling_utils", "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto", "transformers.models.vit.modeling_vit",
)  # fmt: skip
# Code for "-c" that runs the script which the flags begin with, if any, and draws no pictures: half of the time of a tiny run.
THEN_THE_SCRIPT = """
import os, runpy, sys
from hf_vit import run_figures
from hf_vit.training import checkpoints

checkpoints.KEPT = 9  # which tests go on from
run_figures.draw_run = lambda *_: None
if sys.argv[1:]:
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
READ_BY_IMPORTS = ("DATASETS_", "HF_", "LD_", "MKL_", "MPL", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_")
# Each line that it reads becomes a process of its own, whose number it tells, and a keeper that writes its exit code to a file.
SERVER = """
import importlib, json, os, runpy, signal, sys

for name in sys.argv[1:]:
    importlib.import_module(name)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no reaping
for line in sys.stdin:
    if os.fork() == 0:
        break
else:
    sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
order, child = json.loads(line), os.fork()
if child != 0:
    print(child, flush=True)
    os.close(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(order["exit"] + ".part", "w") as opened:
        opened.write(str(code))
    os.rename(order["exit"] + ".part", order["exit"])
    os._exit(0)

for number, name in enumerate((os.devnull, order["stdout"], order["stderr"])):
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(file, number)
    os.close(file)
os.chdir(order["cwd"])
os.environ.clear()
os.environ.update(order["env"])
sys.argv = order["argv"]
if sys.argv[0] == "-c":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
elif sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def group_of_two() -> list[dict[str, str]]:
    """Environment variables of either rank of two processes that train together, without a launcher."""
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    group |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


@functools.cache
def server() -> subprocess.Popen:
    """One for all tests of this process; it ends with it, when its input does."""
    line = [sys.executable, "-W", "ignore", "-c", SERVER, *LIBRARIES]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen(line, **pipes)
    atexit.register(process.communicate)  # closes its input, and waits
    return process


class Forked:
    """A process as `subprocess.Popen` has it, of the line [sys.executable, "-W", "ignore", script | "-c" code | "-m" module, *flags].

    Its output is text, kept in two files, or one if `together`.
    """

    def __init__(self, line, cwd=".", env=None, together=False):
        self.args = [str(part) for part in line]
        assert self.args[:3] == [sys.executable, "-W", "ignore"], self.args
        self.folder = Path(tempfile.mkdtemp(dir=os.environ.get("HF_HOME")))  # which conftest removes
        self.files = [self.folder / "stdout", self.folder / ("stdout" if together else "stderr")]
        order = {
            "argv": self.args[3:], "cwd": str(cwd), "env": {**os.environ} if env is None else env, "exit": str(self.folder / "exit"),
            "stdout": str(self.files[0]), "stderr": str(self.files[1]),
        }  # fmt: skip
        starter = server()
        starter.stdin.write(json.dumps(order) + "\n")
        starter.stdin.flush()
        self.pid = int(starter.stdout.readline())

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        exit = self.folder / "exit"
        return int(exit.read_text()) if exit.exists() else None

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout, self.printed())
            time.sleep(0.01)
        return self.poll()

    def printed(self) -> str:
        """What it has printed so far."""
        return self.files[0].read_text() if self.files[0].exists() else ""

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        self.wait(timeout)
        return self.printed(), self.files[1].read_text()

    def send_signal(self, number: int):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def run(line, cwd=".", env=None, timeout: float = 300, check: bool = False) -> subprocess.CompletedProcess:
    """`subprocess.run` with captured text; Python is started anew where `env` has what libraries read while they are imported."""
    line, env = [str(part) for part in line], {**os.environ} if env is None else env
    names = {name for name in {*env, *os.environ} if name.startswith(READ_BY_IMPORTS)}
    if any(env.get(name) != os.environ.get(name) for name in names):
        return subprocess.run(line, cwd=cwd, env=env, timeout=timeout, check=check, capture_output=True, text=True)
    process = Forked(line, cwd, env)
    done = subprocess.CompletedProcess(line, process.wait(timeout), *process.communicate())
    if check:
        done.check_returncode()
    return done
