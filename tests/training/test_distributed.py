"""Claims about several processes and machines, tested by starting them: gloo on the loopback, on CPU."""

import json
import shutil
from itertools import chain

import forked
import pandas as pd
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from runs import (
    FSDP2,
    HOUSE,
    TINY,
    TRAIN,
    as_flags,
    cut_back,
    ended,
    files_of,
    log_of,
    logged,
    results_of,
    save_with_processor,
    start,
    write_photos,
    write_shards,
)  # fmt: skip
from safetensors.torch import load_file
from torch.testing import assert_close


LAUNCHERS = HOUSE / "recipes" / "accelerate"
STEPS, TOGETHER = 16, 32
FLAGS = dict(
    preset="tiny-patch16-224", config_overrides=TINY, max_train_steps=STEPS, eval_steps=8, log_steps=1, checkpointing_steps=4,
    ema_decay=0.9, mixup=0.2, optimizer="muon", mixed_precision="no", num_workers=0, auto_find_batch_size="false",
)  # fmt: skip
# Notes in the folder NOTES, a file a process and a line a step, the ids of its images, how many numbers of the layers the process
# holds, and a random one that it draws. NAN_AT, TERM_AT and ERROR_AT are "rank:step": there the loss turns bad, or this one process is asked to stop, or fails.
WATCHED = """
import faulthandler, json, os, signal
faulthandler.dump_traceback_later(80)  # says where a process hangs
signal.alarm(90)  # and ends it
import torch
from torch.distributed.tensor import DTensor
from hf_vit.system import hardware
from hf_vit.training.classification import Classification
from hf_vit.training.pretraining import PreTraining

rank, steps = os.environ.get("RANK", "0"), 0

def watch(task):
    loss = task.loss

    def watched(self, model, batch):
        global steps
        steps += 1
        is_now = lambda name: os.environ.get(name) == f"{rank}:{steps}"
        weights = [weight for name, weight in model.named_parameters() if ".layers." in name]
        held = sum(weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel() for weight in weights)
        os.makedirs(os.environ["NOTES"], exist_ok=True)
        with open(os.path.join(os.environ["NOTES"], rank), "a") as file:
            line = dict(ids=batch.rows["index"].tolist(), held=held / sum(weight.numel() for weight in weights), drawn=torch.rand(()).item())
            file.write(json.dumps(line) + "\\n")
        if is_now("TERM_AT"):
            os.kill(os.getpid(), signal.SIGTERM)
        if is_now("ERROR_AT"):
            raise RuntimeError("one process is out of luck")
        value, outputs = loss(self, model, batch)
        return value * (float("nan") if is_now("NAN_AT") else 1), outputs

    task.loss = watched

watch(Classification)
watch(PreTraining)
hardware.use_all_cores = lambda: None  # threads that wait for each other starve on a busy machine
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs; `photos` in it has 75 images to train on."""
    folder = tmp_path_factory.mktemp("runs")
    write_photos(folder / "photos", train=25, validation=10)
    (folder / "watched.py").write_text(WATCHED + forked.THEN_THE_SCRIPT)
    return folder


def notes_of(run):
    return run.with_name(f"{run.name}-notes")


def begun(run, recipe=TRAIN, launcher=(), flags=None, **more):
    flags = {"dataset_name": run.parent / "photos", "output_dir": run, **(FLAGS if flags is None else flags)}
    environment = {name: more.pop(name) for name in list(more) if name.isupper()}
    launcher = [*launcher, run.parent / "watched.py"]
    return start(*as_flags(flags | more), recipe=recipe, launcher=launcher, NOTES=str(notes_of(run)), **environment)


def one(run, code=0, batch=TOGETHER, **more):
    return ended(begun(run, per_device_train_batch_size=batch, **more), code=code)[0]


def two(run, code=0, batch=TOGETHER // 2, **more):
    """Two processes without a launcher, whose exit codes are their own."""
    ranks = forked.group_of_two()
    return ended(*[begun(run, per_device_train_batch_size=batch, **rank, **more) for rank in ranks], code=code)


def noted(run, key):
    """For each process, what it noted under `key`."""
    files = sorted(notes_of(run).iterdir())
    return [[json.loads(line)[key] for line in file.read_text().splitlines()] for file in files]


def seen(run):
    """The ids of each step, of the first process and then of the second."""
    return [list(chain(*parts)) for parts in zip(*noted(run, "ids"), strict=True)]


def predicted(run):
    """predictions.csv without the confidences, which two computations give differently in the last places."""
    return pd.read_csv(run / "predictions.csv").drop(columns="confidence")


def assert_same_course(run, other):
    """The same steps, each once, with the same losses, accuracies and rates, and the same scores."""
    assert [line["step"] for line in log_of(run)] == [line["step"] for line in log_of(other)]
    for key in ("loss", "eval_loss"):
        assert logged(run, key) == pytest.approx(logged(other, key), rel=0, abs=1e-5)
    for key in ("accuracy", "eval_accuracy", "learning_rate"):
        assert logged(run, key) == logged(other, key)
    found, wanted = results_of(run), results_of(other)
    for key in ("steps", "images_per_step", "skipped_steps"):
        assert found[key] == wanted[key]
    assert predicted(run).equals(predicted(other))


@pytest.fixture(scope="module")
def alone(runs):
    one(runs / "alone")
    assert len(seen(runs / "alone")) == STEPS
    return runs / "alone"


@pytest.fixture(scope="module")
def sharded(runs):
    """A run of two processes that share out each layer, by the real launcher."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", LAUNCHERS / "fsdp2.yaml", "--num_processes", "2"]
    launcher += ["--main_process_port", "0"]
    one(runs / "sharded", batch=TOGETHER // 2, launcher=launcher)
    return runs / "sharded"


# ----------------------------------------------------------------------------------------------------------------------
# As one process


def test_two_processes_train_as_one_does(alone, runs):
    two(runs / "together")
    assert seen(runs / "together") == seen(alone)
    first, second = noted(runs / "together", "drawn")  # as dropout would
    assert len({*first, *second}) == 2 * STEPS
    assert_same_course(runs / "together", alone)


def test_two_sharded_processes_train_as_one_does_and_hold_a_part_of_every_layer(alone, sharded):
    assert seen(sharded) == seen(alone)
    assert_same_course(sharded, alone)
    first, second = (set(held) for held in noted(sharded, "held"))
    assert first != {1.0}
    assert sum(first) + sum(second) == pytest.approx(1)


def test_two_sharded_processes_save_whole_weights_and_optimizers(alone, sharded):
    last = [f"checkpoints/step-{STEPS:06d}/{part}.safetensors" for part in ("model", "average", "optimizer")]
    for file in ("model/model.safetensors", *last):
        found, wanted = (load_file(run / file) for run in (sharded, alone))
        assert found.keys() == wanted.keys()
        for name in found:
            if "k_proj.bias" not in name:  # changes no answer: its gradient is rounding, which Adam makes a step of
                assert_close(found[name], wanted[name], rtol=0, atol=1e-4)


def test_a_new_head_of_few_images_is_fitted_first_under_fsdp_and_layers_of_any_class_are_sharded(runs, tiny_model):
    """The launcher's file names the layers of another kind of model."""
    base = save_with_processor(tiny_model(norm_first=False, id2label=dict(enumerate("abc"))), runs / "base")
    flags = dict(model_name_or_path=base, max_train_steps=1, mixed_precision="no", num_workers=0)
    assert "fitting the head" in two(runs / "head", flags=flags, **FSDP2)[0]
    assert max(held for (held,) in noted(runs / "head", "held")) < 1


def test_two_processes_pretrain_as_one_does_in_bf16_and_go_on_alone_or_as_two(runs, tmp_path):
    """The masks and their targets would differ if FSDP rounded them."""
    flags = {
        **{name: FLAGS[name] for name in ("preset", "config_overrides", "log_steps", "num_workers")},
        **dict(max_train_steps=4, eval_steps=4, checkpointing_steps=2, mixed_precision="bf16"),
    }
    how = dict(flags=flags, recipe=TRAIN.with_name("pretrain.py"))
    one(runs / "pretrained", **how)
    two(runs / "pretrained-by-two", **how, **FSDP2)
    wanted, found = logged(runs / "pretrained", "loss"), logged(runs / "pretrained-by-two", "loss")
    assert found[1] == pytest.approx(wanted[1], rel=0, abs=1e-6)
    assert found == pytest.approx(wanted, rel=0, abs=1e-3)
    resumed = cut_back(shutil.copytree(runs / "pretrained-by-two", runs / "pretrained-again"), 2)
    shutil.copytree(resumed, runs / "pretrained-alone")
    two(resumed, **how, **FSDP2)
    assert logged(resumed, "loss") == found
    one(runs / "pretrained-alone", **how)
    assert logged(runs / "pretrained-alone", "loss") == pytest.approx(wanted, rel=0, abs=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# Another number of processes


def test_one_process_goes_on_where_two_sharded_ones_stopped(alone, sharded, runs):
    run = cut_back(shutil.copytree(sharded, runs / "sharded-then-one"), 8)
    one(run, batch=TOGETHER // 4, gradient_accumulation_steps=4)
    passes = noted(run, "ids")[0]
    assert [list(chain(*passes[start : start + 4])) for start in range(0, len(passes), 4)] == seen(alone)[8:]
    assert results_of(run)["resumed_at_steps"] == [8]
    assert_same_course(run, alone)


def test_two_sharded_processes_go_on_where_one_stopped(alone, runs):
    run = cut_back(shutil.copytree(alone, runs / "one-then-sharded"), 12)
    two(run, **FSDP2)
    assert seen(run) == seen(alone)[12:]
    assert results_of(run)["resumed_at_steps"] == [12]
    assert_same_course(run, alone)


def test_two_processes_train_on_a_stream_as_one_does_and_one_goes_on_with_it(runs):
    shards = write_shards(runs / "photos", runs / "shards")
    stream = dict(dataset_name=shards, streaming="true", shuffle_buffer=16, max_train_steps=8, eval_steps=4)
    one(runs / "stream", **stream)
    two(runs / "stream-of-two", **stream)
    assert seen(runs / "stream-of-two") == seen(runs / "stream")
    assert_same_course(runs / "stream-of-two", runs / "stream")
    run = cut_back(shutil.copytree(runs / "stream-of-two", runs / "stream-then-one"), 4)
    one(run, **stream)
    assert seen(run) == seen(runs / "stream")[4:]
    assert_same_course(run, runs / "stream")


def test_two_machines_train_as_one_process_does_and_go_on_from_the_disk_of_the_first(alone, runs):
    """They share no disk; the second one is told to stop after 11 steps, and then both are started again."""
    places = runs / "nodes", runs / "second"
    for code, stop in ((75, {"TERM_AT": "1:11"}), (0, {})):
        machines = [rank | dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1") for rank in forked.group_of_two()]
        nodes = [
            begun(runs / "nodes", output_dir=place, per_device_train_batch_size=TOGETHER // 2, **machine, **stop)
            for place, machine in zip(places, machines, strict=True)
        ]
        ended(*nodes, code=code)
    assert results_of(places[0])["resumed_at_steps"] == [11]
    assert seen(places[0]) == seen(alone)
    assert_same_course(places[0], alone)
    assert not places[1].exists() or list(places[1].rglob("*")) == []


# ----------------------------------------------------------------------------------------------------------------------
# What befalls one process


def test_a_nan_in_one_process_skips_the_step_in_both_and_a_signal_stops_both_after_the_same(runs):
    run = runs / "shaken"
    printed = two(run, code=75, NAN_AT="1:3", TERM_AT="1:6")
    assert "after step 6" in printed[0]
    assert [len(ids) for ids in noted(run, "ids")] == [6, 6]
    assert not (run / "results.json").exists()
    last = max(run.glob("checkpoints/step-*"))
    assert json.loads((last / "state.json").read_text())["skipped_steps"] == [3]
    for file in last.glob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


def test_an_error_of_the_main_process_ends_both_with_one_sentence(alone):
    before = files_of(alone)
    errors = [line for text in two(alone, code=1, seed=1) for line in text.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "seed was 0 and is 1" in errors[0]
    assert files_of(alone) == before


def test_an_error_of_any_kind_in_any_process_ends_a_run_with_that_error(runs):
    assert "RuntimeError: one process is out of luck" in two(runs / "unlucky", code=1, ERROR_AT="1:3")[1]


TIMED_OUT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from hf_vit.training.distributed import exit_with_error, set_timeout
dist.init_process_group("gloo")
dist.barrier()
set_timeout(timedelta(seconds=3))
if dist.get_rank() == 1:
    time.sleep(20)
    sys.exit()
try:
    dist.barrier()
except RuntimeError as error:
    exit_with_error(error)
"""


def test_a_process_that_does_not_come_is_waited_for_no_longer_than_the_time_out():
    processes = [start(before=TIMED_OUT, **rank) for rank in forked.group_of_two()]
    try:
        assert processes[0].wait(15) == 1
    finally:
        for process in processes:
            process.kill()


# ----------------------------------------------------------------------------------------------------------------------
# The launchers' files


@pytest.mark.parametrize("file", sorted(LAUNCHERS.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_knows_every_key_of_a_launchers_file(file):
    config = load_config_from_file(str(file))
    options = launch_command_parser()._option_string_actions
    assert [key for key in config.fsdp_config or {} if f"--{key}" not in options] == []
