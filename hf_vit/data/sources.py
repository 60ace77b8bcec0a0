"""Loads data sets from the Hub, local folders, data files and tables: splits of rows whose images are not yet decoded."""

import glob
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import (
    ClassLabel,
    DatasetDict,
    Features,
    IterableDatasetDict,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets import config as datasets_config
from huggingface_hub import DatasetCard, HfApi
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError
from yaml import YAMLError

from hf_vit.data.columns import ROW, holds_images, label_feature
from hf_vit.data.folder_layout import (
    SPLIT_OF_WORD,
    FolderScan,
    class_folder_names,
    counted,
    image_folder_splits,
    listed,
    scan_folder,
)
from hf_vit.data.image_files import AllowedFiles, hub_files, restrict_files
from hf_vit.data.splits import EVAL_SPLITS
from hf_vit.data.table_files import TABLE_FORMATS
from hf_vit.data.tables import (
    cast_paths_to_images,
    divide_rows,
    find_tables,
    has_metadata,
    load_tables,
    root_files,
    split_files,
)
from hf_vit.system.errors import UserError
from hf_vit.system.escapes import as_license
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.system.progress import warn
from hf_vit.system.recipes_folder import EMBEDDED


FILE_FORMATS = {".parquet": "parquet", ".arrow": "arrow", **TABLE_FORMATS, ".tar": "webdataset"}
SHARDS = 64  # of a list of files that is read as a stream
HUB_SECONDS = 10  # that the Hub may take to answer


def load_splits(
    name: str, config: str | None = None, streaming: bool = False, label_column: str | None = None
) -> DatasetDict | IterableDatasetDict:
    """The splits of a data set, their images undecoded and restricted to its own files (`image_files.AllowedFiles`).

    Args:
        name: a Hub id; a local folder (class folders of images, Parquet files, WebDataset tar shards, CSV tables named after
            their split, `save_to_disk`); a Parquet, Arrow, CSV, JSON or tar file; or the name of an embedded data set. Tables
            name image files in or below their own folder.
        config: the configuration of a Hub data set that has several.
        streaming: read during training, without a local copy.
        label_column: --label_column or --label_columns: a table with these columns beside class folders is the data set.

    Raises:
        ValueError: if the data does not exist or cannot be read.
    """
    if not name:
        raise UserError("--dataset_name is empty: wanted a folder, a file or a data set of the Hub")
    path = EMBEDDED.get(name, Path(name).expanduser())
    if name in EMBEDDED and not path.is_dir():
        raise UserError(f"{name} lies in recipes/data of the repository, which is not beside this installation")
    if not path.exists():
        refuse_mistyped_path(name, "--dataset_name")
        return restrict_files(_load_from_hub(name, config, streaming), hub_files(name))
    path = path.resolve()  # `datasets` resolves the paths of the files it finds
    if path.is_file():
        return _load_files([path], streaming)
    return _load_folder(path, config, streaming, label_column)


def dataset_license(name: str) -> str | None:
    """The licence in the data set's card (README.md in its folder or on the Hub); None if there is none."""
    path = EMBEDDED.get(name, Path(name).expanduser())
    try:
        if not path.exists():
            card = DatasetCard.load(name)
        elif (text := (path / "README.md").read_text(encoding="utf-8")).startswith("---"):
            card = DatasetCard(text)
        else:
            return None
    except (
        OSError,
        ValueError,
        YAMLError,
    ):  # no such data set, no card, an unreadable card, or no connection to the Hub
        return None
    return as_license(card.data.to_dict().get("license"))


def _load_from_hub(name: str, config: str | None, streaming: bool):
    """A data set of the Hub, or its copy in the cache of `datasets` if the Hub cannot be reached.

    The Hub is asked once whether it has the data set: `datasets` would go on trying for half a minute.
    """
    missing, unreachable = f"--dataset_name {name}: there is no such folder or file here ({Path.cwd()})", None
    was_offline = datasets_config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{missing}, and the Hub has no data set {name} that you may read: name a folder or file that is there, or "
            "USER/NAME on the Hub; a private data set needs `hf auth login`"
        ) from error
    except (HTTPError, OSError) as error:
        unreachable = error
    try:
        datasets_config.HF_HUB_OFFLINE = was_offline or unreachable is not None
        return load_dataset(name, config, streaming=streaming)
    except OSError as error:
        why = (
            f"cannot be reached ({unreachable}), and its cache has no copy"
            if unreachable
            else f"does not give it: {error}"
        )
        raise UserError(
            f"{missing}, and the Hub {why}: name a folder or file that is there, or USER/NAME on the Hub"
        ) from error
    finally:
        datasets_config.HF_HUB_OFFLINE = was_offline


def refuse_nested_folders(name: str, output_dir: str):
    """Raises ValueError if the run folder lies in the data folder, or the data folder in it: pictures and checkpoints of the run
    would be read as data."""
    data, run = Path(name).expanduser().resolve(), Path(output_dir).resolve()
    if name in EMBEDDED or not data.is_dir() or not (run.is_relative_to(data) or data.is_relative_to(run)):
        return
    inner, outer = ("--output_dir", "the data") if run.is_relative_to(data) else ("the data", "--output_dir")
    raise UserError(
        f"--dataset_name {name} and --output_dir {output_dir}: {inner} lies in the folder of {outer}, so that pictures of the run "
        f"would become images to train on; name an --output_dir beside the data, such as runs/{data.name}"
    )


def is_saved_data_set(path: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def _load_folder(path: Path, config: str | None, streaming: bool, label_column: str | None):
    """A folder written by `save_to_disk`, of tar shards, of tables, or of images."""
    if is_saved_data_set(path):
        saved = load_from_disk(str(path))
        splits = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        return restrict_files(splits, AllowedFiles(str(path)))
    scan = scan_folder(path)
    metadata, reasons = has_metadata(scan), ""
    if scan.images:
        splits, unused = find_tables(scan, metadata, label_column)
        if unused:
            files_of = defaultdict(list)
            for name, reason in unused.items():
                files_of[reason].append(name)
            reasons = "; ".join(f"{listed(names)} is not used: {reason}" for reason, names in files_of.items())
            warn(f"{path}: {reasons}")
        if splits is not None:
            return _as_stream(splits) if streaming else splits
    elif files := root_files(scan, [".tar"]) or root_files(scan, [".csv", ".tsv"]):
        return _load_files(files, streaming)
    if not scan.images and not scan.data_files:
        found = scan.count_unread() or counted(scan.others)
        linked = f"; links to folders are not followed: {listed(sorted(scan.links))}" if scan.links else ""
        raise UserError(
            f"{path} holds {f'{found} files and no image that is read' if found else 'no files'}; wanted a folder per class "
            f"of .jpg, .png, .webp, .gif, .bmp or .tiff files, or Parquet, CSV or tar files{linked}"
        )
    if config is None and scan.images and not (metadata or _describes_its_files(scan)):
        splits = image_folder_splits(scan)
        classes = next(iter(splits.values())).features["label"].names
        if reasons and len(classes) == 1:
            raise UserError(
                f"{path}: the images are all in one folder, {classes[0]}, and no table says their labels: {reasons}; wanted a folder "
                "per class, or a table of paths and labels"
            )
        return _as_stream(splits) if streaming else splits
    splits = _load_with_datasets(scan, config, streaming, lists_files=not metadata)
    first = next(iter(splits.values()))
    if first.info.builder_name == "imagefolder" and not metadata and scan.images:
        feature = label_feature((first.features or {}).get("label"))
        classes = f": {listed(feature.names, 10)}" if isinstance(feature, ClassLabel) else ""
        warn(f"{path}: images are read as `datasets` finds them, by their innermost folders{classes}")
    one_column = sum(map(holds_images, (first.features or {}).values())) == 1
    unnamed = 0 if streaming or not (metadata and one_column) else scan.count() - sum(map(len, splits.values()))
    if unnamed > 0:
        warn(f"{path}: {unnamed:,} images that no metadata file names are left out")
    return splits


def _describes_its_files(scan: FolderScan) -> bool:
    """Whether a folder with images holds what `datasets` reads rather than class folders: Parquet or Arrow files of more images,
    or a README.md of the Hub whose configurations name files. A warning names Parquet and Arrow files that are left alone."""
    if files := sorted(file for file in scan.data_files if file.endswith((".parquet", ".arrow"))):
        in_files, in_folders = sum(_count_images(scan.path / file) for file in files), scan.count()
        if in_files >= in_folders or not class_folder_names(scan):
            return True
        holding = f"{in_files:,} images, the class folders {in_folders:,}" if in_files else "no images"
        warn(f"{scan.path}: {listed(files)} are left alone: they hold {holding}")
    return _card_names_files(scan.path)


def _card_names_files(path: Path) -> bool:
    """Whether a folder has a README.md of the Hub whose configurations name files."""
    card = path / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = text.split("\n---")[0] if text.startswith("---") else ""
    return re.search(r"^configs:(\n[ -].*)*\n[ -]+(data_files|data_dir):", head, re.MULTILINE) is not None


def _count_images(file: Path) -> int:
    """The rows of a Parquet or Arrow file with a column of images; 0 if it has none, or cannot be read."""
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as table:
                schema, count = table.schema_arrow, table.metadata.num_rows
        else:
            with pa.memory_map(str(file)) as opened:
                table = pa.ipc.open_stream(opened).read_all()
            schema, count = table.schema, table.num_rows
        return count if any(map(holds_images, Features.from_arrow_schema(schema).values())) else 0
    except (pa.ArrowException, OSError, ValueError):
        return 0


def _load_files(files: list[Path], streaming: bool):
    """Data files of one format, in the splits that their names say."""
    suffix = files[0].suffix.lower()
    if suffix not in FILE_FORMATS:
        raise UserError(f"{files[0]} is no data file; wanted one of {', '.join(FILE_FORMATS)}, or a folder of images")
    if suffix in TABLE_FORMATS:
        return _as_stream(load_tables(files)) if streaming else load_tables(files)
    kind, files_of_split = FILE_FORMATS[suffix], split_files(files)
    escaped = {split: [glob.escape(str(file)) for file in of_split] for split, of_split in files_of_split.items()}
    try:
        splits = load_dataset(kind, data_files=escaped, streaming=streaming)
    except Exception as error:  # each format raises its own
        names = ", ".join(file.name for file in files[:3])
        raise UserError(f"{files[0].parent}: {names} cannot be read as {kind}: {error.__cause__ or error}") from error
    splits = splits if kind == "webdataset" else divide_rows(cast_paths_to_images(splits))
    return restrict_files(splits, AllowedFiles(str(files[0].parent)))


def _as_stream(splits: DatasetDict) -> IterableDatasetDict:
    """The list of the files is small, what is in them is not."""
    streams = IterableDatasetDict()
    for name, rows in splits.items():
        if name.lower() not in EVAL_SPLITS:  # in an order without classes, and in parts that processes can share out
            rows = rows.add_column(ROW, np.arange(len(rows))).shuffle(seed=0).flatten_indices()
        streams[name] = rows.to_iterable_dataset(num_shards=min(SHARDS, max(1, len(rows))))
    return streams


def _load_with_datasets(scan: FolderScan, config: str | None, streaming: bool, lists_files: bool):
    """Parquet files, archives, or images that a metadata file or a card describes, as `datasets` finds them.

    Args:
        lists_files: whether paths of images come from listing the folder, and not from a metadata file.
    """
    path = scan.path
    folders = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith((".", "__"))]
    are_splits = folders and all(folder.name.lower() in SPLIT_OF_WORD for folder in folders)
    try:
        if are_splits and any(folder.name != folder.name.lower() for folder in folders):  # it knows no "Train"
            files_of_split = defaultdict(list)
            for folder in folders:
                files_of_split[SPLIT_OF_WORD[folder.name.lower()]].append(f"{glob.escape(str(folder))}/**")
            splits = load_dataset("imagefolder", data_files=dict(files_of_split), streaming=streaming)
        elif any(file.endswith(".parquet") for file in scan.data_files):
            splits = _load_parquet(scan, config, streaming)
        else:
            splits = load_dataset(str(path), config, streaming=streaming)
    except Exception as error:  # each format raises its own
        if archives := sorted(str(file) for file in path.rglob("*.zip")):
            raise UserError(f"{path} holds {listed(archives)}, which cannot be read as it is: unpack it") from error
        raise UserError(f"{path} cannot be read as a data set: {error.__cause__ or error}") from error
    if next(iter(splits.values())).info.builder_name in ("parquet", "arrow"):
        splits = divide_rows(cast_paths_to_images(splits))
    links = lists_files and next(iter(splits.values())).info.builder_name == "imagefolder"
    return restrict_files(splits, AllowedFiles(str(path), links=links))


def _load_parquet(scan: FolderScan, config: str | None, streaming: bool):
    """A folder with Parquet files, as `datasets` finds them. It reads all splits by the ClassLabels of the first: where a split
    has others, each split is read on its own. A line names files that it does not read.

    Raises:
        ValueError: if files of one split have different ClassLabels.
    """
    path = str(scan.path)
    builder = load_dataset_builder(path, config)
    files_of = (builder.config.data_files or {}) if builder.info.builder_name == "parquet" else {}
    read = {str(file) for files in files_of.values() for file in files}
    unread = [file for file in scan.data_files if file.endswith(".parquet") and str(scan.path / file) not in read]
    if read and unread and config is None and not _card_names_files(scan.path):
        advice = "their names and folders say no split; write train, validation or test into them"
        warn(f"{path}: {listed(sorted(unread))} are not read: {advice}")
    classes_of = {}
    for split, files in files_of.items():
        for file in files:
            classes = _class_names(file)
            if classes_of.setdefault(split, classes) != classes:
                raise UserError(
                    f"{file} has other class names, or in another order, than {files[0]} of the same split {split}: wanted the "
                    "same in all files of a split; write them anew, or under names of two splits"
                )
    if all(classes == next(iter(classes_of.values())) for classes in classes_of.values()):
        return load_dataset(path, config, streaming=streaming)
    splits = {
        str(split): load_dataset("parquet", data_files={str(split): list(files)}, streaming=streaming)[str(split)]
        for split, files in files_of.items()
    }
    return IterableDatasetDict(splits) if streaming else DatasetDict(splits)


def _class_names(file: str) -> dict[str, list[str]]:
    """The class names of each column of a Parquet file that has a ClassLabel."""
    kinds = Features.from_arrow_schema(pq.read_schema(file))
    return {
        name: label_feature(kind).names for name, kind in kinds.items() if isinstance(label_feature(kind), ClassLabel)
    }
