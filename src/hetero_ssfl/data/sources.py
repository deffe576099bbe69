"""Find and open image sources: known names, local folders or tables, and hub ids. Images are still encoded."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import DataConfig
from ..errors import DataError
from ..seeding import rng_for
from .medical import count_in_files, images_in_files, is_medical

Subset = Literal["train", "test", "all"]

HUB_IDS = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "tiny-imagenet": "zh-plus/tiny-imagenet"}
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
NO_LABELS = "none"  # as data.label_column
TEST_SPLITS = ("test", "valid", "validation")
MORE_SUFFIXES = (".avif", ".heic", ".heif")  # images, although the `datasets` library does not know them
SUFFIXES = (
    *MORE_SUFFIXES,
    ".bmp",
    ".gif",
    ".jp2",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tga",
    ".tif",
    ".tiff",
    ".webp",
)
TABLES = (".parquet", ".arrow")
DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
HUB_SECONDS = 5.0  # the longest wait for the answer whether a data set exists
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # files of the `datasets` library, next to images
# Every name by which the `datasets` library recognises a split in a folder of images contains one of these.
SPLIT_WORDS = ("train", "val", "dev", "test", "-of-")

log = logging.getLogger(__name__)


def fixed_fifth(count: int, split: str) -> Tensor:
    """Return the rows of a split for a source without a test split. They do not depend on the run's seed."""
    if split == "all":
        return torch.arange(count)
    order = torch.randperm(count, generator=rng_for(0, "test split"))
    is_test = torch.zeros(count, dtype=torch.bool)
    is_test[order[::5]] = True
    return torch.nonzero(is_test if split == "test" else ~is_test).flatten()


def locate(source: str) -> Path | str:
    """Return a local path if it exists (short names are looked up in HETERO_SSFL_DATA), otherwise a hub id."""
    folder = os.environ.get("HETERO_SSFL_DATA")
    if source in HUB_IDS:
        local = Path(folder, source) if folder else None
        return local if local and local.is_dir() else HUB_IDS[source]
    path = Path(source).expanduser()
    if path.exists():
        return path
    parts = source.split("/")
    looks_local = source.startswith((".", "~")) or Path(parts[0]).is_dir()
    if len(parts) == 2 and all(parts) and not looks_local:
        return source
    known = ", ".join(("digits", *HUB_IDS))
    raise DataError(f"no data at '{source}', expected {known}, a local path, or a hub id (owner/name). Check the path.")


def is_here(source: str) -> bool:
    """Tell whether a source is a known data set that is on this machine: reading it shows nothing of the machine."""
    return source == "digits" or (source in HUB_IDS and isinstance(locate(source), Path))


def same_source(one: str, other: str) -> bool:
    """Tell whether two names refer to the same source, even if they are spelled differently."""
    return _resolved(one) == _resolved(other)


def _resolved(source: str) -> Path | str:
    try:
        place = locate(source)
    except DataError:
        return source
    return place.resolve() if isinstance(place, Path) else place


@dataclass(frozen=True)
class Rows:
    """Encoded images (bytes or a path) and their labels, before decoding."""

    encoded: Callable[[], Iterable[Any]]
    count: int
    labels: list[int] | None
    classes: tuple[str, ...]


def open_rows(config: DataConfig, source: Path | str, split: Subset) -> Rows:
    """Open a split with the `datasets` library. A labeled source without a test split reserves a fifth for testing.

    `all` is every image of every split, in the order of the source and without labels.
    """
    import datasets

    datasets.disable_progress_bars()
    splits = _splits(datasets, source)
    train = splits.get("train", next(iter(splits.values())))
    test = next((splits[name] for name in TEST_SPLITS if name in splits and splits[name] is not train), None)
    if test is None and _column(train, config.label_column, LABEL_COLUMNS) is None:  # testing needs labels
        test = train.select([])
    elif test is None and split != "all":
        train, test = (train.select(fixed_fifth(len(train), part).tolist()) for part in ("train", "test"))
    if split == "all":
        table = datasets.concatenate_datasets(list(splits.values()))
    else:
        table = train if split == "train" else test
    label = None if split == "all" else _column(table, config.label_column, LABEL_COLUMNS)
    if label is None and split != "all" and config.label_column not in (None, NO_LABELS):
        raise DataError(f"'{source}' has no label column '{config.label_column}'. Change data.label_column.")
    labels, classes = _labels(source, label, table, (train, test)) if label else (None, ())
    encoded = _encoded(datasets, table, config, source)
    if not _has_scans(source):
        return Rows(encoded, len(table), labels, classes)
    files = [Path(file) for file in encoded()]
    counts = count_in_files(files, config)
    if labels is not None:
        labels = [label for label, count in zip(labels, counts, strict=True) for _ in range(count)]
    return Rows(lambda: images_in_files(files, counts, config), sum(counts), labels, classes)


def _encoded(datasets: Any, table: Any, config: DataConfig, source: Path | str) -> Callable[[], Iterator[Any]]:
    """Return a function that iterates over the images of a table: bytes, paths, or None for a missing one."""
    name = _column(table, config.image_column, IMAGE_COLUMNS)
    if name is None:
        expected, columns = config.image_column or " or ".join(IMAGE_COLUMNS), ", ".join(table.column_names)
        raise DataError(f"'{source}' has the columns {columns}, expected {expected}. Set data.image_column.")
    try:
        images = table.select_columns(name).cast_column(name, datasets.Image(decode=False))
    except Exception:  # Arrow raises a different exception for each type
        kind = table.features[name]
        raise DataError(f"column '{name}' of '{source}' holds {kind}, not images. Set data.image_column.") from None

    def encoded() -> Iterator[Any]:
        for row in images:
            yield row[name] and (row[name]["bytes"] or row[name]["path"])

    return encoded


def _labels(source: Path | str, column: str, table: Any, splits: Iterable[Any]) -> tuple[list[int], tuple[str, ...]]:
    """Return the number of each image's class, and the names of all classes, on which all splits agree."""
    values = list(table[column])
    if values and all(isinstance(value, str) for value in values):
        words = sorted({word for part in splits if column in part.column_names for word in part[column]})
        numbers = {word: number for number, word in enumerate(words)}
        return [numbers[value] for value in values], tuple(words)
    odd = [value for value in values if not isinstance(value, int) or value < 0]
    if odd:
        raise DataError(f"column '{column}' of '{source}' holds {odd[0]!r}, expected class numbers. Number them.")
    names = getattr(table.features[column], "names", None)
    return values, tuple(names or map(str, range(max(values, default=-1) + 1)))


def _column(table: Any, named: str | None, usual: tuple[str, ...]) -> str | None:
    if named == NO_LABELS:
        return None
    return next((name for name in ([named] if named else usual) if name in table.column_names), None)


def _splits(datasets: Any, source: Path | str) -> dict[str, Any]:
    try:
        if isinstance(source, str):
            _ask_hub(datasets, source)
            return dict(datasets.load_dataset(source))
        if _has_scans(source):
            return _scans(datasets, source)
        if any((source / name).exists() for name in DATASET_FILES):
            loaded = datasets.load_from_disk(str(source))
            return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if source.suffix == ".arrow":
            return {"train": datasets.Dataset.from_file(str(source))}
        if source.is_file() and source.suffix != ".parquet":
            raise DataError(f"'{source}' is one file, expected a folder, .parquet or .arrow. Name its folder.")
        files: dict[str, list[str]] = {}
        for table in [source] if source.is_file() else sorted(source.rglob("*.parquet")):
            name = next((name for name in TEST_SPLITS if table.stem.startswith(name)), "train")
            if table.name not in METADATA:
                files.setdefault(name, []).append(str(table))
        if files:
            return dict(datasets.load_dataset("parquet", data_files=files))
        names = (str(file.relative_to(source)) for file in _image_folder(source))
        # The library looks for splits with 64 patterns, and walks through the whole folder for each of them.
        may_have_splits = any(word in name for name in names for word in SPLIT_WORDS)
        patterns = None if may_have_splits else {"train": ["**"]}
        known = import_module("datasets.packaged_modules.imagefolder.imagefolder").ImageFolder.EXTENSIONS
        known += [suffix for suffix in MORE_SUFFIXES if suffix not in known]
        return dict(datasets.load_dataset("imagefolder", data_dir=str(source), data_files=patterns))
    except DataError:
        raise
    except Exception as error:  # the library raises many types; each means that this source is unusable
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        remedy = "Check the connection to the hub." if isinstance(source, str) else "Check that it holds images."
        raise DataError(f"cannot load '{source}': {reason}. {remedy}") from None


def _ask_hub(datasets: Any, source: str) -> None:
    """Ask the hub once whether it has this data set, unless an earlier download is in the cache.

    The id may be a mistyped path. `load_dataset` repeats its requests for half a minute before it fails.
    """
    from huggingface_hub import HfApi

    if Path(datasets.config.HF_DATASETS_CACHE, source.replace("/", "___")).is_dir():
        return
    try:
        HfApi().dataset_info(source, timeout=HUB_SECONDS)
    except Exception as error:  # not found, not a valid name, no network, HF_HUB_OFFLINE: the library raises many types
        short = next((name for name, hub_id in HUB_IDS.items() if hub_id == source), None)
        remedy = f"Put it into a folder '{short}' under HETERO_SSFL_DATA" if short else "Correct the path"
        raise DataError(
            f"there is no file or folder '{short or source}' here, and the Hugging Face hub did not find it "
            f"({type(error).__name__}). {remedy}, or check the id and the connection."
        ) from None


def image_files(source: Path) -> list[Path]:
    """Return the image files of a folder, or the one file; none for tables, which the `datasets` library reads."""
    files = files_of(source)
    if any(f.name in DATASET_FILES or (f.suffix in TABLES and f.name not in METADATA) for f in files):
        return []
    return [file for file in files if is_image(file) and not file.name.startswith(".")]


def _has_scans(source: Path | str) -> bool:
    return isinstance(source, Path) and any(is_medical(file) for file in image_files(source))


def _scans(datasets: Any, source: Path) -> dict[str, Any]:
    """Return the files of a folder with DICOM or NIfTI files by split: the `datasets` library would unpack .nii.gz, and
    take folders of patients and series at any depth for classes."""
    if source.is_dir() and any(file.name in METADATA for file in _image_folder(source)):
        what = f"'{source}' has DICOM or NIfTI files and a metadata file, which is not read for these"
        raise DataError(f"{what}. Remove it; for labels, put the files of each class into a folder of its own.")
    features = {"image": datasets.Image(decode=False), "label": datasets.Value("string")}
    rows: dict[str, dict[str, list[str]]] = {}
    for file in image_files(source):
        above = list(file.parent.relative_to(source).parts) if source.is_dir() else []
        split = above.pop(0) if above and above[0] in ("train", *TEST_SPLITS) else "train"
        columns = rows.setdefault(split, {"image": [], "label": []})
        columns["image"].append(str(file))
        columns["label"].append(above[0] if len(above) == 1 else "")
    labels = [label for columns in rows.values() for label in columns["label"]]
    if "" in labels or len(set(labels)) == 1:
        rows, _ = {split: {"image": columns["image"]} for split, columns in rows.items()}, features.pop("label")
    return {name: datasets.Dataset.from_dict(rows[name], datasets.Features(features)) for name in rows}


def files_of(source: Path) -> list[Path]:
    return [file for file in (sorted(source.rglob("*")) if source.is_dir() else [source]) if file.is_file()]


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES or is_medical(path)


def _image_folder(folder: Path) -> list[Path]:
    """Return the files of a folder of images. Raise an error if it has none; warn about files that are not images."""
    files = [f for f in files_of(folder) if not f.name.startswith(".")]
    odd = [f for f in files if not is_image(f) and f.name not in (*METADATA, "DICOMDIR")]
    if len(odd) == len(files):
        what = f"has no images, only files such as {odd[0].name}" if odd else "is empty"
        raise DataError(f"'{folder}' {what}, expected images. Put them there; links to folders are not followed.")
    if odd:
        log.warning("'%s': %d files are not images and are skipped, such as %s", folder, len(odd), odd[0].name)
    return files
