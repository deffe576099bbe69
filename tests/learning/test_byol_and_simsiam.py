import pytest
import torch
import torch.nn.functional as F

from hetero_ssfl.config import ModelConfig, SslConfig
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.learning.losses.byol import byol, regression_loss
from hetero_ssfl.learning.losses.simsiam import simsiam
from hetero_ssfl.learning.training import feature_spread


def learner(kind: str) -> Learner:
    model = ModelConfig(encoder="resnet8(width=4)")
    return build_learner(model, SslConfig(kind=kind, projector=(16, 8), predictor=16), 3, 16, seed=0)


def test_regression_loss_is_the_squared_distance_of_unit_vectors() -> None:
    p, t = torch.randn(10, 6), torch.randn(10, 6)
    unit_p, unit_t = p / p.norm(dim=1, keepdim=True), t / t.norm(dim=1, keepdim=True)
    assert float(regression_loss(p, t)) == pytest.approx(float((unit_p - unit_t).square().sum(1).mean()), abs=1e-5)


def test_raw_outputs_can_be_compared_as_in_the_paper() -> None:
    p, t = torch.randn(10, 6), torch.randn(10, 6)
    assert float(regression_loss(p, t, normalize=False)) == pytest.approx(float(((p - t) ** 2).sum() / 10), rel=1e-5)


def test_the_loss_is_four_for_opposite_and_zero_for_equal_vectors() -> None:
    p = torch.randn(5, 3)
    assert float(regression_loss(p, 7 * p)) == pytest.approx(0, abs=1e-6)
    assert float(regression_loss(p, -p)) == pytest.approx(4, abs=1e-6)


def test_byol_sums_both_orders_of_the_views() -> None:
    net, (a, b) = learner("byol"), torch.randn(2, 8, 3, 16, 16)
    net.eval()  # so that the order of the passes does not matter
    loss, _ = byol(net, [a, b])
    assert net.target is not None
    with torch.no_grad():
        online = {name: net.predictor(net.projector(net.encoder(x))) for name, x in (("a", a), ("b", b))}
        expected = regression_loss(online["a"], net.target(b)) + regression_loss(online["b"], net.target(a))
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-6)


def test_one_order_of_raw_outputs_is_the_loss_in_the_paper() -> None:
    """The loss is ||predictor(z_1) - t_2||^2."""
    ssl = SslConfig(kind="byol", projector=(16, 8), predictor=16, normalize=False, symmetric=False)
    net, (a, b) = (
        build_learner(ModelConfig(encoder="resnet8(width=4)"), ssl, 3, 16, seed=0),
        torch.randn(2, 8, 3, 16, 16),
    )
    net.eval()
    assert net.target is not None
    with torch.no_grad():
        expected = (net.predictor(net.projector(net.encoder(a))) - net.target(b)).square().sum(1).mean()
    assert byol(net, [a, b])[0].item() == pytest.approx(float(expected), rel=1e-5)


def test_byol_of_three_views_is_the_mean_over_their_pairs() -> None:
    net, views = learner("byol"), list(torch.randn(3, 8, 3, 16, 16))
    net.eval()
    pairs = [byol(net, [views[i], views[j]])[0].item() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert byol(net, views)[0].item() == pytest.approx(sum(pairs) / 3, abs=1e-6)


def test_simsiam_has_the_gradient_of_the_published_loss() -> None:
    """D(p_1, z_2) / 2 + D(p_2, z_1) / 2 with D = -cos and no gradient through z (Chen and He, 2021)."""
    net, (a, b) = learner("simsiam"), torch.randn(2, 8, 3, 16, 16)
    net.eval()
    simsiam(net, [a, b])[0].backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    z_a, z_b = (net.represent(x, "projector") for x in (a, b))
    d_ab = -F.cosine_similarity(net.predictor(z_a), z_b.detach()).mean()
    d_ba = -F.cosine_similarity(net.predictor(z_b), z_a.detach()).mean()
    (d_ab / 2 + d_ba / 2).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-6, rtol=1e-4)


def test_spread_is_one_for_noise_and_zero_for_a_collapsed_network() -> None:
    noise = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    assert float(feature_spread(noise)) == pytest.approx(1, abs=0.02)
    assert float(feature_spread(torch.ones(32, 64))) == pytest.approx(0, abs=1e-6)
