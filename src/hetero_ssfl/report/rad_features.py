"""How each client's encoder represents the shared images (RAD): kernels, neighbours, maps, small pictures.

The encoders themselves are not loaded here: a `FeatureReader` does that (use/rad_features.py).
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..config import AlignmentConfig
from ..consensus import kernel_factor, mutual_cka, spectrum
from ..evaluation.nearest import nearest
from ..runs import RunFolder, load_tensors

MOST_IMAGES = 512  # more would cost minutes on large models and show no more
MOST_CLIENTS = 24
MOST_DIRECTIONS = 64
THUMBNAIL = 32

Map = Literal["pca", "tsne"]


@dataclass(frozen=True)
class RadFeatures:
    """What a run's clients make of the RAD, before or after training; kernels are of unit-length, centred features."""

    names: list[str]
    features: list[Tensor]
    limits: str = ""
    """Says that there are more clients or images, where there are."""

    @cached_property
    def factors(self) -> list[Tensor]:
        plain = AlignmentConfig(power=1.0)
        return [kernel_factor(z, plain) for z in self.features]

    @cached_property
    def kernels(self) -> list[Tensor]:
        return [a @ a.T for a in self.factors]

    @cached_property
    def mean_kernel(self) -> Tensor:
        return torch.stack(self.kernels).mean(0)

    def spectrum(self) -> list[float]:
        """Each direction's share of the mean kernel, largest first."""
        shares: list[float] = spectrum(torch.cat(self.factors, dim=1))[:MOST_DIRECTIONS].tolist()
        return shares

    @cached_property
    def mutual_cka(self) -> list[list[float]]:
        found: list[list[float]] = mutual_cka(self.features).tolist()
        return found

    def neighbours(self, count: int) -> list[Tensor]:
        """For each client and image the nearest others, nearest first, by cosine."""
        return [nearest(z, torch.arange(len(z)), count)[0] for z in self.features]

    def shared_neighbours(self, count: int) -> float | None:
        """How many of an image's nearest two clients have in common on average; None for one client."""
        sets = [[set(row) for row in found.tolist()] for found in self.neighbours(count)]
        common = [
            len(a & b)
            for i, first in enumerate(sets)
            for second in sets[:i]
            for a, b in zip(first, second, strict=True)
        ]
        return sum(common) / len(common) if common else None


FeatureReader = Callable[[RunFolder, bool], RadFeatures]
"""Asks the encoders of a run, trained or untrained; raises HeteroSSFLError where they are not on this machine."""


def shown_rows(count: int, most: int = MOST_IMAGES) -> list[int]:
    """All, or some at equal distances."""
    return [int(k) for k in np.linspace(0, count - 1, min(count, most)).round()]


def rad_of(folder: RunFolder) -> Tensor:
    return load_tensors(folder.path / "rad.safetensors")[0]["pixels"]


def left_out(clients: int, rows: int) -> str:
    """What is not looked at, as a sentence."""
    found = [
        f"the first {MOST_CLIENTS} of {clients} clients" if clients > MOST_CLIENTS else "",
        f"{MOST_IMAGES} of {rows} rows of the RAD at equal distances" if rows > MOST_IMAGES else "",
    ]
    return f"Here and in the next three sections: {', '.join(filter(None, found))}." if any(found) else ""


def plane(kernel: Tensor, kind: Map) -> tuple[list[tuple[float, float]], str]:
    """Each image's place on a map of the kernel, and what the map is in words."""
    if kind == "tsne" and len(kernel) >= 8:
        from sklearn.manifold import TSNE

        square = kernel.diag()[:, None] + kernel.diag() - 2 * kernel
        distance = square.clamp_min(0).sqrt().fill_diagonal_(0).numpy()
        model = TSNE(metric="precomputed", init="random", random_state=0, perplexity=min(30.0, len(kernel) / 4))
        return [(float(x), float(y)) for x, y in model.fit_transform(distance)], "t-SNE"
    values, vectors = torch.linalg.eigh(kernel)
    places = vectors[:, -2:].flip(1) * values[-2:].flip(0).clamp_min(0).sqrt()
    places = places * places.gather(0, places.abs().argmax(0, keepdim=True)).sign()  # else the solver's whim
    shares = (values / values.sum().clamp_min(1e-12)).tolist()
    words = f"PCA, the two directions carry {shares[-1]:.0%} and {shares[-2]:.0%} of the variation"
    return [(float(x), float(y)) for x, y in places.tolist()], words


def are_pictures(rad: Tensor) -> bool:
    return rad.dtype == torch.uint8 and rad.ndim == 4 and rad.shape[1] in (1, 3)


def thumbnail(pixels: Tensor, side: int = THUMBNAIL) -> str:
    """One image (channels, height, width) as a data address: small ones exactly, larger ones as JPEG."""
    grid = pixels.permute(1, 2, 0).numpy()
    image = Image.fromarray(grid[:, :, 0] if grid.shape[2] == 1 else grid)
    image.thumbnail((side, side))
    kind = "PNG" if max(pixels.shape[1:]) <= 16 else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=85, optimize=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def mean_off_diagonal(matrix: Sequence[Sequence[float]]) -> float | None:
    values = [value for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j]
    return sum(values) / len(values) if values else None
