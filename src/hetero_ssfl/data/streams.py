"""Iterate once over all images of a source, with their positions, without a cache."""

import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import DataConfig
from ..errors import DataError
from .images import decode_image, load_images
from .sources import DATASET_FILES, is_image, locate, open_rows

ORIENTATION = 274  # the EXIF tag; values from 5 mean that width and height are exchanged


class SourceImage(NamedTuple):
    """A uint8 image (channels, side, side), its row in the source and, in a folder, its relative path."""

    row: int
    path: str | None
    pixels: Tensor


def each_image(config: DataConfig) -> tuple[int, Iterator[SourceImage]]:
    """Return the number of images and an iterator over them, fitted to `config.side` and `config.channels`.

    Depending on `config.on_bad_image`, the iterator skips bad images.
    """
    if config.source == "digits":
        pixels = load_images(config, "all").pixels
        return len(pixels), (SourceImage(row, None, image) for row, image in enumerate(pixels))
    source = locate(config.source)
    if isinstance(source, Path) and _holds_files(source):
        files = [source] if source.is_file() else sorted(f for f in source.rglob("*") if is_image(f))
        if not files:
            raise DataError(f"'{config.source}' holds no images, expected files such as .png or .jpg. Check the path.")
        root = source.parent if source.is_file() else source
        return len(files), _decoded(config, ((file, file.relative_to(root).as_posix()) for file in files))
    rows = open_rows(config, source, "all")
    return rows.count, _decoded(config, ((encoded, None) for encoded, _ in rows.items()))


def image_sizes(config: DataConfig) -> list[tuple[int, int]]:
    """Return the sizes (width, height) of all images of a source, the smallest first, from the headers of the files."""
    from PIL import Image

    sizes = set()
    for encoded, _ in open_rows(config, locate(config.source), "all").items():
        stream = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
        # a broken or missing image has no size
        with suppress(OSError, ValueError, SyntaxError, AttributeError), Image.open(stream) as file:
            turned = file.getexif().get(ORIENTATION, 1) >= 5
            sizes.add((file.height, file.width) if turned else (file.width, file.height))
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))


def _holds_files(source: Path) -> bool:
    """Tell whether the source is an image file or a folder of them, not a table or a folder of tables."""
    if source.is_file():
        return is_image(source)
    return not any((source / name).exists() for name in DATASET_FILES) and next(source.rglob("*.parquet"), None) is None


def _decoded(config: DataConfig, items: Iterable[tuple[Any, str | None]]) -> Iterator[SourceImage]:
    for row, (encoded, path) in enumerate(items):
        try:
            array, _ = decode_image(encoded, config.side, config.channels)
        except (OSError, ValueError, SyntaxError):  # PIL raises all three for broken files
            if config.on_bad_image == "skip":
                continue
            raise DataError(
                f"image {row if path is None else repr(path)} of '{config.source}' cannot be decoded. "
                "Repair or remove it, or skip such images with --on-bad-image skip."
            ) from None
        yield SourceImage(row, path, torch.tensor(array))
