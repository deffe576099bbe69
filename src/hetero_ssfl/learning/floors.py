"""Floors: features that nobody trained. An encoder that does not beat them has learned nothing that counts.

- raw pixels: the image itself, at most MAX_SIDE pixels wide;
- untrained convolutions: two random 3x3 convolutions with ReLU and 2x2 pooling, 256 features.

Each at the width of a trained encoder, reduced by PCA of the labeled images, and at full width. They are encoders like
any other, so they are probed with the same probes, labels and images.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..seeding import global_seed
from .features import extract_features

PIXELS, CONVOLUTIONS = "raw pixels", "untrained convolutions"
FULL_WIDTH = ", full width"
FLOORS = (PIXELS, CONVOLUTIONS, PIXELS + FULL_WIDTH, CONVOLUTIONS + FULL_WIDTH)
MAX_SIDE = 32  # larger images would only make the probe slow
MAX_EXACT_WIDTH = 1024  # of features whose principal axes are computed exactly
NEGLIGIBLE = 1e-6  # a variance, relative to the largest


class RawPixels(nn.Module):
    """The values of a sample as one vector."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.ndim == 4 and x.shape[-1] > MAX_SIDE
        return (F.adaptive_avg_pool2d(x, MAX_SIDE) if large else x).flatten(1)


class Projected(nn.Module):
    """Features of another encoder on their principal axes."""

    def __init__(self, encoder: nn.Module, axes: Tensor, centre: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("axes", axes)
        self.register_buffer("centre", centre)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = (self.encoder(x) - self.centre) @ self.axes
        return projected


def floors_for(samples: Tensor) -> tuple[str, ...]:
    """Return the names of the floors for such samples; only images have convolutions."""
    return FLOORS if samples.ndim == 4 else tuple(name for name in FLOORS if name.startswith(PIXELS))


def floor_encoder(name: str, labeled: Tensor, width: int, seed: int) -> nn.Module:
    """Return a floor as an encoder. PCA of the labeled images makes it `width` wide, unless it is one of full width."""
    with global_seed(seed, "floor"):
        encoder = RawPixels() if name.startswith(PIXELS) else _convolutions(labeled.shape[1])
        features = extract_features(encoder, labeled)
        if name.endswith(FULL_WIDTH) or features.shape[1] <= width:
            return encoder
        return Projected(encoder, principal_axes(features, width), features.mean(0)).eval()


def _convolutions(in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    ).eval()  # fmt: skip


def principal_axes(features: Tensor, width: int) -> Tensor:
    """Return at most `width` directions of largest variance, as columns.

    Directions without variance are left out: a probe that standardises its features would turn them into noise.
    """
    if features.shape[1] > MAX_EXACT_WIDTH:  # seconds instead of minutes, from torch's global generator
        _, deviations, axes = torch.pca_lowrank(features, min(width + 16, *features.shape), niter=4)
        variances = deviations**2
    else:
        centred = (features - features.mean(0)).double()
        variances, axes = (part.flip(-1) for part in torch.linalg.eigh(centred.T @ centred))
    kept = variances[:width] > NEGLIGIBLE * variances[0]
    return axes[:, :width][:, kept].float()
