"""Images in memory: decoded once, kept as uint8, memory-mapped from a checksummed cache.

A data set is a name we know, a local path or a hub id. Decoding (PNG, JPEG) happens the first time only;
every worker process then maps the same file, so ten processes share one copy in memory.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..config import DataConfig
from ..errors import DataError
from ..seeding import rng_for

log = logging.getLogger(__name__)

Split = Literal["train", "test"]

HUB_IDS = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "tiny-imagenet": "zh-plus/tiny-imagenet",
}
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
TEST_SPLITS = ("test", "valid", "validation")
FORMAT = 2  # raise when the cache's content changes for the same source


@dataclass(frozen=True)
class Images:
    """Pixels (n, channels, side, side) as uint8, and labels if the source has them."""

    pixels: Tensor
    labels: Tensor | None
    classes: tuple[str, ...] = ()
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, rows: Tensor) -> "Images":
        labels = None if self.labels is None else self.labels[rows]
        return Images(self.pixels[rows], labels, self.classes)


def digest(pixels: Tensor) -> str:
    """SHA-256 of the pixels and their shape: the name under which a RAD is known."""
    shape = ",".join(map(str, pixels.shape))
    return hashlib.sha256(shape.encode() + pixels.contiguous().numpy().tobytes()).hexdigest()


def load_images(config: DataConfig, split: Split) -> Images:
    """The whole split as `Images`, from the cache where possible."""
    if config.source == "digits":
        return _digits(config, split)
    source = _locate(config.source)
    entry = _cache_folder() / _cache_key(config, source, split)
    images = _read_cache(entry)
    if images is None:
        _fill_cache(entry, config, _open_rows(config, source, split), f"{config.source} ({split})")
        images = _read_cache(entry)
        assert images is not None
    return images


def _digits(config: DataConfig, split: Split) -> Images:
    """scikit-learn's 1,797 handwritten digits; every fifth image of a fixed shuffle is for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)
    if config.side and config.side != 8:
        size = (config.side, config.side)
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
    pixels = pixels.mul(255).round().byte()
    if config.channels == 3:
        pixels = pixels.expand(-1, 3, -1, -1).contiguous()
    everything = Images(pixels, torch.from_numpy(bunch.target).long(), tuple("0123456789"))
    return everything.subset(_fifth(len(everything), split))


def _fifth(count: int, split: str) -> Tensor:
    """The rows of a split where the source has no test split of its own. The same for every seed."""
    order = torch.randperm(count, generator=rng_for(0, "test split"))
    is_test = torch.zeros(count, dtype=torch.bool)
    is_test[order[::5]] = True
    return torch.nonzero(is_test if split == "test" else ~is_test).flatten()


def _locate(source: str) -> Path | str:
    """A local path if there is one (short names under HETERO_SSFL_DATA first), else a hub id."""
    folder = os.environ.get("HETERO_SSFL_DATA")
    if source in HUB_IDS:
        local = Path(folder, source) if folder else None
        return local if local and local.is_dir() else HUB_IDS[source]
    path = Path(source).expanduser()
    if path.exists():
        return path
    parts = source.split("/")
    if len(parts) == 2 and all(parts) and not source.startswith((".", "~")):
        return source
    raise DataError(
        f"no data at '{source}', expected digits, {', '.join(HUB_IDS)}, a local file or folder, "
        "or a hub id such as owner/name. Check the path."
    )


def _cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "hetero-ssfl")
    return Path(os.environ.get("HETERO_SSFL_CACHE", default)).expanduser()


def _cache_key(config: DataConfig, source: Path | str, split: Split) -> str:
    """Names the decoded content: where it came from, as it was then, and how it was decoded."""
    files: list[Any] = []
    if isinstance(source, Path):
        source = source.resolve()
        found = sorted(source.rglob("*")) if source.is_dir() else [source]
        files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in found if f.is_file()]
    decoding = config.model_dump(exclude={"source", "limit", "validation"})
    text = json.dumps([FORMAT, str(source), split, files, decoding], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_cache(entry: Path) -> Images | None:
    """The cached images, or None when there are none or they no longer match their checksum."""
    try:
        card = json.loads(entry.with_suffix(".json").read_text())
        pixels = np.load(entry.with_suffix(".npy"), mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError):
        return None
    if _checksum(pixels, card.get("labels")) != card.get("sha256"):
        log.warning("cached images %s do not match their checksum; decoding again", entry.name)
        return None
    labels = None if card["labels"] is None else torch.tensor(card["labels"], dtype=torch.long)
    return Images(torch.from_numpy(pixels), labels, tuple(card["classes"]), card["skipped"])


def _checksum(pixels: np.ndarray, labels: list[int] | None) -> str:
    sha = hashlib.sha256(json.dumps([pixels.shape, labels]).encode())
    sha.update(pixels.data)
    return sha.hexdigest()


def _fill_cache(entry: Path, config: DataConfig, rows: "_Rows", what: str) -> None:
    pixels, labels, skipped = _decode(config, rows, what)
    card = {
        "source": config.source,
        "sha256": _checksum(pixels, labels),
        "classes": rows.classes,
        "labels": labels,
        "skipped": skipped,
    }
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        scratch = entry.with_suffix(f".{os.getpid()}.npy")
        np.save(scratch, pixels, allow_pickle=False)
        scratch.replace(entry.with_suffix(".npy"))
        scratch.write_text(json.dumps(card))
        scratch.replace(entry.with_suffix(".json"))
    except OSError as error:
        raise DataError(
            f"cannot write the image cache in '{entry.parent}': {error.strerror}. "
            "Make room there or set HETERO_SSFL_CACHE to another folder."
        ) from None


def _decode(config: DataConfig, rows: "_Rows", what: str) -> tuple[np.ndarray, list[int] | None, int]:
    """All images as one uint8 array. A bad image is an error, or is counted and left out."""
    kept: list[np.ndarray] = []
    labels: list[int] = []
    bad: Counter[str] = Counter()
    channels: int | None = config.channels
    for number, (encoded, label) in enumerate(rows.items()):
        try:
            picture, channels = _to_array(encoded, config.side, channels)
            if picture.shape[1] != picture.shape[2]:
                raise ValueError(f"is {picture.shape[2]}x{picture.shape[1]} pixels, not square (data.side crops all)")
            if kept and picture.shape != kept[0].shape:
                found, expected = (f"{a.shape[2]}x{a.shape[1]}" for a in (picture, kept[0]))
                raise ValueError(f"is {found} pixels where the first is {expected} (data.side resizes all)")
        except (OSError, ValueError, SyntaxError) as error:  # PIL raises all three for broken files
            if config.on_bad_image == "error":
                raise DataError(
                    f"image {number} of {what} {_reason(error)}. "
                    "Repair or remove it, or set data.on_bad_image = 'skip' to leave such images out."
                ) from None
            bad[_reason(error)] += 1
            continue
        kept.append(picture)
        if label is not None:
            labels.append(int(label))
    if not kept:
        raise DataError(f"{what} holds no readable images, expected at least one. Check data.source.")
    if labels and len(labels) != len(kept):
        raise DataError(f"only {len(labels)} of {len(kept)} images of {what} have a label, expected all or none.")
    return np.ascontiguousarray(np.stack(kept)), labels or None, sum(bad.values())


def _reason(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("is ") else "cannot be decoded"


def _to_array(encoded: Any, side: int | None, channels: int | None) -> tuple[np.ndarray, int]:
    import io

    from PIL import Image, ImageOps

    if encoded is None:
        raise ValueError("is missing")
    stream = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    with Image.open(stream) as file:
        if channels is None:
            channels = 1 if file.mode in ("1", "L", "LA", "I", "I;16", "F") else 3
        picture = file.convert("L" if channels == 1 else "RGB")
        if side and picture.size != (side, side):
            picture = ImageOps.fit(picture, (side, side), Image.Resampling.BICUBIC)
        array = np.asarray(picture, dtype=np.uint8)
    return np.ascontiguousarray(array[None] if channels == 1 else array.transpose(2, 0, 1)), channels


@dataclass(frozen=True)
class _Rows:
    """Encoded images (bytes or a path) with their labels, before decoding."""

    items: Callable[[], Iterable[tuple[Any, int | None]]]
    classes: tuple[str, ...]


def _open_rows(config: DataConfig, source: Path | str, split: Split) -> _Rows:
    """Read a split through the `datasets` library; without a test split, a fixed fifth is kept for it."""
    import datasets

    datasets.disable_progress_bars()
    splits = _splits(datasets, source)
    train = splits.get("train", next(iter(splits.values())))
    test = next((splits[name] for name in TEST_SPLITS if name in splits), None)
    if test is None:
        train, test = (train.select(_fifth(len(train), part).tolist()) for part in ("train", "test"))
    table = train if split == "train" else test
    image = _column(table, config.image_column, IMAGE_COLUMNS)
    label = _column(table, config.label_column, LABEL_COLUMNS)
    if image is None or (config.label_column and label is None):
        image_names = [config.image_column] if config.image_column else IMAGE_COLUMNS
        what, expected = ("label", [config.label_column]) if image else ("image", image_names)
        raise DataError(
            f"'{source}' has no {what} column among {table.column_names}, expected {' or '.join(map(str, expected))}. "
            f"Name it with data.{what}_column."
        )
    try:
        table = table.cast_column(image, datasets.Image(decode=False))
    except Exception:  # Arrow has a kind of its own for each type
        raise DataError(
            f"column '{image}' of '{source}' holds {table.features[image]}, expected images. "
            "Name another with data.image_column."
        ) from None
    names = getattr(table.features[label], "names", None) if label else None

    def items() -> Iterator[tuple[Any, int | None]]:
        for row in table:
            encoded = row[image]
            yield encoded and (encoded["bytes"] or encoded["path"]), row[label] if label else None

    if label:
        odd = [k for k in table[label] if not isinstance(k, int) or k < 0]
        if odd:
            raise DataError(
                f"column '{label}' of '{source}' holds {odd[0]!r}, expected class numbers from 0. "
                "Number the classes, or name another column with data.label_column."
            )
        names = names or [str(k) for k in range(max(table[label], default=-1) + 1)]
    return _Rows(items, tuple(names or ()))


def _column(table: Any, named: str | None, usual: tuple[str, ...]) -> str | None:
    return next((name for name in ([named] if named else usual) if name in table.column_names), None)


def _splits(datasets: Any, source: Path | str) -> dict[str, Any]:
    try:
        if isinstance(source, str):
            return dict(datasets.load_dataset(source))
        if (source / "dataset_info.json").exists() or (source / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(str(source))
            return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if source.suffix == ".arrow":
            return {"train": datasets.Dataset.from_file(str(source))}
        if source.is_file() and source.suffix != ".parquet":
            raise DataError(
                f"'{source}' is one file, expected a folder of images, .parquet or .arrow. Name its folder."
            )
        tables = [source] if source.is_file() else sorted(source.rglob("*.parquet"))
        if tables:
            files: dict[str, list[str]] = {}
            for table in tables:
                files.setdefault(_split_of(table.stem), []).append(str(table))
            return dict(datasets.load_dataset("parquet", data_files=files))
        if not any(source.iterdir()):
            raise DataError(f"'{source}' is empty, expected images. Put them there or correct data.source.")
        return dict(datasets.load_dataset("imagefolder", data_dir=str(source)))
    except DataError:
        raise
    except Exception as error:  # the library raises many kinds; each means that this source is unusable
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"cannot load '{source}': {reason}. Check the name and that it holds images; "
            "a hub id needs a network connection the first time."
        ) from None


def _split_of(stem: str) -> str:
    return next((name for name in ("train", *TEST_SPLITS) if stem.startswith(name)), "train")
