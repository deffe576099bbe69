"""Floors on generated images where it is known what untrained features can tell."""

import pytest
import torch
from torch import Tensor

from hetero_ssfl.config import EvaluationConfig
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.learning.floors import (
    CONVOLUTIONS,
    FLOORS,
    FULL_WIDTH,
    PIXELS,
    floor_encoder,
    floors_for,
    principal_axes,
)
from hetero_ssfl.learning.probes import Labeled, probe
from hetero_ssfl.seeding import rng_for

LABELS = torch.arange(300) % 2


def of_brightness(scope: str) -> Tensor:
    """Return dark and bright images."""
    noise = torch.rand(300, 3, 16, 16, generator=rng_for(0, scope)) * 60
    return (noise + 120 * LABELS[:, None, None, None]).byte()


def of_stripes(scope: str) -> Tensor:
    """Return horizontal and vertical stripes at random places: the mean image of both classes is the same grey."""
    shift = torch.randint(0, 4, (300, 1, 1), generator=rng_for(0, scope))
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    place = torch.where(LABELS[:, None, None] == 1, rows, columns) + shift
    return (255 * (place % 4 < 2)).byte()[:, None].expand(-1, 3, -1, -1).contiguous()


def linear_probe(name: str, train: Tensor, test: Tensor, width: int) -> float:
    encoder = floor_encoder(name, train, width, seed=0)
    fit, held_out = (Labeled(extract_features(encoder, pixels), LABELS) for pixels in (train, test))
    assert fit.x.shape[1] <= width or name.endswith(FULL_WIDTH)
    return probe(fit, held_out, EvaluationConfig(probes=("linear",), epochs=200, batch=64), 0)["linear"]


@pytest.mark.parametrize("name", FLOORS)
def test_every_floor_tells_dark_from_bright(name: str) -> None:
    assert linear_probe(name, of_brightness("train"), of_brightness("test"), 8) == 100


def test_only_convolutions_tell_stripes_whose_place_is_random() -> None:
    """The class is not a linear function of the pixels: each orientation has the same mean image."""
    train, test = of_stripes("train"), of_stripes("test")
    assert linear_probe(PIXELS, train, test, 1) < 75
    assert linear_probe(CONVOLUTIONS, train, test, 64) == 100


def test_the_same_seed_gives_the_same_floor_and_another_seed_another() -> None:
    images = of_stripes("train")
    first, again, other = (extract_features(floor_encoder(CONVOLUTIONS, images, 8, seed), images) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_principal_axes_of_wide_features_are_nearly_the_exact_ones() -> None:
    rng = rng_for(0)
    wide = torch.randn(200, 12, generator=rng) * torch.arange(12, 0, -1) @ torch.randn(12, 1500, generator=rng)
    torch.manual_seed(0)
    axes, exact = principal_axes(wide, 5), torch.linalg.svd(wide - wide.mean(0), full_matrices=False)[2][:5].T
    assert axes.shape == (1500, 5)
    assert float(torch.linalg.svdvals(axes.T @ exact).min()) > 0.999


@pytest.mark.parametrize("columns", [40, 1100])
def test_directions_without_variance_are_left_out(columns: int) -> None:
    """Of 20 samples, at most 19 directions are known; the others would be noise in a standardised probe."""
    features = torch.randn(20, columns, generator=rng_for(0))
    torch.manual_seed(0)
    assert principal_axes(features, 30).shape == (columns, 19)


def test_samples_that_are_not_images_have_raw_values_only() -> None:
    assert floors_for(torch.zeros(3, 6, 128)) == (PIXELS, PIXELS + FULL_WIDTH)
    assert floors_for(torch.zeros(3, 1, 8, 8)) == FLOORS


def test_large_images_are_averaged_down() -> None:
    large = torch.zeros(4, 3, 64, 64, dtype=torch.uint8)
    assert extract_features(floor_encoder(PIXELS + FULL_WIDTH, large, 8, 0), large).shape == (4, 3 * 32 * 32)
