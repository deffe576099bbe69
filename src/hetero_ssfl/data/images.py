"""Load images as uint8 arrays from a checksummed, memory-mapped cache.

Images (PNG, JPEG) are decoded only once. Every worker process then maps the same file, so ten processes share one copy
in memory.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from ..config import DataConfig
from ..errors import DataError
from ..terminal import Console
from .cache import cache_folder, mark_used, max_bytes, private_scratch, prune_cache, remembered
from .sources import Rows, Subset, count_files, fixed_fifth, locate, open_rows

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

DIGITS = 1797
MAX_CLASSES = 1000  # assumed for a source whose labels are not read
USUAL_SIDE = 32  # recommended for images of unequal sizes
FORMAT = 4  # increase it when the cached content changes for the same source


class UnequalSizesError(DataError):
    """The images are readable, but not squares of one size: they need `data.side`."""


@dataclass(frozen=True)
class Images:
    """Pixels of shape (n, channels, side, side) as uint8, and labels if the source has them."""

    pixels: Tensor
    labels: Tensor | None
    classes: tuple[str, ...] = ()
    skipped: int = 0
    """Number of unreadable images in the source; a subset keeps the number of its source."""
    checksum: str | None = None
    """Identifies all pixels and labels of the source's split, if they were read from files; a subset keeps it, too."""

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, rows: Tensor) -> "Images":
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, pixels=self.pixels[rows], labels=labels)


def digest(pixels: Tensor) -> str:
    """Return the SHA-256 of the pixels and their shape, which identifies a RAD."""
    shape = ",".join(map(str, pixels.shape))
    return hashlib.sha256(shape.encode() + pixels.contiguous().numpy().tobytes()).hexdigest()


def load_images(config: DataConfig, split: Subset) -> Images:
    """Load a whole split, from the cache if possible."""
    if config.source == "digits":
        return _digits(config, split)
    source = locate(config.source)
    entry = cache_folder() / _cache_key(config, source, split)
    images = _read_cache(entry)
    if images is None:
        rows = open_rows(config, source, split)
        if split == "test" and not rows.count:
            return replace(load_images(config, "train").subset(torch.arange(0)), skipped=0)
        _fill_cache(entry, config, rows, f"{config.source} ({split})")
        images = _read_cache(entry)
        assert images is not None
    return images


class Counts(NamedTuple):
    """Size of a source, whatever the size of its images. It is an upper bound: unreadable images are included."""

    images: int
    """Of all splits."""
    train: int
    """Of the training split at most."""
    classes: int


def count_images(config: DataConfig) -> Counts:
    """Count the images of a source without decoding them."""
    if config.source == "digits":
        total, classes = DIGITS, 10
    else:
        source = locate(config.source)
        counted = count_files(source) if isinstance(source, Path) else None
        if counted is None:
            plain = config.model_copy(update={"side": None, "channels": None})
            key = ["count", _cache_key(plain, source, "all")]
            counted = remembered(key, lambda: open_rows(plain, source, "all").count), MAX_CLASSES
        total, classes = counted
    return Counts(total, min(total, config.limit or total), classes)


def _digits(config: DataConfig, split: Subset) -> Images:
    """Load scikit-learn's 1,797 handwritten digits; every fifth image of a fixed shuffle is for testing."""
    shades, labels = _digits_file()
    pixels = torch.from_numpy(shades).float().div(16).unsqueeze(1)
    if config.side and config.side != 8:
        size = (config.side, config.side)
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
    pixels = pixels.mul(255).round().byte()
    if config.channels == 3:
        pixels = pixels.expand(-1, 3, -1, -1).contiguous()
    everything = Images(pixels, torch.from_numpy(labels).long(), tuple("0123456789"))
    return everything.subset(fixed_fifth(len(everything), split))


def _digits_file() -> tuple[np.ndarray, np.ndarray]:
    """Return grey values from 0 to 16 (n, 8, 8) and labels.

    They are read from scikit-learn's data file, because importing scikit-learn takes as long as importing torch.
    """
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    path = Path(next(iter(folders or [])), "datasets", "data", "digits.csv.gz")
    if not path.exists():
        from sklearn.datasets import load_digits

        bunch = load_digits()
        return bunch.images, bunch.target
    rows = np.loadtxt(path, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]


def _cache_key(config: DataConfig, source: Path | str, split: Subset) -> str:
    """Identify the decoded content by its source, the state of the source's files, and the decoding settings."""
    files: list[Any] = []
    if isinstance(source, Path):
        source = source.resolve()
        paths = sorted(source.rglob("*")) if source.is_dir() else [source]
        files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in paths if f.is_file()]
    decoding = config.model_dump(exclude={"source", "limit", "validation"})
    text = json.dumps([FORMAT, str(source), split, files, decoding], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_cache(entry: Path) -> Images | None:
    """Return the cached images, or None if there are none or they do not match their checksum."""
    try:
        card = json.loads(entry.with_suffix(".json").read_text())
        pixels = np.load(entry.with_suffix(".npy"), mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError):
        return None
    if _checksum(pixels, card.get("labels")) != card.get("sha256"):
        log.warning("cached images %s do not match their checksum; decoding again", entry.name)
        return None
    mark_used(entry.with_suffix(".json"))
    labels = None if card["labels"] is None else torch.tensor(card["labels"], dtype=torch.long)
    return Images(torch.from_numpy(pixels), labels, tuple(card["classes"]), card["skipped"], card["sha256"])


def _checksum(pixels: np.ndarray, labels: list[int] | None) -> str:
    sha = hashlib.sha256(json.dumps([pixels.shape, labels]).encode())
    sha.update(pixels.data)
    return sha.hexdigest()


def _fill_cache(entry: Path, config: DataConfig, rows: Rows, what: str) -> None:
    max_bytes()  # raises for a wrong limit before anything is decoded
    pixels, labels, skipped = _decode(config, rows, what)
    card = {
        "source": config.source,
        "sha256": _checksum(pixels, labels),
        "classes": rows.classes,
        "labels": labels,
        "skipped": skipped,
    }
    try:
        scratch = private_scratch(entry.with_suffix(".npy"))
        np.save(scratch, pixels, allow_pickle=False)
        scratch.replace(entry.with_suffix(".npy"))
        scratch = private_scratch(entry.with_suffix(".json"))
        scratch.write_text(json.dumps(card))
        scratch.replace(entry.with_suffix(".json"))
        prune_cache(entry)
    except OSError as error:
        raise DataError(
            f"cannot write the image cache in '{entry.parent}': {error.strerror}. "
            "Free some space there, or set HETERO_SSFL_CACHE to another folder."
        ) from None


def _decode(config: DataConfig, rows: Rows, what: str) -> tuple[np.ndarray, list[int] | None, int]:
    """Decode all images into one uint8 array. A bad image raises an error, or is counted and skipped."""
    kept: list[np.ndarray] = []
    labels: list[int] = []
    channels: int | None = config.channels
    skipped, screen = 0, Console(stderr=True)
    hidden = not screen.is_terminal
    shown = track(rows.items(), f"decoding {what}, once", rows.count, console=screen, transient=True, disable=hidden)
    for number, (encoded, label) in enumerate(shown):
        try:
            picture, channels = decode_image(encoded, config.side, channels)
            _check_size(picture, kept[0] if kept else picture)
        except Exception as error:  # decoders raise more than their own error classes for broken files
            if config.on_bad_image == "error":
                raise _refusal(f"image {number}{_place(encoded, config.source)} of {what}", error) from None
            skipped += 1
            continue
        kept.append(picture)
        if label is not None:
            labels.append(int(label))
    if not kept:
        raise DataError(f"{what} holds no readable images, expected at least one. Check data.source.")
    if labels and len(labels) != len(kept):
        raise DataError(f"only {len(labels)} of {len(kept)} images of {what} have a label, expected all or none.")
    return np.ascontiguousarray(np.stack(kept)), labels or None, skipped


class BadImageError(ValueError):
    """An image that can be read, but not used. Its message continues the sentence "image 7 ..."."""


class _OtherSizeError(BadImageError):
    """The image does not fit into one array with the others."""


def _check_size(picture: np.ndarray, first: np.ndarray) -> None:
    size, expected = (f"{a.shape[2]}x{a.shape[1]}" for a in (picture, first))
    if picture.shape[1] != picture.shape[2]:
        raise _OtherSizeError(f"is {size} pixels, not square")
    if picture.shape != first.shape:
        raise _OtherSizeError(f"is {size} pixels, but the first is {expected}")


def _refusal(which: str, error: Exception) -> DataError:
    if isinstance(error, _OtherSizeError):
        remedy = f"Set data.side, for example {USUAL_SIDE}, to crop and resize all images."
        return UnequalSizesError(f"{which} {error}. {remedy}", count=1)
    reason = str(error) if isinstance(error, BadImageError) else "cannot be decoded"
    remedy = "Repair or remove it, or set data.on_bad_image = 'skip' to skip such images."
    return DataError(f"{which} {reason}. {remedy}", count=1)


def _place(encoded: Any, source: str) -> str:
    """Return the path of an image file within its source, in parentheses; nothing for an image of a table."""
    if not isinstance(encoded, str):
        return ""
    file, folder = Path(encoded).resolve(), Path(source).expanduser().resolve()
    return f" ({file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name})"


def decode_image(encoded: Any, side: int | None, channels: int | None) -> tuple[np.ndarray, int]:
    """Decode bytes or a path into uint8 (channels, side, side); also return the number of channels.

    Raises BadImageError with a reason, or whatever the decoder raises for a broken file.
    """
    import io

    from PIL import Image

    if encoded is None:
        raise BadImageError("is missing")
    stream = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    with Image.open(stream) as file:
        return fit_image(file, side, channels)


def fit_image(image: "Image", side: int | None, channels: int | None) -> tuple[np.ndarray, int]:
    """Convert a PIL image to uint8 (channels, side, side), turned upright, cropped and resized if `side` is given."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    picture = eight_bits(ImageOps.exif_transpose(image))
    if channels is None:
        channels = 1 if picture.mode in ("1", "L", "LA") else 3
    picture = picture.convert("L" if channels == 1 else "RGB")
    if side and picture.size != (side, side):
        picture = ImageOps.fit(picture, (side, side), Resampling.BICUBIC)
    array = np.asarray(picture, dtype=np.uint8)
    return np.ascontiguousarray(array[None] if channels == 1 else array.transpose(2, 0, 1)), channels


def eight_bits(image: "Image") -> "Image":
    """Scale grey values of 16 bits, or floats from 0 to 1, to 8 bits; PIL alone would clip them at 255."""
    from PIL.Image import fromarray

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image, dtype=np.float64)
    lowest, highest = float(values.min()), float(values.max())
    largest = 1.0 if image.mode == "F" else 65535.0
    if not 0 <= lowest <= highest <= largest:  # false for nan, too
        kind = "a float" if image.mode == "F" else "an integer"
        raise BadImageError(
            f"is {kind} image with values from {lowest:g} to {highest:g}, expected 0 to {largest:g} (rescale it first)"
        )
    return fromarray((values * (255 / largest)).round().astype(np.uint8))
