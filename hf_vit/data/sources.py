"""What `--dataset_name` names is what is read: a data set of the Hub, a folder with a data set, a folder of images, or a table."""

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

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

from hf_vit.data.columns import label_feature
from hf_vit.data.folders import (
    READABLE,
    TABLE_SUFFIXES,
    Listing,
    class_folders,
    command,
    folder_error,
    list_folder,
    suffix_of,
)
from hf_vit.data.image_files import AllowedFiles, hub_files, restrict_files
from hf_vit.data.tables import divide_by_split, read_table
from hf_vit.system.errors import UserError
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.system.recipes_folder import EMBEDDED
from hf_vit.system.text import as_license, listed


FILE_FORMATS = (".parquet", ".arrow", ".tar")  # that `datasets` reads
METADATA = {"metadata.csv", "metadata.jsonl", "metadata.parquet"}  # beside images
HUB_SECONDS = 10  # that the Hub may take to answer


@dataclass
class Source:
    """What a name stands for.

    Args:
        splits: rows with undecoded images, restricted to the files of the data set (`image_files.AllowedFiles`).
        name: as the user gave it.
        origin: the folder that a split was read from, where that is not `name`.
        skipped: what lies there and is not used, and why, a phrase each.
    """

    splits: DatasetDict | IterableDatasetDict
    name: str
    origin: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def open_source(args, streaming: bool = False) -> Source:
    """What --dataset_name, --dataset_config, --image_column and --class_level name."""
    return read_source(args.dataset_name, args.dataset_config, streaming, args.image_column, args.class_level)


def load_splits(name: str, *how, **options) -> DatasetDict | IterableDatasetDict:
    """The splits of `read_source`."""
    return read_source(name, *how, **options).splits


def read_source(
    name: str,
    config: str | None = None,
    streaming: bool = False,
    image_column: str | None = None,
    class_level: int | None = None,
) -> Source:
    """Reads one of four kinds of data, see `folders.READABLE`.

    Args:
        config: the configuration of a data set that has several.
        streaming: read during training, without a local copy.
        image_column: of a table, the column of paths.
        class_level: of a folder of images, which folder below the split is the class.

    Raises:
        UserError: if there is no such data, or it cannot be read.
    """
    if not name:
        raise UserError(f"--dataset_name is empty\n{READABLE}")
    path = EMBEDDED.get(name, Path(name).expanduser())
    found = list_folder(path) if path.is_dir() and not is_saved_data_set(path) else None
    is_of_files = path.is_file() or (found is not None and not holds_data_set(found))
    if is_of_files and streaming:
        raise UserError(
            f"--streaming: the images of {path} are files, which are read when they are needed: leave it out"
        )
    if found and is_of_files:
        splits, origin, skipped = class_folders(found, 1 if class_level is None else class_level)
        return Source(
            splits, name, origin, skipped + [f"a table, which is read by {table}" for table in found.tables()[:1]]
        )
    if class_level is not None:
        raise UserError(f"--class_level {class_level} is for a folder of images, which {name} is not: leave it out")
    if found:
        splits, skipped = read_data_folder(found, config, streaming)
        return Source(splits, name, skipped=skipped)
    if is_of_files:
        if suffix_of(path.name) not in TABLE_SUFFIXES:
            what = f"{path} is not a data set: a file that holds images is read by the name of its folder"
            raise UserError(f"{what}\n{READABLE}")
        return Source(divide_by_split(read_table(path, image_column)), name)
    if path.exists():
        saved = read_with_datasets(str(path), str(path), read=load_from_disk)
        splits = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        return Source(restrict_files(splits, AllowedFiles(str(path.resolve()))), name)
    refuse_mistyped_path(name, "--dataset_name")
    return Source(restrict_files(read_hub(name, config, streaming), hub_files(name)), name)


def read_hub(name: str, config: str | None, streaming: bool):
    """A data set of the Hub, or its copy in the cache of `datasets` if the Hub cannot be reached.

    The Hub is asked once whether it has the data set: `datasets` would go on trying for half a minute.
    """
    missing, unreachable = f"--dataset_name {name}: {Path(name).absolute()} does not exist", None
    was_offline = datasets_config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        advice = "Check the spelling; a private data set needs `hf auth login`"
        raise UserError(f"{missing}, and the Hub has no data set {name} that you may read. {advice}") from error
    except (HTTPError, OSError) as error:
        unreachable = error
    if unreachable:
        missing += f", the Hub cannot be reached ({unreachable}), and its cache has no copy"
    try:
        datasets_config.HF_HUB_OFFLINE = was_offline or unreachable is not None
        return read_with_datasets(missing if unreachable else name, name, config, streaming=streaming)
    finally:
        datasets_config.HF_HUB_OFFLINE = was_offline


def read_with_datasets(where: str, *what, read=load_dataset, **how):
    """What a function of `datasets` reads; UserError if it fails, whatever it raises."""
    try:
        return read(*what, **how)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"{where} cannot be read as a data set: {reason}") from error


def is_saved_data_set(path: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def data_files(found: Listing) -> list[str]:
    """The files of a folder that `datasets` reads: Parquet and Arrow, and tar files where there are no images."""
    suffixes = (".parquet", ".arrow") if found.images else FILE_FORMATS
    return [file for file in found.files if suffix_of(file) in suffixes and Path(file).name not in METADATA]


def holds_data_set(found: Listing) -> bool:
    """Whether a folder has `data_files`, or images that a metadata file describes; UserError for data files beside folders of
    images."""
    files, folders = data_files(found), [folder for folder in found.images if folder]
    if files and folders:
        advice = f"{command((found.path / files[0]).parent)}, or move {files[0]} away"
        raise folder_error(found, f"{listed(files)} lies beside folders of images ({listed(folders)})", advice)
    return bool(files or (found.images and METADATA & {Path(file).name for file in found.files}))


def read_data_folder(found: Listing, config: str | None, streaming: bool):
    """A folder as `datasets` reads it, and what it leaves out, a phrase each.

    Raises:
        UserError: if it cannot be read, or its Parquet files name the classes differently: `datasets` would read them all by the
            names of the first.
    """
    path, files = str(found.path.resolve()), data_files(found)
    if not files:
        where = f"{path} (by its metadata, where file_name names each image)"
        splits = read_with_datasets(where, "imagefolder", data_dir=path, streaming=streaming)
        return restrict_files(splits, AllowedFiles(path)), found.skipped()
    splits = read_with_datasets(path, path, config, streaming=streaming)
    read = list(chain(*(load_dataset_builder(path, config).config.data_files or {}).values()))
    of_classes = {class_labels(file): file for file in read if suffix_of(file) == ".parquet"}
    if len(of_classes) > 1:
        first, second, *_ = of_classes.values()
        raise UserError(f"{first} and {second} have other class names, or in another order: write them with the same")
    unread = sorted({f"{path}/{file}" for file in files} - set(read)) if config is None else []
    skipped = [f"{listed(unread)}: neither name nor folder says train, validation or test"] if unread else []
    return restrict_files(splits, AllowedFiles(path)), skipped


def class_labels(file: str) -> str:
    """The ClassLabels of a Parquet file, with their names."""
    features = Features.from_arrow_schema(pq.read_schema(file))
    return str([kind for kind in features.values() if isinstance(label_feature(kind), ClassLabel)])


def dataset_license(name: str) -> str | None:
    """The licence in the data set's card (README.md in its folder or on the Hub); None if there is none."""
    path = EMBEDDED.get(name, Path(name).expanduser())
    try:
        card = DatasetCard.load(path / "README.md" if path.exists() else name)
    except (OSError, ValueError, YAMLError):  # no data set, no card, one that cannot be read, or no connection
        return None
    return as_license(card.data.to_dict().get("license"))


def refuse_nested_folders(name: str, output_dir: str):
    """Raises UserError if the run folder lies in the data folder: pictures of the run would be read as data."""
    data = Path(name).expanduser().resolve()
    if name not in EMBEDDED and data.is_dir() and Path(output_dir).resolve().is_relative_to(data):
        what = f"--output_dir {output_dir} lies in --dataset_name {name}, whose images its pictures would become"
        raise UserError(f"{what}: name a folder beside the data, such as runs/{data.name}")
