"""Memory and work of a training step and of inference, by model size and batch: computed, not measured on a GPU.

Steps run on fake tensors, which have shapes and no data (`FakeTensorMode`), while `PeakMemory` adds up what is alive: weights,
gradients, AdamW's moments, activations and one batch. Matrix products are in bfloat16 by autocast, and attention keeps
what a fused kernel keeps. To check the method, one real step of a small model runs on this CPU beside its computed one.
"""

import contextlib
import json
import tempfile
import weakref
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers.initialization import no_init_weights

from hf_vit import HFViTConfig, HFViTForImageClassification
from hf_vit.training.losses import classification_loss, soft_targets
from hf_vit.training.model import add_lora, freeze
from hf_vit.training.optimizers import build_optimizers


SIZES = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}
BATCHES = (32, 256)
WAYS = ("full", "checkpointing", "lora", "head", "inference")
CHECKED = ("Ti", 4)  # size and batch of the real steps


class PeakMemory(TorchDispatchMode):
    """Bytes of some tensors, and of those that operations make until they are freed: `current`, and the most of it, `peak`."""

    def __init__(self, tensors):
        super().__init__()
        self.current = self.peak = 0
        self.storages = WeakIdKeyDictionary()  # those that are counted
        self.count(tensors)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.count(value for value in tree_leaves(made) if isinstance(value, torch.Tensor))
        return made

    def count(self, tensors):
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage not in self.storages:
                self.storages[storage] = size = storage.nbytes()
                self.current += size
                weakref.finalize(storage, self.free, size)
        self.peak = max(self.peak, self.current)

    def free(self, size: int):
        self.current -= size


def build_model(config: HFViTConfig, way: str):
    """A classifier with weights of any value, as train.py prepares it for this way."""
    with no_init_weights():
        model = HFViTForImageClassification(config)
    if way == "lora":
        model = add_lora(model, rank=8, alpha=16.0, dropout=0.0)
    if way == "checkpointing":
        model.activation_checkpointing_enable({"use_reentrant": False})
    freeze(model, backbone=way == "head", layers=0)
    return model


def run_steps(model, batch: int, way: str):
    """A training step as train.py takes it, with AdamW's moments made before; or a forward pass as eval.py's."""
    if way == "inference":
        with torch.no_grad():
            forward(model.eval(), batch)
        return
    (optimizer,) = build_optimizers(model, "adamw", 1e-3, 0.05, (0.9, 0.999))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    targets = soft_targets(torch.zeros(batch, dtype=torch.long), model.config.num_labels, 0.1)
    classification_loss(forward(model.train(), batch), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def forward(model, batch: int) -> torch.Tensor:
    """Logits (batch, L) of images that are made here, as a batch of train.py is."""
    config = model.config
    pixel_values = torch.zeros(batch, config.num_channels, config.image_size, config.image_size)
    with torch.autocast("cpu", torch.bfloat16):
        return model(pixel_values).logits


def computed_peak(config: HFViTConfig, batch: int, way: str) -> int:
    """The most bytes that tensors take at once, from their shapes alone."""
    model, fake = build_model(config, way), FakeTensorMode()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(fake.from_tensor(weight.detach()), weight.requires_grad))
    with fake, PeakMemory(model.parameters()) as memory:
        run_steps(model, batch, way)
    return memory.peak


def allocated_peak(config: HFViTConfig, batch: int, way: str) -> int:
    """The same of real tensors: the most bytes that PyTorch's allocator gave out, as its profiler saw it."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run_steps(build_model(config, way), batch, way)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    events = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in events]
    return max(totals) - (totals[0] - events[0]["args"]["Bytes"])  # what earlier profiles left


def flops_per_image(config: HFViTConfig, training: bool, make=HFViTForImageClassification) -> int:
    """Multiplications and additions of one image, of a forward pass or of a full training step of the model `make(config)`."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = make(config).train(training)
        model.set_attn_implementation("eager")  # as many, and each a product that is counted
        with contextlib.nullcontext() if training else torch.no_grad():
            logits = model(torch.zeros(1, config.num_channels, config.image_size, config.image_size)).logits
        if training:
            logits.sum().backward()
    return counter.get_total_flops()


def measure(repeats: int) -> dict:
    """Peaks of each size, batch and way, and work per image; nothing varies, so `repeats` is not used."""
    rows, work = [], []
    configs = {name: HFViTConfig.from_preset(f"{size}-patch16-224", num_labels=1000) for name, size in SIZES.items()}
    for name, config in configs.items():
        for batch in BATCHES:
            rows.append({"model": name, "batch": batch, **{way: computed_peak(config, batch, way) for way in WAYS}})
            print(json.dumps(rows[-1]), flush=True)
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in HFViTForImageClassification(config).parameters())
        flops = {kind: flops_per_image(config, kind == "step") for kind in ("forward", "step")}
        work.append({"model": name, "parameters": parameters, **flops})
    name, batch = CHECKED
    checks = [
        {
            "way": way,
            "computed": computed_peak(configs[name], batch, way),
            "allocated": allocated_peak(configs[name], batch, way),
        }
        for way in WAYS
    ]
    return {"rows": rows, "work": work, "checked": {"model": name, "batch": batch, "ways": checks}}
