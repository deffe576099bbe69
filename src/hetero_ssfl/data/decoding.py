"""Decode one image into a uint8 array, and say what is wrong with images that cannot be used."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..plugins import install_command

if TYPE_CHECKING:
    from PIL.Image import Image

USUAL_SIDE = 32  # recommended for images of unequal sizes
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")


class UnequalSizesError(DataError):
    """The images are readable, but not squares of one size: they need `data.side`."""


class UnreadableImageError(DataError):
    """An image that cannot be read. `how` is the caller's option to skip such images, None if it has no such option."""

    def __init__(self, what: str, how: str | None = "data.on_bad_image = 'skip'") -> None:
        super().__init__(f"{what}. Remove it{f', or skip such images with {how}' if how else ''}.")
        self.what = what


@contextmanager
def skip_with(how: str | None) -> Iterator[None]:
    """Let an error about an unreadable image name the option that the caller has for it."""
    try:
        yield
    except UnreadableImageError as error:
        raise UnreadableImageError(error.what, how) from None


class BadImageError(ValueError):
    """An image that cannot be used. Its message continues the sentence "image 7 ..."."""


class UsableImageError(BadImageError):
    """A good image, which is never skipped: it can be used after a change elsewhere."""

    refusal: type[DataError] = DataError
    remedy = f"Install it: {install_command('heic')}"


class OtherSizeError(UsableImageError):
    """The image does not fit into one array with the others."""

    refusal = UnequalSizesError
    remedy = f"Set data.side, for example {USUAL_SIDE}, to crop and resize all images."


def check_size(picture: np.ndarray, first: np.ndarray) -> None:
    size, expected = (f"{a.shape[2]}x{a.shape[1]}" for a in (picture, first))
    if picture.shape[1] != picture.shape[2]:
        raise OtherSizeError(f"is {size} pixels, not square")
    if picture.shape != first.shape:
        raise OtherSizeError(f"is {size} pixels, but the first is {expected}")


def decode_image(
    encoded: Any, side: int | None, channels: int | None, bits: int | None = None, grey: list[float] | None = None
) -> np.ndarray:
    """Decode bytes or a path into uint8 (channels, side, side). Decoders raise many types for broken files."""
    from PIL import Image

    if encoded is None:
        raise BadImageError("is missing")
    if _is_heic(encoded):
        if find_spec("pillow_heif") is None:
            raise UsableImageError("is a HEIC image, and the package pillow-heif is not installed")
        import pillow_heif

        pillow_heif.register_heif_opener()
    with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as file:
        return fit_image(file, side, channels, bits, grey)


def _is_heic(encoded: bytes | str | Path) -> bool:
    if isinstance(encoded, bytes):
        start = encoded[:12]
    else:
        with Path(encoded).open("rb") as file:
            start = file.read(12)
    return start[4:8] == b"ftyp" and start[8:12] in HEIC_BRANDS


def fit_image(
    image: "Image", side: int | None, channels: int | None, bits: int | None = None, grey: list[float] | None = None
) -> np.ndarray:
    """Convert a PIL image to uint8 (channels, side, side), turned upright, cropped and resized if `side` is given."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    tags = getattr(image, "tag_v2", {})  # of a TIFF, which PIL forgets when it copies the image
    if tags.get(BITS) == (12,):
        bits, grey = bits or 12, None
    white_is_zero = tags.get(PHOTOMETRIC) == 0 and image.mode.startswith("I;16")  # PIL inverts only 8 bits
    picture = eight_bits(ImageOps.exif_transpose(image), bits, grey)
    if white_is_zero:
        picture = ImageOps.invert(picture)
    if channels is None:
        channels = 1 if picture.mode in ("1", "L", "LA") else 3
    picture = picture.convert("L" if channels == 1 else "RGB")
    if side and picture.size != (side, side):
        picture = ImageOps.fit(picture, (side, side), Resampling.BICUBIC)
    array = np.asarray(picture, dtype=np.uint8)
    return np.ascontiguousarray(array[None] if channels == 1 else array.transpose(2, 0, 1))


def eight_bits(image: "Image", bits: int | None = None, grey: list[float] | None = None) -> "Image":
    """Scale grey values of 16 bits (or `bits`), or floats from 0 to 1, to 8 bits; PIL alone would clip them at 255.

    The largest value of 16-bit images is appended to `grey`."""
    from PIL.Image import fromarray

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image, dtype=np.float64)
    lowest, highest = float(values.min()), float(values.max())
    largest = 1.0 if image.mode == "F" else 2.0 ** (bits or 16) - 1
    if not 0 <= lowest <= highest <= largest:  # false for nan, too
        raise BadImageError(f"has values from {lowest:g} to {highest:g}, expected 0 to {largest:g} (rescale it first)")
    if grey is not None and image.mode != "F":
        grey.append(highest)
    return fromarray((values * (255 / largest)).round().astype(np.uint8))
