"""What may have changed since a run was started last, though its configuration is the same: code, libraries, teacher, images."""

import hashlib
from importlib.metadata import version

import numpy as np
import torch

from hf_vit.data.image_files import allowed_files, read_image_bytes
from hf_vit.system.environment import environment_info


NUM_IMAGES = 256  # of a split, whose bytes are looked at


def life(step: int, device_type: str, processes: int, precision: str, teacher, splits: dict) -> dict:
    """One start of a run, as `state.json` and `results.json` list them under `lives`: its first step, commit, hardware and
    versions, and checksums of the teacher's weights (None without one) and of some images of each split.
    """
    now = environment_info(device_type, processes, precision)
    return {
        "from_step": step,
        **now,
        "versions": {**now["versions"], **{name: version(name) for name in ("numpy", "Pillow")}},
        "teacher": None if teacher is None else checksum_of_weights(teacher),
        "images": {name: checksum_of_images(rows) for name, rows in splits.items()},
    }


def checksum_of_weights(model) -> str:
    """SHA-256 of names and bytes of all weights."""
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        found.update(name.encode())
        found.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def checksum_of_images(rows) -> str:
    """SHA-256 of the bytes of 256 images, the same ones each time; of all, where there are no more.

    It sees another order, another encoding, and images that were replaced, if they are many: of a large set where one in a hundred
    is another, with a probability of 92% (1 - 0.99^256). Names, times and places of files do not matter.
    """
    found, files = hashlib.sha256(), allowed_files(rows)
    places = np.random.default_rng(0).permutation(len(rows))[:NUM_IMAGES].tolist()
    for row in rows.__getitems__(places):
        try:
            content = read_image_bytes(row["image"], files)
        except (OSError, ValueError):  # is stopped at or skipped where it is decoded
            content = b""
        found.update(hashlib.sha256(content).digest())
    return found.hexdigest()


def changes(before: dict, now: dict) -> list[str]:
    """What differs between two lives of a run and may change its result, a sentence each; nothing where one does not know."""
    said = []
    if None not in (before["commit"], now["commit"]) and before["commit"] != now["commit"]:
        said.append(f"the code of hf_vit was {before['commit']} and is {now['commit']}")
    versions = [
        f"{name} was {before['versions'][name]} and is {found}"
        for name, found in now["versions"].items()
        if before["versions"].get(name, found) != found
    ]
    if versions:
        said.append(", ".join(versions))
    if before["teacher"] != now["teacher"]:
        said.append("the teacher has other weights")
    said += [
        f"images of the split {name} have other contents"
        for name, found in now["images"].items()
        if before["images"].get(name, found) != found
    ]
    return said
