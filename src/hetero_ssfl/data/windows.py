"""Turn the values of a scan into 8-bit images: by a window (the values shown from black to white) or by percentiles."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..config import DataConfig
from .decoding import BadImageError

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN = (0.5, 99.5)  # percentiles that become black and white without a window
SAMPLE = 1_000_003  # values of which percentiles are computed
MAX_STRETCH = 50  # a header that claims longer pixels is wrong


def windowed(values: np.ndarray, center: float, width: float, function: str | None = None) -> np.ndarray:
    """Map values to 0 to 1 as the DICOM standard's functions LINEAR, LINEAR_EXACT and SIGMOID do (PS3.3, C.11.2.1)."""
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(-4 * (values.astype(np.float64) - center) / width)))
    if function != "LINEAR_EXACT":
        center, width = center - 0.5, max(width - 1, 1e-6)
    return np.clip((values - (center - width / 2)) / width, 0, 1)


class ValueRange:
    """The values of all planes of a volume or file that become black and white, found when first needed."""

    def __init__(
        self, plane: Callable[[int], np.ndarray], numbers: Sequence[int], known: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.plane, self.numbers, self.known = plane, numbers, known
        self._found: tuple[float, float] | None = None

    def percentiles(self) -> tuple[float, float]:
        if self._found is None:
            step = len(self.numbers) * self.plane(self.numbers[0]).size // SAMPLE | 1
            sample = np.concatenate([self.plane(number).reshape(-1)[::step].copy() for number in self.numbers])
            sample = sample[np.isfinite(sample)]
            if not sample.size:
                raise BadImageError("has no finite values")
            low, high = np.percentile(sample, SHOWN)
            if low == high:  # nearly all of it is background
                low, high = sample.min(), sample.max()
            self._found = float(low), float(high)
        return self._found


def brightness(values: np.ndarray, config: DataConfig, everything: ValueRange) -> np.ndarray:
    """Map values to 0 to 1 by the window of the config or the file or, without one, by percentiles."""
    if not isinstance(config.window, str):
        return windowed(values, *config.window, "LINEAR_EXACT")
    low, high = everything.known
    if config.window != "file" or not low < high:
        low, high = everything.percentiles()
    return np.clip((values - low) / max(high - low, 1e-30), 0, 1)


def to_picture(bright: np.ndarray, spacing: Sequence[float]) -> "Image":
    """Return an 8-bit image with square pixels from values of 0 to 1; nan, outside of what was scanned, is black."""
    from PIL.Image import Resampling, fromarray

    image = fromarray((np.nan_to_num(bright) * 255).round().astype(np.uint8))
    rows, columns = spacing
    if rows > 0 and columns > 0 and 1.01 < max(rows, columns) / min(rows, columns) <= MAX_STRETCH:
        least = min(rows, columns)
        size = (round(image.width * columns / least), round(image.height * rows / least))
        image = image.resize(size, Resampling.BICUBIC)
    return image
