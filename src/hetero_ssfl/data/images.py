"""Load images as uint8 arrays from a checksummed, memory-mapped cache.

Images (PNG, JPEG) are decoded only once. Every worker process then maps the same file, so ten processes share one copy
in memory.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from ..config import DataConfig
from ..errors import DataError
from ..terminal import Console
from .cache import cache_folder, max_bytes, prune_cache, remembered, write_private
from .decoding import BadImageError, UnreadableImageError, UsableImageError, check_size, decode_image, fit_image
from .medical import ScanImage, count_in_files, image_names, images_in_files
from .sources import Rows, Subset, files_of, fixed_fifth, image_files, locate, open_rows

log = logging.getLogger(__name__)

DIGITS = 1797
MAX_CLASSES = 1000  # assumed for a source whose labels are not read
FORMAT = 5  # increase it when the cached content changes for the same source


class Skipped(NamedTuple):
    """An unreadable image that was left out."""

    source: str
    image: str  # its path within the source, or its number
    reason: str


@dataclass(frozen=True)
class Images:
    """Pixels of shape (n, channels, side, side) as uint8, and labels if the source has them.

    `skipped` are the unreadable images of the source. `checksum` identifies all pixels and labels of the
    source's split, if they were read from files. A subset keeps both.
    """

    pixels: Tensor
    labels: Tensor | None
    classes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    checksum: str | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, rows: Tensor) -> "Images":
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, pixels=self.pixels[rows], labels=labels)


def digest(pixels: Tensor) -> str:
    """Return the SHA-256 of the pixels and their shape, which identifies a RAD."""
    shape = ",".join(map(str, pixels.shape))
    return hashlib.sha256(shape.encode() + pixels.contiguous().numpy().tobytes()).hexdigest()


def take(data: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return data[rows] on `device`. `data` may be on any device; `rows` are on the CPU.

    A blocking copy would wait for all work queued on an accelerator; a copy from pinned memory does not.
    """
    if data.device.type != "cpu":
        return data[rows.to(data.device, non_blocking=True)]
    batch = data[rows]
    if device.type == "cuda":
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=True)


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
            return replace(load_images(config, "train").subset(torch.arange(0)), skipped=())
        _fill_cache(entry, config, rows, f"{config.source} ({split})")
        images = _read_cache(entry)
        assert images is not None
    return images


class Counts(NamedTuple):
    """Size of a source, whatever the size of its images. It is an upper bound: unreadable images are included."""

    images: int  # of all splits
    train: int  # of the training split at most
    classes: int


def count_images(config: DataConfig) -> Counts:
    """Count the images of a source without decoding them."""
    total, classes = DIGITS, 10
    if config.source != "digits":
        source = locate(config.source)
        files = image_files(source) if isinstance(source, Path) else []
        total, classes = sum(count_in_files(files, config)), len({file.parent for file in files})
        if not files:
            plain = config.model_copy(update={"side": None, "channels": None})
            key = ["count", _cache_key(plain, source, "all")]
            total, classes = remembered(key, lambda: open_rows(plain, source, "all").count), MAX_CLASSES
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
    path = Path(package.origin if package and package.origin else "").parent / "datasets/data/digits.csv.gz"
    if not path.exists():
        from sklearn.datasets import load_digits

        return load_digits().images, load_digits().target
    rows = np.loadtxt(path, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]


def _cache_key(config: DataConfig, source: Path | str, split: Subset) -> str:
    """Identify the decoded content by its source, the state of the source's files, and the decoding settings."""
    source = source.resolve() if isinstance(source, Path) else source
    paths = files_of(source) if isinstance(source, Path) else []
    files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in paths]
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
    with suppress(OSError):  # a read-only cache still works; its entries only look older than they are
        os.utime(entry.with_suffix(".json"))
    labels = None if card["labels"] is None else torch.tensor(card["labels"], dtype=torch.long)
    skipped = tuple(Skipped(*image) for image in card["skipped"])
    return Images(torch.from_numpy(pixels), labels, tuple(card["classes"]), skipped, card["sha256"])


def _checksum(pixels: np.ndarray, labels: list[int] | None) -> str:
    sha = hashlib.sha256(json.dumps([pixels.shape, labels]).encode())
    sha.update(pixels.data)
    return sha.hexdigest()


def _fill_cache(entry: Path, config: DataConfig, rows: Rows, what: str) -> None:
    max_bytes()  # raises for a wrong limit before anything is decoded
    pixels, labels, skipped = _decode(config, rows, what)
    card = {"source": config.source, "classes": rows.classes, "labels": labels, "skipped": skipped}
    card["sha256"] = _checksum(pixels, labels)
    try:
        write_private(entry.with_suffix(".npy"), lambda path: np.save(path, pixels, allow_pickle=False))
        write_private(entry.with_suffix(".json"), lambda path: path.write_text(json.dumps(card)))
        prune_cache(entry)
    except OSError as error:
        reason = f"cannot write the image cache in '{entry.parent}': {error.strerror}"
        raise DataError(f"{reason}. Free some space, or set HETERO_SSFL_CACHE to another folder.") from None


def _decode(config: DataConfig, rows: Rows, what: str) -> tuple[np.ndarray, list[int] | None, list[Skipped]]:
    """Decode all images into one uint8 array. Also return their labels, and the images that were skipped."""
    screen, text = Console(stderr=True), f"decoding {what}, once"
    hidden = not screen.is_terminal
    shown = track(rows.encoded(), text, rows.count, console=screen, transient=True, disable=hidden)
    skipped: list[Skipped] = []
    kept = dict(decode_each(config, shown, what, skipped, alike=True))
    if not kept:
        raise DataError(f"{what} holds no readable images, expected at least one. Check data.source.")
    labels = None if rows.labels is None else [rows.labels[number] for number in kept]
    return np.ascontiguousarray(np.stack(list(kept.values()))), labels, skipped


def decode_each(
    config: DataConfig, images: Iterable[Any], what: str, skipped: list[Skipped] | None = None, alike: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """Decode images (bytes or paths), fitted to the config, and yield them with their numbers.

    An unreadable image raises an error or is added to `skipped`, as the config says. With `alike`, an image of another
    shape raises an error: it is a good image, and `data.side` makes it usable. So do images that use a small part of 16
    bits.
    """
    first, grey = None, list[float]()
    for number, encoded in enumerate(images):
        try:
            channels = len(first) if first is not None else config.channels
            if isinstance(encoded, ScanImage):
                picture = fit_image(encoded.picture(), config.side, channels)
            else:
                picture = decode_image(encoded, config.side, channels, config.bit_depth, grey)
            if alike:
                check_size(picture, picture if first is None else first)
                first = picture
        except Exception as error:  # decoders raise more than their own error classes for broken files
            bad, place = (
                str(error) if isinstance(error, BadImageError) else "cannot be decoded",
                _place(encoded, config),
            )
            which = f"image {number}{f' ({place})' * bool(place)} of {what} {bad}"
            if isinstance(error, UsableImageError):
                raise error.refusal(f"{which}. {error.remedy}") from None
            if config.on_bad_image == "error":
                raise UnreadableImageError(which) from None
            if skipped is not None:
                skipped.append(Skipped(config.source, place or str(number), bad))
            continue
        yield number, picture
    if alike and config.bit_depth is None and 0 < max(grey, default=0) < 2**13:
        raise DataError(
            f"the 16-bit images of {what} have values up to {max(grey):g} of 65535, so networks would see them almost "
            f"black. Set data.bit_depth = {max(8, int(max(grey)).bit_length())}, or 16 to take them as they are."
        )


class SourceImage(NamedTuple):
    """A uint8 image (channels, side, side), its row in the source and, in a folder, its relative path."""

    row: int
    path: str | None
    pixels: Tensor


def each_image(config: DataConfig) -> tuple[int, Iterator[SourceImage]]:
    """Return the number of images and an iterator over them, fitted to `config`, which may skip bad ones. There is no
    cache, and all images are read once."""
    if config.source == "digits":
        pixels = load_images(config, "all").pixels
        return len(pixels), (SourceImage(row, None, image) for row, image in enumerate(pixels))
    source, what = locate(config.source), f"'{config.source}'"
    if isinstance(source, Path) and (files := image_files(source)):
        root = source if source.is_dir() else source.parent
        counts = count_in_files(files, config)
        names = zip((file.relative_to(root).as_posix() for file in files), counts, strict=True)
        paths = [path for name, count in names for path in image_names(name, count)]
        decoded = decode_each(config, images_in_files(files, counts, config), what)
        return len(paths), (SourceImage(row, paths[row], torch.tensor(image)) for row, image in decoded)
    rows = open_rows(config, source, "all")
    decoded = decode_each(config, rows.encoded(), what)
    return rows.count, (SourceImage(row, None, torch.tensor(image)) for row, image in decoded)


def image_sizes(config: DataConfig) -> list[tuple[int, int]]:
    """Return the sizes (width, height) of all images of a source that can be decoded, the smallest first."""
    _, images = each_image(config.model_copy(update={"side": None, "on_bad_image": "skip"}))
    sizes = {(image.pixels.shape[2], image.pixels.shape[1]) for image in images}
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))


def _place(encoded: Any, config: DataConfig) -> str:
    """Return the path of an image file within its source; nothing for an image of a table."""
    if isinstance(encoded, ScanImage):
        return image_names(_place(encoded.scan.path, config), encoded.scan.images)[encoded.number]
    if not isinstance(encoded, str | Path):
        return ""
    file, folder = Path(encoded).resolve(), Path(config.source).expanduser().resolve()
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) and file != folder else file.name
