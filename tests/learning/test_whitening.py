"""The fixed first layer: its filters whiten the RAD's patches, and training does not change them."""

import pytest
import torch
import torch.nn.functional as F

from hetero_ssfl.data import to_input
from hetero_ssfl.learning.encoders import build_encoder
from hetero_ssfl.learning.encoders.whitening import NOISE, Whitening, fit_whitening, whitening_filters
from hetero_ssfl.seeding import global_seed, rng_for


def smooth_images(channels: int = 3) -> torch.Tensor:
    """Return images whose neighbouring pixels and channels are correlated."""
    noise = torch.rand(60, channels, 8, 8, generator=rng_for(0, "images"))
    mixed = F.interpolate(noise + noise.mean(1, keepdim=True), size=16, mode="bilinear")
    return (mixed / mixed.max() * 255).byte()


@pytest.mark.parametrize("size", [2, 3])
def test_filtered_patches_are_uncorrelated_with_the_expected_variances(size: int) -> None:
    rad = smooth_images()
    filters = whitening_filters(rad, size).double()
    patches = F.unfold(to_input(rad).double().contiguous(), size).transpose(1, 2).flatten(0, 1)
    variances = torch.linalg.eigvalsh(torch.cov(patches.T)).flip(0)
    covariance = torch.cov((patches @ filters.flatten(1).T).T)
    assert torch.allclose(covariance, torch.diag(variances / (variances + NOISE)), atol=1e-3)
    raw = torch.corrcoef(patches.T)
    assert float((raw - torch.eye(len(raw))).abs().max()) > 0.5, "before, they were correlated"


def test_both_signs_keep_everything_that_the_filters_see() -> None:
    rad = smooth_images(channels=1)
    layer = Whitening(1, 3)
    fit_whitening(layer, rad)
    x = to_input(rad[:4])
    positive, negative = layer(x).chunk(2, dim=1)
    assert positive.shape == (4, 9, 16, 16)
    assert torch.allclose(positive - negative, F.conv2d(x, layer.filters, padding=1))
    assert float(torch.minimum(positive, negative).abs().max()) == 0


@pytest.mark.parametrize("name", ["resnet8(width=4, stem=2", "mobilenet(width=4, depth=1", "vit(width=8, heads=2"])
def test_every_family_has_whitening_and_pooling(name: str) -> None:
    encoder, width = build_encoder(f"{name}, whiten=3, pool=2)", 3, 16)
    _, narrow = build_encoder(f"{name})", 3, 16)
    assert width == 4 * narrow
    fit_whitening(encoder, smooth_images())
    (layer,) = (module for module in encoder.modules() if isinstance(module, Whitening))
    assert not list(layer.parameters())
    assert any(key.endswith("filters") for key in encoder.state_dict())
    assert bool(layer.filters.any())


def test_pooling_keeps_where_something_is() -> None:
    corner = torch.zeros(1, 3, 16, 16)
    corner[..., :8, :8] = 1
    turned = corner.flip(-1)
    for pool, tells in ((1, False), (2, True)):
        with global_seed(0, "pool"):
            encoder, _ = build_encoder(f"vit(width=8, depth=1, heads=2, pool={pool})", 3, 16)
        torch.nn.init.zeros_(encoder.get_parameter("positions"))  # without them, only pooling can tell where a patch is
        here, there = encoder.eval()(torch.cat([corner, turned]))
        assert torch.allclose(here, there, atol=1e-5) is not tells
