"""Find and open image sources: known names, local folders or tables, and hub ids. Images are still encoded."""

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import DataConfig
from ..errors import DataError
from ..seeding import rng_for

Subset = Literal["train", "test", "all"]

HUB_IDS = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "tiny-imagenet": "zh-plus/tiny-imagenet",
}
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
NO_LABELS = "none"  # as data.label_column
TEST_SPLITS = ("test", "valid", "validation")
SUFFIXES = (".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tga", ".tif", ".tiff", ".webp")
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
    raise DataError(
        f"no data at '{source}', expected digits, {', '.join(HUB_IDS)}, a local file or folder, "
        f"or a hub id such as owner/name. {_remedy(path)}"
    )


def _remedy(missing: Path) -> str:
    """Return the nearest name that exists in the same folder as a question, or else a general remedy."""
    try:
        near = difflib.get_close_matches(missing.name, [path.name for path in missing.parent.iterdir()], n=1)
    except OSError:
        near = []
    return f"Did you mean '{missing.parent / near[0]}'?" if near else "Check the path."


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
    """Encoded images (bytes or a path) with their labels, before decoding."""

    items: Callable[[], Iterable[tuple[Any, int | None]]]
    count: int
    classes: tuple[str, ...]


def open_rows(config: DataConfig, source: Path | str, split: Subset) -> Rows:
    """Open a split with the `datasets` library. A labeled source without a test split reserves a fifth for testing.

    `all` is every image of every split, in the order of the source and without labels.
    """
    import datasets

    datasets.disable_progress_bars()
    splits = _splits(datasets, source)
    train = splits.get("train", next(iter(splits.values())))
    test = None
    if split == "all":
        table = datasets.concatenate_datasets(list(splits.values()))
    else:
        test = next((splits[name] for name in TEST_SPLITS if name in splits and splits[name] is not train), None)
        if test is None and _column(train, config.label_column, LABEL_COLUMNS) is None:  # testing needs labels
            test = train.select([])
        elif test is None:
            train, test = (train.select(fixed_fifth(len(train), part).tolist()) for part in ("train", "test"))
        table = train if split == "train" else test
    image = _column(table, config.image_column, IMAGE_COLUMNS)
    label = None if split == "all" else _column(table, config.label_column, LABEL_COLUMNS)
    wanted = config.label_column not in (None, NO_LABELS)
    if image is None or (wanted and label is None and split != "all"):
        image_names = [config.image_column] if config.image_column else IMAGE_COLUMNS
        what, expected = ("label", [config.label_column]) if image else ("image", image_names)
        raise DataError(
            f"'{source}' has no {what} column among {table.column_names}, expected {' or '.join(map(str, expected))}. "
            f"Name it with data.{what}_column."
        )
    try:
        table = table.cast_column(image, datasets.Image(decode=False))
    except Exception:  # Arrow raises a different exception for each type
        raise DataError(
            f"column '{image}' of '{source}' holds {table.features[image]}, expected images. "
            "Name another with data.image_column."
        ) from None
    names = getattr(table.features[label], "names", None) if label else None
    numbers: dict[str, int] = {}
    if label and all(isinstance(value, str) for value in table[label]) and len(table):
        both = [part for part in (train, test) if part is not None and label in part.column_names]
        names = sorted({word for part in both for word in part[label]})  # of both, so that they agree on numbers
        numbers = {name: number for number, name in enumerate(names)}

    def items() -> Iterator[tuple[Any, int | None]]:
        for row in table:
            encoded = row[image]
            value: Any = row[label] if label else None
            yield encoded and (encoded["bytes"] or encoded["path"]), numbers[value] if numbers else value

    if label and not numbers:
        odd = [k for k in table[label] if not isinstance(k, int) or k < 0]
        if odd:
            raise DataError(
                f"column '{label}' of '{source}' holds {odd[0]!r}, expected class numbers from 0. "
                "Number the classes, or name another column with data.label_column."
            )
        names = names or [str(k) for k in range(max(table[label], default=-1) + 1)]
    return Rows(items, len(table), tuple(names or ()))


def _column(table: Any, named: str | None, usual: tuple[str, ...]) -> str | None:
    if named == NO_LABELS:
        return None
    return next((name for name in ([named] if named else usual) if name in table.column_names), None)


def _splits(datasets: Any, source: Path | str) -> dict[str, Any]:
    try:
        if isinstance(source, str):
            _ask_hub(datasets, source)
            return dict(datasets.load_dataset(source))
        if any((source / name).exists() for name in DATASET_FILES):
            loaded = datasets.load_from_disk(str(source))
            return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if source.suffix == ".arrow":
            return {"train": datasets.Dataset.from_file(str(source))}
        if source.is_file() and source.suffix != ".parquet":
            raise DataError(
                f"'{source}' is one file, expected a folder of images, .parquet or .arrow. Name its folder."
            )
        tables = [source] if source.is_file() else sorted(source.rglob("*.parquet"))
        tables = [table for table in tables if table.name not in METADATA]
        if tables:
            files: dict[str, list[str]] = {}
            for table in tables:
                files.setdefault(_split_of(table.stem), []).append(str(table))
            return dict(datasets.load_dataset("parquet", data_files=files))
        names = (str(file.relative_to(source)) for file in _files_of(source))
        # The library looks for splits with 64 patterns, and walks through the whole folder for each of them.
        may_have_splits = any(word in name for name in names for word in SPLIT_WORDS)
        patterns = None if may_have_splits else {"train": ["**"]}
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
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if Path(datasets.config.HF_DATASETS_CACHE, source.replace("/", "___")).is_dir():
        return
    try:
        HfApi().dataset_info(source, timeout=HUB_SECONDS)
    except HfHubHTTPError as error:
        hidden = error.response.status_code in (401, 403, 404)
        reason = "has no data set of this name" if hidden else f"answers with status {error.response.status_code}"
    except HFValidationError:
        reason = "does not allow such a name"
    except Exception as error:  # no network, or HF_HUB_OFFLINE; the library raises many types
        reason = f"cannot be reached ({type(error).__name__})"
    else:
        return
    short = next((name for name, hub_id in HUB_IDS.items() if hub_id == source), None)
    other = f"put the data set into a folder '{short}' under HETERO_SSFL_DATA" if short else "correct the path"
    raise DataError(
        f"there is no file or folder '{short or source}' here, and the Hugging Face hub {reason}. "
        f"{other[0].upper()}{other[1:]}, or check the id and the connection."
    )


def count_files(folder: Path) -> tuple[int, int] | None:
    """Return the number of image files and of folders that hold them; None for a source that is not such a folder."""
    files = list(folder.rglob("*")) if folder.is_dir() else []
    if any(file.suffix in (".parquet", ".arrow") or file.name in DATASET_FILES for file in files):
        return None
    images = [file for file in files if is_image(file)]
    return (len(images), len({file.parent for file in images})) if images else None


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a folder of images. Raise an error if it has none; warn about files that are not images."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and not f.name.startswith(".")]
    odd = [f for f in files if not is_image(f) and f.name not in METADATA]
    if len(odd) == len(files):
        links = [f for f in sorted(folder.rglob("*")) if f.is_symlink() and f.is_dir()]
        what = f"has no images, only files such as {odd[0].name}" if odd else "is empty"
        if links and not odd:
            what = f"has no images, only symbolic links to folders such as {links[0].name}, which are not followed"
        raise DataError(f"'{folder}' {what}, expected images such as .png or .jpg. Put them there or correct the path.")
    if odd:
        log.warning("'%s': %d files are not images and are skipped, such as %s", folder, len(odd), odd[0].name)
    return files


def _split_of(stem: str) -> str:
    return next((name for name in ("train", *TEST_SPLITS) if stem.startswith(name)), "train")
