"""Which data are images, and how arrays of images of any number of channels are brought to one shape.

uint8 and uint16 are pixels, from 0 (black) to the largest number of the type (white). No other type is.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import DataConfig
from ..errors import DataError
from .decoding import fit_image

FULL_SCALE = {torch.uint8: 255, torch.uint16: 65535}
"""The value of white, by type."""
GREY = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in a grey value."""


def is_pixels(dtype: torch.dtype) -> bool:
    return dtype in FULL_SCALE


def to_unit_range(pixels: Tensor) -> Tensor:
    """Convert pixels to float32 from 0 to 1."""
    return pixels.float().div_(float(FULL_SCALE[pixels.dtype]))


def largest_value(pixels: Tensor) -> int:
    return int(pixels.numpy().max(initial=0))  # torch has no maximum of uint16


def are_dark(pixels: Tensor) -> bool:
    """Tell whether 16-bit images use less than an eighth of their range, as scans of 12 bits do."""
    return pixels.dtype == torch.uint16 and 8 * largest_value(pixels) < FULL_SCALE[torch.uint16]


def float_images_remedy(data: Tensor) -> str:
    """Return how to convert float data to pixels if they look like square images, otherwise an empty string."""
    square = data.ndim == 4 and (data.shape[2] == data.shape[3] or data.shape[1] == data.shape[2])
    if not square or not data.is_floating_point() or float(data.min()) < 0 or float(data.max()) > 255:
        return ""
    scale = "multiply them by 255 and " if float(data.max()) <= 1 else ""
    return f"If they are images, {scale}convert them to uint8."


def as_images(pixels: Tensor, config: DataConfig, who: str) -> Tensor:
    """Convert images with channels first, channels last or no channels to (n, channels, side, side)."""
    from PIL.Image import fromarray

    if pixels.ndim == 3:
        pixels = pixels[:, None]
    last = pixels.ndim == 4 and _channel_axis(pixels.shape) == 3
    if pixels.ndim != 4 or _channel_axis(pixels.shape) is None:
        kind = str(pixels.dtype).removeprefix("torch.")
        raise DataError(
            f"the data of {who} are {kind} of shape {tuple(pixels.shape)}, expected images: (n, height, width), with 1 "
            "or 3 channels, or squares with more. Crop them to squares; data that are not images should be float."
        )
    if last:
        pixels = pixels.permute(0, 3, 1, 2)
    channels, side = config.channels or pixels.shape[1], config.side
    if pixels.shape[1] == channels and (side is None or tuple(pixels.shape[2:]) == (side, side)):
        return pixels.contiguous()
    if pixels.dtype == torch.uint8 and pixels.shape[1] in (1, 3) and channels in (1, 3):  # as files are
        pictures = (fromarray(image.permute(1, 2, 0).squeeze(2).numpy()) for image in pixels)
        return torch.from_numpy(np.stack([fit_image(picture, side, channels) for picture in pictures]))
    return _resized(_with_channels(pixels, channels, who), side)


def _channel_axis(shape: Sequence[int]) -> int | None:
    """Return 1 or 3: the axis of 1 or 3 channels, otherwise the one beside the sides of a square; None if unclear."""
    usual = next((axis for axis in (1, 3) if shape[axis] in (1, 3)), None)
    if usual is not None:
        return usual
    return 1 if shape[2] == shape[3] else 3 if shape[1] == shape[2] else None


def _with_channels(pixels: Tensor, wanted: int, who: str) -> Tensor:
    channels = pixels.shape[1]
    if channels == wanted:
        return pixels
    if channels == 1:
        return pixels.expand(-1, wanted, -1, -1)
    if (channels, wanted) == (3, 1):
        grey = torch.tensordot(pixels.float(), torch.tensor(GREY), ([1], [0]))[:, None]
        return _rounded(grey, pixels.dtype)
    raise DataError(f"the images of {who} have {channels} channels, expected {wanted}. Choose which ones to use.")


def _resized(pixels: Tensor, side: int | None) -> Tensor:
    """Crop to the middle square and resize it, as `fit_image` does."""
    if side is None or tuple(pixels.shape[2:]) == (side, side):
        return pixels.contiguous()
    height, width = pixels.shape[2:]
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    square = pixels[:, :, top : top + short, left : left + short]
    parts = [F.interpolate(part.float(), (side, side), mode="bicubic", antialias=True) for part in square.split(256)]
    return torch.cat([_rounded(part, pixels.dtype) for part in parts])


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.round_().clamp_(0, FULL_SCALE[dtype]).to(dtype)
