"""Tables of image files: which of a folder is the data set, what its rows name, and which split they belong to.

A table is a CSV, TSV, JSON or JSONL file whose rows name images in or below its own folder. What cannot be told for sure is an error,
or a warning that says what was done.
"""

import re
from collections import defaultdict
from pathlib import Path

from hf_vit.data.folder_layout import listed, split_of_name


# photos-0000, photos_1-of-8 or 0001; labels_v2 is another version of labels_v1, and no second part of it
NUMBERED = re.compile(r"(.*?)(?<![vV\d])\d+(-of-\d+)?")


def split_files(files: list[Path]) -> dict[str, list[Path]]:
    """Data files by split: a word of the name decides, as for folders. One file, or numbered files without such a word, are "train".

    Raises:
        ValueError: if some names have a split word and others none, or if files without one are not numbered.
    """
    if len(files) == 1:
        return {"train": files}
    files_of_split = defaultdict(list)
    for file in files:
        files_of_split[split_of_name(file.stem)].append(file)
    if unknown := files_of_split.pop(None, []):
        named = listed(file.name for file in unknown)
        if files_of_split:
            raise ValueError(
                f"{files[0].parent}: {named} are of no split, beside {listed(file.name for file in files if file not in unknown)}; "
                "wanted train, validation or test in each name: rename them, move them away, or name one file with --dataset_name"
            )
        numbered = [NUMBERED.fullmatch(file.stem) for file in unknown]
        if not all(numbered) or len({match[1] for match in numbered}) > 1:
            raise ValueError(
                f"{files[0].parent} holds several data sets, or the splits of one: {named}; wanted one, names such as train and "
                "test, or numbers (photos-0000, photos-0001): name one with --dataset_name, or rename them"
            )
        return {"train": unknown}
    return {split: files_of_split[split] for split in ("train", "validation", "test") if split in files_of_split}
