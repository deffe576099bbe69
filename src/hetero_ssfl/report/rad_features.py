"""The clients' features of the shared images (RAD): kernels, neighbours, maps and thumbnails.

This module does not load encoders: a `FeatureReader` does that (use/encoders.py).
"""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import mean
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..config import AlignmentConfig
from ..data import is_pixels, to_unit_range
from ..kernels.factor import kernel_factor, spectrum
from ..learning.features import nearest
from ..runs.folder import RunFolder

MAX_IMAGES = 512  # more would take minutes with large models and not show more
MAX_CLIENTS = 24
MAX_DIRECTIONS = 64
THUMBNAIL = 32

Map = Literal["pca", "tsne"]


@dataclass(frozen=True)
class RadFeatures:
    """Each client's features of the RAD, before or after training. Kernels use normalised, centred features."""

    names: list[str]
    features: list[Tensor]
    limits: str = ""  # a sentence about clients or images that are left out

    def by_name(self) -> "RadFeatures":
        """Return the same with the clients sorted, as in all tables."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        return RadFeatures([self.names[k] for k in order], [self.features[k] for k in order], self.limits)

    @cached_property
    def factors(self) -> list[Tensor]:
        return [kernel_factor(z, AlignmentConfig(power=1.0)) for z in self.features]

    @cached_property
    def kernels(self) -> list[Tensor]:
        return [a @ a.T for a in self.factors]

    @property
    def spectrum(self) -> Tensor:
        """The fraction of each direction in the mean kernel, largest first."""
        return spectrum(torch.cat(self.factors, dim=1))[:MAX_DIRECTIONS]

    def neighbours(self, count: int) -> list[Tensor]:
        """Return for each client and image the nearest other images by cosine, nearest first."""
        return [nearest(z, torch.arange(len(z)), count)[0] for z in self.features]

    def shared_neighbours(self, count: int) -> float | None:
        """Return how many neighbours of an image two clients have in common on average; None for one client."""
        pairs = combinations(self.neighbours(count), 2)
        common = [float((a[:, :, None] == b[:, None]).sum()) / len(a) for a, b in pairs]
        return mean(common) if common else None


FeatureReader = Callable[[RunFolder, bool], RadFeatures]
"""Returns the features of a run's encoders, trained or untrained. Raises HeteroSSFLError if they are not available."""


def shown_rows(count: int, limit: int = MAX_IMAGES) -> list[int]:
    """Return all row numbers, or `limit` of them at equal distances."""
    return [int(k) for k in np.linspace(0, count - 1, min(count, limit)).round()]


def left_out(clients: int, rows: int) -> str:
    """Return a sentence about clients and RAD rows that are left out, or an empty string."""
    limits = [f"the first {MAX_CLIENTS} of {clients} clients"] if clients > MAX_CLIENTS else []
    limits += [f"{MAX_IMAGES} of {rows} rows of the RAD at equal distances"] if rows > MAX_IMAGES else []
    return f"This section and the next three use {' and '.join(limits)}." if limits else ""


def plane(kernel: Tensor, kind: Map) -> tuple[list[list[float]], str]:
    """Return the position of each image on a map of the kernel, and a description of the map."""
    if kind == "tsne" and len(kernel) >= 8:
        from sklearn.manifold import TSNE

        square = kernel.diag()[:, None] + kernel.diag() - 2 * kernel
        distance = square.clamp_min(0).sqrt().fill_diagonal_(0).numpy()
        model = TSNE(metric="precomputed", init="random", random_state=0, perplexity=min(30.0, len(kernel) / 4))
        return model.fit_transform(distance).tolist(), "t-SNE"
    values, vectors = torch.linalg.eigh(kernel)
    places = vectors[:, -2:].flip(1) * values[-2:].flip(0).clamp_min(0).sqrt()
    places = places * places.gather(0, places.abs().argmax(0, keepdim=True)).sign()  # fix the arbitrary signs
    fractions = (values / values.sum().clamp_min(1e-12)).tolist()
    words = f"PCA; the two directions explain {fractions[-1]:.0%} and {fractions[-2]:.0%} of the variance"
    return places.tolist(), words


def are_pictures(rad: Tensor) -> bool:
    return is_pixels(rad.dtype) and rad.ndim == 4


def thumbnail(pixels: Tensor, side: int = THUMBNAIL) -> str:
    """Return an image (channels, height, width) as a data URL: small images as PNG, larger ones as JPEG.

    Pages show 8 bits, and the mean of all channels as grey if there are not 1 or 3 of them.
    """
    if pixels.dtype != torch.uint8:
        pixels = to_unit_range(pixels).mul_(255).round_().byte()
    if len(pixels) not in (1, 3):
        pixels = pixels.float().mean(0, keepdim=True).round_().byte()
    grid = pixels.permute(1, 2, 0).numpy()
    image = Image.fromarray(grid[:, :, 0] if grid.shape[2] == 1 else grid)
    image.thumbnail((side, side))
    kind = "PNG" if max(pixels.shape[1:]) <= 16 else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=85, optimize=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
