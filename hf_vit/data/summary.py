"""What a run has read, in a line for each split, before anything is trained."""

from datasets import Dataset, IterableDataset, Value

from hf_vit.data.columns import count_labels, label_tensor
from hf_vit.data.sources import Source
from hf_vit.system.text import counted, listed, printable


CLASSES = 10  # that a line names


def summary(
    splits: dict[str, Dataset | IterableDataset], split_names: dict[str, str], labels: list[str], source: Source
) -> list[str]:
    """Lines such as `train: 1,234 images, 3 classes (cat 500, dog 500, eel 234), from photos/train`, and what is left out.

    Args:
        splits: rows with the encoded column `label`, or without labels.
        split_names: what each split is called; "part of train" was held out of it.
        labels: the names of the classes.
    """
    lines, used = [], set()
    for key, rows in splits.items():
        name = split_names[key].removeprefix("part of ")
        used.add(name)
        what = "a stream" if isinstance(rows, IterableDataset) else counted(len(rows), "image")
        if labels and isinstance(rows, Dataset):
            counts = count_labels(label_tensor(rows), len(labels)).tolist()
            shown = (f"{label} {count:,}" for label, count in zip(labels, counts, strict=True))
            what += f", {len(labels):,} classes ({listed(shown, CLASSES)})"
        elif isinstance(rows, Dataset) and rows.features.get("label") == Value("float32"):
            numbers = label_tensor(rows)
            what += f", numbers from {numbers.min():g} to {numbers.max():g}, mean {numbers.mean():g}"
        lines.append(f"{split_names[key]}: {what}, from {source.origin.get(name, source.name)}")
    unused = [f"the split {name}" for name in source.splits if name not in used]
    return [printable(line) for line in lines + [f"left out: {phrase}" for phrase in unused + source.skipped]]
