"""VICReg, SimCLR and Barlow Twins compared with formulas written as loops, and changes that each must detect."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetero_ssfl.config import ModelConfig, SslConfig
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.learning.losses import LOCAL_LOSSES, local_loss
from hetero_ssfl.learning.losses.barlow_twins import barlow_twins
from hetero_ssfl.learning.losses.simclr import simclr
from hetero_ssfl.learning.losses.vicreg import vicreg
from hetero_ssfl.seeding import rng_for

SSL = SslConfig()


def pair(n: int = 7, d: int = 4, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    rng = rng_for(0, n, d)
    z = torch.randn(n, d, generator=rng, dtype=torch.double)
    return z, z + noise * torch.randn(n, d, generator=rng, dtype=torch.double)


def column(z: Tensor, j: int) -> list[float]:
    return [float(row[j]) for row in z]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def covariance(a: list[float], b: list[float], divisor: int) -> float:
    return sum((x - mean(a)) * (y - mean(b)) for x, y in zip(a, b, strict=True)) / divisor


def test_vicreg_equals_its_formula() -> None:
    a, b = pair()
    (n, d), expected = a.shape, 0.0
    expected += SSL.invariance * mean([float(a[i, j] - b[i, j]) ** 2 for i in range(n) for j in range(d)])
    for z in (a, b):
        columns = [column(z, j) for j in range(d)]
        stds = [math.sqrt(covariance(c, c, n - 1) + 1e-4) for c in columns]
        expected += SSL.variance * mean([max(0.0, 1 - s) for s in stds]) / 2
        crossed = [covariance(columns[i], columns[j], n - 1) ** 2 for i in range(d) for j in range(d) if i != j]
        expected += SSL.covariance * sum(crossed) / d
    assert float(vicreg(a, b, SSL)) == pytest.approx(expected, rel=1e-9)


def test_barlow_twins_equals_its_formula() -> None:
    a, b = pair()
    (n, d), expected = a.shape, 0.0
    for i in range(d):
        for j in range(d):
            x, y = column(a, i), column(b, j)
            scale = math.sqrt((covariance(x, x, n) + 1e-5) * (covariance(y, y, n) + 1e-5))
            c = covariance(x, y, n) / scale
            expected += (1 - c) ** 2 if i == j else SSL.redundancy * c**2
    assert float(barlow_twins(a, b, SSL)) == pytest.approx(expected, rel=1e-9)


def test_simclr_equals_its_formula() -> None:
    a, b = pair()
    z = [row / row.norm() for row in (*a, *b)]
    n, losses = len(a), []
    for i in range(2 * n):
        other = (i + n) % (2 * n)
        scores = {k: math.exp(float(z[i] @ z[k]) / SSL.temperature) for k in range(2 * n) if k != i}
        losses.append(-math.log(scores[other] / sum(scores.values())))
    assert float(simclr(a, b, SSL)) == pytest.approx(mean(losses), rel=1e-9)


@pytest.mark.parametrize("loss", [vicreg, barlow_twins, simclr])
def test_a_collapsed_network_and_views_of_other_images_have_a_higher_loss(
    loss: Callable[[Tensor, Tensor, SslConfig], Tensor],
) -> None:
    a, b = pair(64, 8, noise=0.1)
    good = float(loss(a, b, SSL))
    assert float(loss(a, b.flip(0), SSL)) > good
    flat = torch.ones_like(a) + 1e-3 * a
    assert float(loss(flat, flat, SSL)) > good


@pytest.mark.parametrize("kind", LOCAL_LOSSES)
def test_every_loss_trains_the_encoder_with_any_number_of_views(kind: str) -> None:
    ssl = SslConfig(kind=kind, projector=(16, 8), predictor=16)
    learner = build_learner(ModelConfig(encoder="resnet8(width=4)"), ssl, 3, 16, seed=0)
    for count in (2, 4):
        learner.zero_grad()
        loss, z = local_loss(learner, list(torch.randn(count, 8, 3, 16, 16)))
        loss.backward()
        assert z.shape == (8, 8)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in learner.encoder.parameters())


def own_loss(learner: Learner, views: list[Tensor]) -> tuple[Tensor, Tensor]:
    z = [learner.represent(view, "projector") for view in views]
    return (z[0] - z[1]).square().mean(), z[0]


def broken_loss(learner: Learner, views: list[Tensor]) -> Tensor:
    return own_loss(learner, views)[0]


def test_a_users_loss_is_found_by_name_and_checked() -> None:
    views = list(torch.randn(2, 8, 3, 16, 16))
    model = ModelConfig(encoder="resnet8(width=4)")
    mine, broken = (
        build_learner(model, SslConfig(kind=f"{__name__}:{name}"), 3, 16, seed=0)
        for name in ("own_loss", "broken_loss")
    )
    mine.eval()
    assert torch.equal(local_loss(mine, views)[0], own_loss(mine, views)[0])
    with pytest.raises(ConfigError, match=r"ssl.kind = .*broken_loss' returned \(\), NoneType, expected a loss"):
        local_loss(broken, views)


def test_a_users_loss_has_a_target_network_that_follows_the_online_one() -> None:
    ssl, view = SslConfig(kind=f"{__name__}:own_loss"), torch.randn(8, 3, 16, 16)
    learner = build_learner(ModelConfig(encoder="resnet8(width=4)"), ssl, 3, 16, seed=0).eval()
    assert torch.equal(learner.targets(view), learner.represent(view, "projector"))
    with torch.no_grad():
        for parameter in learner.projector.parameters():
            parameter.add_(1.0)
    learner.move_target(0.75)
    weights = learner.state_dict()
    assert torch.allclose(weights["target.1.3.bias"], weights["projector.3.bias"] - 0.75)
    assert not learner.targets(view).requires_grad
