"""Claims about several processes and machines, tested by starting them: gloo on the loopback, on CPU."""

import csv
import json
import os
import shutil
import sys
import tarfile
from io import BytesIO
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.data.sampling import epoch_batches
from hf_vit.training.model import shard_by_layer


HOUSE = Path(__file__).parents[2]
TRAIN, LAUNCHERS = HOUSE / "recipes" / "train.py", HOUSE / "recipes" / "accelerate"
STEPS, TOGETHER = 50, 32
TINY = "patch_size=7,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
FLAGS = [
    "--dataset_name", "fashion-mnist-mini", "--shots", 100, "--preset", "tiny-patch16-224", "--config_overrides",
    f"image_size=28,{TINY}", "--max_train_steps", STEPS, "--eval_steps", 25, "--log_steps", 1, "--checkpointing_steps", 20,
    "--ema_decay", 0.9, "--mixup", 0.2, "--mixed_precision", "no", "--optimizer", "muon",
]  # fmt: skip

# Runs train.py, and notes in the folder NOTES, a file a process and a line an event, what the process does. NAN and TERM are
# "rank:pass": there the images turn bad, or this one process is asked to stop.
WATCHED = """
import faulthandler, importlib, json, os, runpy, signal, sys

faulthandler.dump_traceback_later(80)  # says where a process hangs
signal.alarm(90)  # and ends it
import accelerate, torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from hf_vit.system import hardware

rank, passes = os.environ.get("RANK", "0"), 0
os.makedirs(os.environ["NOTES"], exist_ok=True)

def note(**line):
    with open(os.path.join(os.environ["NOTES"], rank), "a") as file:
        file.write(json.dumps(line) + "\\n")

def augment(images, index, *how, **more):
    global passes
    passes += 1
    if sys._getframe(2).f_code.co_name == "prepared":  # and not for the pictures of a finished run
        note(ids=index.tolist())
    pixel_values = real_augment(images, index, *how, **more)
    if os.environ.get("TERM_AT") == f"{rank}:{passes}":
        os.kill(os.getpid(), signal.SIGTERM)
    return pixel_values * float("nan") if os.environ.get("NAN_AT") == f"{rank}:{passes}" else pixel_values

def read(stream, *how):
    for row in real_read(stream, *how):
        note(shard=row["row"] % stream.rows.num_shards)
        yield row

def prepare(self, model, *others):
    prepared = real_prepare(self, model, *others)
    layers = prepared[0].get_submodule("vit.layers") if isinstance(prepared[0], FSDPModule) else []
    weights = [weight for layer in layers for weight in layer.parameters()]
    note(prepared={
        "layers": [isinstance(layer, FSDPModule) for layer in layers],
        "sharded": [isinstance(weight, DTensor) for weight in weights],
        "held": sum(weight.to_local().numel() for weight in weights if isinstance(weight, DTensor)),
        "whole": sum(weight.numel() for weight in weights),
    })
    return prepared

augments = importlib.import_module("hf_vit.data.augment")
real_augment, augments.augment = augments.augment, augment
from hf_vit.data.streaming import ImageStream
real_read, ImageStream._read_shards = ImageStream._read_shards, read
real_prepare, accelerate.Accelerator.prepare = accelerate.Accelerator.prepare, prepare
hardware.use_all_cores = lambda: None  # threads that wait for each other starve on a busy machine
"""


def notes_of(folder):
    return folder.with_name(f"{folder.name}-notes")


def start(folder, launcher, *flags, output_dir=None, recipe=TRAIN, **environment):
    """`recipe` through `launcher`, words that stand before the script; notes go beside `folder`."""
    script = folder.with_name("watched.py")
    if not script.exists():  # written again, it would be empty for a moment, when the process before may read it
        script.write_text(WATCHED + forked.THEN_THE_SCRIPT)
    flags = [*FLAGS, *flags] if "--dataset_name" not in flags else flags
    line = [sys.executable, "-W", "ignore", *launcher, script, recipe, *flags, "--output_dir", output_dir or folder]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true",
        "NOTES": str(notes_of(folder)), **environment,
    }  # fmt: skip
    return forked.Forked(line, env=environment, together=True)


def finish(processes, code=0):
    """What each of them printed; all must leave with the exit code `code`."""
    try:
        printed = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # a launcher; the processes that it started have their own alarm
    assert [process.returncode for process in processes] == [code] * len(processes), "\n----\n".join(printed)
    return printed


def one(folder, *flags, code=0, recipe=TRAIN):
    return finish([start(folder, [], *flags, recipe=recipe)], code)[0]


def two(folder, *flags, code=0, **environment):
    """Two processes without a launcher, whose exit codes are their own."""
    return finish([start(folder, [], *flags, **rank, **environment) for rank in forked.group_of_two()], code)


def two_launched(folder, config, *flags, recipe=TRAIN):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(LAUNCHERS / config), "--num_processes", "2"]
    return finish([start(folder, [*launcher, "--main_process_port", "0"], *flags, recipe=recipe)])[0]


def two_nodes(folder, *flags, code=0, **environment):
    """Two machines of one process each; they share no disk to write to."""
    group = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    group += ["--master_port", forked.free_port()]
    places = (folder, folder.with_name(f"{folder.name}-of-second-node"))
    return finish(
        [
            start(
                folder, ["-m", "torch.distributed.run", *group, "--node_rank", str(node)], *flags, output_dir=place, **environment
            )
            for node, place in enumerate(places)
        ],
        code,
    )  # fmt: skip


def noted(folder, key):
    """For each process, what it noted under `key`."""
    lines = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(notes_of(folder).iterdir())
    ]
    return [[line[key] for line in process if key in line] for process in lines]


def seen(folder):
    """The ids of each step, of the first process and then of the second."""
    return [list(chain(*parts)) for parts in zip(*noted(folder, "ids"), strict=True)]


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def logged(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def assert_same_course(run, other):
    """The same steps, each once, with the same losses, accuracies and rates, and the same scores."""
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if "_rate" in line]
    assert steps == list(range(1, results_of(other)["steps"] + 1))
    for key in ("loss", "eval_loss"):
        assert logged(run, key) == pytest.approx(logged(other, key), rel=0, abs=1e-5)
    for key in ("accuracy", "eval_accuracy", "learning_rate"):
        assert logged(run, key) == logged(other, key)
    found, wanted = results_of(run), results_of(other)
    for key in ("steps", "images_per_step", "skipped_steps"):
        assert found[key] == wanted[key]
    assert found["data"]["scored_images"] == wanted["data"]["scored_images"]
    assert [found["metrics"][key] for key in ("accuracy", "step")] == [
        wanted["metrics"][key] for key in ("accuracy", "step")
    ]
    assert (run / "confusion_matrix.csv").read_text() == (other / "confusion_matrix.csv").read_text()
    assert predicted(run) == predicted(other)


def predicted(run):
    """The lines of predictions.csv without the confidences, which two computations give differently in the last places."""
    with open(run / "predictions.csv", newline="", encoding="utf-8") as opened:
        return [{**line, "confidence": None} for line in csv.DictReader(opened)]


def interrupted(run, step, folder):
    """A copy of a run as a kill after `step`, whose checkpoint is there, would have left it."""
    shutil.copytree(run, folder)
    for name in ("results.json", "confusion_matrix.csv"):
        (folder / name).unlink(missing_ok=True)
    for place in [folder / "model", folder / "last", *folder.glob("checkpoints/*-*")]:
        if "-" not in place.name or int(place.name.partition("-")[2]) > step:
            shutil.rmtree(place, ignore_errors=True)
    assert sorted(folder.glob("checkpoints/step-*"))[-1].name == f"step-{step:06d}"
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(runs):
    one(runs / "alone", "--per_device_train_batch_size", TOGETHER)
    return runs / "alone"


@pytest.fixture(scope="module")
def together(runs):
    two_launched(runs / "together", "ddp.yaml", "--per_device_train_batch_size", TOGETHER // 2)
    return runs / "together"


@pytest.fixture(scope="module")
def sharded(runs):
    """A run of two processes that share out each layer, and what it printed."""
    return runs / "sharded", two_launched(
        runs / "sharded", "fsdp2.yaml", "--per_device_train_batch_size", TOGETHER // 2
    )


# ----------------------------------------------------------------------------------------------------------------------
# The order


@pytest.mark.parametrize("labels", [None, np.arange(75) % 7 // 3])
@pytest.mark.parametrize("count", [75, 5])
def test_one_two_and_four_processes_see_the_same_ids_in_the_same_order(count, labels):
    """In the last case there are fewer images than one batch holds."""
    labels = labels if labels is None else labels[:count]

    def order(world):
        ranks = [list(epoch_batches(count, 8 // world, 3, 1, rank, world, labels)) for rank in range(world)]
        return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]

    assert order(2) == order(4) == order(1)
    assert [len(batch) for batch in order(1)] == [8] * max(1, count // 8)


# ----------------------------------------------------------------------------------------------------------------------
# Copies of the model


def test_two_processes_train_as_one_does(alone, together):
    assert len(seen(alone)) == STEPS
    assert seen(together) == seen(alone)
    assert_same_course(together, alone)


# ----------------------------------------------------------------------------------------------------------------------
# Sharded


def test_two_sharded_processes_train_as_one_does(alone, sharded):
    assert seen(sharded[0]) == seen(alone)
    assert_same_course(sharded[0], alone)


def test_sharded_processes_hold_a_part_of_every_layer(sharded):
    run, printed = sharded
    assert "x 2, sharded" in printed
    first, second = (found for (found,) in noted(run, "prepared"))
    for process in (first, second):
        assert process["layers"] == [True, True]
        assert process["sharded"]
        assert all(process["sharded"])
    assert first["held"] + second["held"] == first["whole"]
    assert 0.4 < first["held"] / first["whole"] < 0.6


def test_a_model_of_sharded_processes_loads_in_one_and_answers_alike(alone, sharded, pixels):
    """What is saved is the average; the checkpoints hold it and the weights themselves."""
    loaded, wanted = (HFViTForImageClassification.from_pretrained(run / "model") for run in (sharded[0], alone))
    images = pixels(8, 28, 28)
    assert_close(loaded(images).logits, wanted(images).logits, rtol=0, atol=1e-4)
    assert wanted(images).logits.std() > 0.01
    last = f"checkpoints/step-{STEPS:06d}"
    for part in ("model", "average", "optimizer"):
        found, tensors = (load_file(run / last / f"{part}.safetensors") for run in (sharded[0], alone))
        assert found.keys() == tensors.keys()
        for name in found:
            if "k_proj.bias" not in name:  # changes no answer: its gradient is rounding, which Adam makes a step of
                assert_close(found[name], tensors[name], rtol=0, atol=1e-4)
    assert not torch.equal(
        loaded.classifier.weight, load_file(sharded[0] / last / "model.safetensors")["classifier.weight"]
    )


# ----------------------------------------------------------------------------------------------------------------------
# Another number of processes


def test_a_new_head_of_few_images_is_fitted_first_under_fsdp_too(runs):
    base = HOUSE / "model_cards" / "transfer" / "pretrained"
    flags = [
        "--dataset_name",
        "fashion-mnist-mini",
        "--shots",
        5,
        "--model_name_or_path",
        base,
        "--image_size",
        16,
    ]
    flags += ["--max_train_steps", 2, "--mixed_precision", "no", "--per_device_train_batch_size", 8]
    assert "fitting the head" in two_launched(runs / "head", "fsdp2.yaml", *flags)
    assert results_of(runs / "head")["metrics"]["accuracy"] > 0.3


def test_one_process_goes_on_where_two_sharded_ones_stopped(alone, sharded, runs):
    run = interrupted(sharded[0], 20, runs / "sharded-then-one")
    one(run, "--per_device_train_batch_size", TOGETHER // 4, "--gradient_accumulation_steps", 4)
    assert results_of(run)["resumed_at_steps"] == [20]
    passes = noted(run, "ids")[0]
    assert [list(chain(*passes[start : start + 4])) for start in range(0, len(passes), 4)] == seen(alone)[20:]
    assert_same_course(run, alone)


def test_two_processes_go_on_where_one_stopped(alone, runs):
    run = interrupted(alone, 20, runs / "one-then-two")
    two(run, "--per_device_train_batch_size", TOGETHER // 2)
    assert results_of(run)["resumed_at_steps"] == [20]
    assert seen(run) == seen(alone)[20:]
    assert_same_course(run, alone)


def test_two_sharded_processes_go_on_where_one_stopped(alone, runs):
    run = interrupted(alone, 40, runs / "one-then-sharded")
    two_launched(run, "fsdp2.yaml", "--per_device_train_batch_size", TOGETHER // 2)
    assert [found["layers"] for (found,) in noted(run, "prepared")] == [[True, True]] * 2
    assert results_of(run)["resumed_at_steps"] == [40]
    assert seen(run) == seen(alone)[40:]
    assert_same_course(run, alone)


def test_a_run_goes_on_only_with_as_many_images_a_step(alone, runs):
    run = interrupted(alone, 20, runs / "other-batch")
    printed = one(run, "--per_device_train_batch_size", 2 * TOGETHER, code=1)
    (error,) = [line for line in printed.splitlines() if "rror" in line]
    assert error.startswith("error: ")
    assert "images_per_step was 32 and is 64" in error
    assert "per_device_train_batch_size" in error


# ----------------------------------------------------------------------------------------------------------------------
# Precision

CELLS = [
    pytest.param(launcher, precision, recipe, id=f"{launcher}-{precision}-{recipe}", marks=marks)
    for launcher, precision, recipe, marks in (
        ("fsdp2", "bf16", "train", ()),
        ("fsdp2", "bf16", "pretrain", ()),
        ("fsdp2", "no", "train", pytest.mark.slow),
        ("fsdp2", "no", "pretrain", pytest.mark.slow),
        ("ddp", "bf16", "train", pytest.mark.slow),
        ("ddp", "bf16", "pretrain", pytest.mark.slow),
        ("ddp", "no", "train", pytest.mark.slow),
        ("ddp", "no", "pretrain", ()),
    )
]


@pytest.mark.parametrize(("launcher", "precision", "recipe"), CELLS)
def test_two_processes_train_as_one_does_and_go_on_alone_or_as_two_in_every_precision(
    launcher, precision, recipe, tmp_path
):
    """The masks of pre-training and its targets would differ if a launcher rounded them."""
    script = TRAIN.with_name(f"{recipe}.py")
    flags = [
        "--dataset_name", "fashion-mnist-mini", "--shots", 20, "--preset", "tiny-patch16-224", "--config_overrides",
        f"image_size=28,{TINY}", "--max_train_steps", 20, "--eval_steps", 20, "--log_steps", 1, "--checkpointing_steps", 10,
        "--mixed_precision", precision,
    ]  # fmt: skip
    of_two = [*flags, "--per_device_train_batch_size", TOGETHER // 2]
    of_one = [*flags, "--per_device_train_batch_size", TOGETHER]
    alone, together, resumed = tmp_path / "alone", tmp_path / "together", tmp_path / "resumed"
    one(alone, *of_one, recipe=script)
    two_launched(together, f"{launcher}.yaml", *of_two, recipe=script)
    wanted = logged(alone, "loss")
    rounding = 1e-3 if precision == "bf16" else 1e-5
    assert logged(together, "loss")[1] == pytest.approx(wanted[1], rel=0, abs=1e-6)
    assert logged(together, "loss") == pytest.approx(wanted, rel=0, abs=rounding)
    interrupted(together, 10, resumed)
    shutil.copytree(resumed, tmp_path / "alone-again")
    two_launched(resumed, f"{launcher}.yaml", *of_two, recipe=script)
    assert logged(resumed, "loss") == logged(together, "loss")
    one(tmp_path / "alone-again", *of_one, recipe=script)
    assert logged(tmp_path / "alone-again", "loss") == pytest.approx(wanted, rel=0, abs=rounding)


# ----------------------------------------------------------------------------------------------------------------------
# Streams


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Flags of a run on four shards to train on, of 9 to 12 images, and one to score."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    for count, name in zip((9, 10, 11, 12, 15), ("train-0", "train-1", "train-2", "train-3", "val-0"), strict=True):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for index in range(count):
                label = index % 3
                color = np.array([200 if channel == label else 60 for channel in range(3)])
                picture = np.clip(color + rng.normal(0, 60, (14, 14, 3)), 0, 255).astype(np.uint8)
                content = BytesIO()
                Image.fromarray(picture).save(content, "PNG")
                for suffix, held in (("png", content.getvalue()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{name}_{index}.{suffix}")
                    member.size = len(held)
                    tar.addfile(member, BytesIO(held))
    (folder / "names.txt").write_text("red\ngreen\nblue\n")
    return [
        "--dataset_name", folder, "--label_names", folder / "names.txt", "--streaming", "true", "--shuffle_buffer", 16, "--preset",
        "tiny-patch16-224", "--config_overrides", f"image_size=14,{TINY}", "--max_train_steps", 20, "--eval_steps", 5,
        "--log_steps", 1, "--checkpointing_steps", 10, "--mixed_precision", "no",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def stream_alone(stream, runs):
    one(runs / "stream-alone", *stream, "--per_device_train_batch_size", 8)
    return runs / "stream-alone"


@pytest.fixture(scope="module")
def stream_together(stream, runs):
    two(runs / "stream-together", *stream, "--per_device_train_batch_size", 4)
    return runs / "stream-together"


def test_two_processes_train_on_a_stream_as_one_does(stream_alone, stream_together):
    assert len(seen(stream_alone)) == 20
    assert seen(stream_together) == seen(stream_alone)
    assert_same_course(stream_together, stream_alone)


def test_each_process_reads_only_its_own_shards_of_a_stream(stream_alone, stream_together):
    first, second = map(set, noted(stream_together, "shard"))
    assert (len(first), len(second), first & second) == (2, 2, set())
    assert [set(shards) for shards in noted(stream_alone, "shard")] == [first | second]


def test_one_process_goes_on_with_a_stream_where_two_stopped(stream, stream_alone, stream_together, runs):
    run = interrupted(stream_together, 10, runs / "stream-then-one")
    one(run, *stream, "--per_device_train_batch_size", 8)
    assert seen(run) == seen(stream_alone)[10:]
    assert_same_course(run, stream_alone)


# ----------------------------------------------------------------------------------------------------------------------
# Several machines


@pytest.fixture(scope="module")
def nodes(runs):
    """A run on two machines: the second one was told to stop after 12 steps, and then both were started again."""
    flags = ["--per_device_train_batch_size", TOGETHER // 2]
    two_nodes(runs / "nodes", *flags, code=1, TERM_AT="1:12")  # torchrun makes a 1 of all but 0
    assert [path.name for path in (runs / "nodes" / "checkpoints").iterdir()] == ["step-000012"]
    two_nodes(runs / "nodes", *flags)
    return runs / "nodes"


def test_two_machines_train_as_one_process_does_and_go_on_from_the_disk_of_the_first(alone, nodes):
    assert results_of(nodes)["resumed_at_steps"] == [12]
    assert seen(nodes) == seen(alone)
    assert_same_course(nodes, alone)


def test_the_second_machine_writes_nothing(nodes):
    place = nodes.with_name(f"{nodes.name}-of-second-node")
    assert not place.exists() or list(place.rglob("*")) == []


# ----------------------------------------------------------------------------------------------------------------------
# What befalls one process


@pytest.fixture(scope="module")
def shaken(runs):
    """Flags of a run whose second process met a NaN in step 3 and was told to stop in step 6; its folder; what was printed."""
    flags = ["--max_train_steps", 9, "--per_device_train_batch_size", TOGETHER // 2]
    return flags, runs / "shaken", two(runs / "shaken", *flags, code=75, NAN_AT="1:3", TERM_AT="1:6")


def test_a_signal_to_one_process_stops_both_after_the_same_step_and_the_same_command_finishes(shaken):
    flags, run, printed = shaken
    assert "after step 6" in printed[0]
    assert [len(ids) for ids in noted(run, "ids")] == [6, 6]
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-000006"]
    assert not (run / "results.json").exists()
    two(run, *flags)
    assert results_of(run)["resumed_at_steps"] == [6]
    assert [len(ids) for ids in noted(run, "ids")] == [9, 9]
    assert results_of(run)["skipped_steps"] == [3]


def test_a_nan_in_one_process_skips_the_step_in_both(shaken):
    _, run, _ = shaken
    state = json.loads((run / "checkpoints" / "step-000006" / "state.json").read_text())
    assert state["skipped_steps"] == [3]
    for part in ("model", "average", "optimizer"):
        for name, tensor in load_file(run / "checkpoints" / "step-000006" / f"{part}.safetensors").items():
            assert tensor.isfinite().all(), name
    (skipped,) = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "skipped" in line]
    assert len(set(json.loads(skipped)["rows"])) == TOGETHER


def test_an_error_of_the_main_process_ends_both_with_one_sentence(alone):
    before = sorted(path.relative_to(alone) for path in alone.rglob("*"))
    printed = two(alone, "--per_device_train_batch_size", TOGETHER // 2, "--seed", 1, code=1)
    errors = [line for text in printed for line in text.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "seed was 0 and is 1" in errors[0]
    assert sorted(path.relative_to(alone) for path in alone.rglob("*")) == before


# ----------------------------------------------------------------------------------------------------------------------
# The launchers' files


@pytest.mark.parametrize("file", sorted(LAUNCHERS.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_knows_every_key_of_a_launchers_file(file):
    config = load_config_from_file(str(file))
    options = launch_command_parser()._option_string_actions
    assert [key for key in config.fsdp_config or {} if f"--{key}" not in options] == []


@pytest.mark.parametrize(("norm_first", "layer"), [(True, "HFViTLayer"), (False, "HFViTPostNormLayer")])
def test_a_model_whose_layers_are_of_another_class_is_sharded_by_those(tiny_fields, norm_first, layer):
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=["HFViTLayer"])
    model = HFViTForImageClassification(HFViTConfig(**tiny_fields, norm_first=norm_first))
    shard_by_layer(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)
    assert plugin.transformer_cls_names_to_wrap == [layer]


def test_processes_that_do_not_find_each_other_are_refused(tmp_path):
    """A launch file for GPUs, on a machine that has none."""
    printed = two(tmp_path / "run", ACCELERATE_USE_CPU="false", code=1)
    assert "2 processes were launched, but they found no GPU" in printed[0]
    assert not (tmp_path / "run").exists()
