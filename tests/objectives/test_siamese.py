import pytest
import torch

from hetero_ssfl.config import ModelConfig, SslConfig
from hetero_ssfl.models import Learner, build_learner
from hetero_ssfl.objectives import feature_spread, regression_loss, siamese_loss


def learner(kind: str) -> Learner:
    model = ModelConfig(encoder="resnet8(width=4)")
    return build_learner(model, SslConfig(kind=kind, projector=(16, 8), predictor=16), 3, 16, seed=0)


def test_regression_loss_is_the_squared_distance_of_unit_vectors() -> None:
    p, t = torch.randn(10, 6), torch.randn(10, 6)
    unit_p, unit_t = p / p.norm(dim=1, keepdim=True), t / t.norm(dim=1, keepdim=True)
    assert float(regression_loss(p, t)) == pytest.approx(float((unit_p - unit_t).square().sum(1).mean()), abs=1e-5)


def test_raw_outputs_can_be_compared_as_the_paper_prints_it() -> None:
    p, t = torch.randn(10, 6), torch.randn(10, 6)
    assert float(regression_loss(p, t, normalize=False)) == pytest.approx(float(((p - t) ** 2).sum() / 10), rel=1e-5)


def test_opposite_vectors_cost_four_and_equal_ones_nothing() -> None:
    p = torch.randn(5, 3)
    assert float(regression_loss(p, 7 * p)) == pytest.approx(0, abs=1e-6)
    assert float(regression_loss(p, -p)) == pytest.approx(4, abs=1e-6)


def test_byol_sums_both_orders_of_the_views() -> None:
    net, (a, b) = learner("byol"), torch.randn(2, 8, 3, 16, 16)
    net.eval()  # so that the order of the passes cannot matter
    loss, _ = siamese_loss(net, a, b)
    assert net.target is not None
    with torch.no_grad():
        online = {name: net.predictor(net.projector(net.encoder(x))) for name, x in (("a", a), ("b", b))}
        expected = regression_loss(online["a"], net.target(b)) + regression_loss(online["b"], net.target(a))
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-6)


def test_simsiam_stops_the_gradient_at_the_target_side() -> None:
    net, (a, b) = learner("simsiam"), torch.randn(2, 8, 3, 16, 16)
    net.eval()
    siamese_loss(net, a, b)[0].backward()
    grad = net.projector[0].weight.grad.clone()
    net.zero_grad()
    z_a, z_b = (net.represent(x, "projector") for x in (a, b))
    cos = torch.nn.functional.cosine_similarity
    (4 - 2 * cos(net.predictor(z_a), z_b.detach()).mean() - 2 * cos(net.predictor(z_b), z_a.detach()).mean()).backward()
    assert torch.allclose(grad, net.projector[0].weight.grad, atol=1e-6)


def test_spread_is_one_for_noise_and_zero_for_a_collapsed_network() -> None:
    noise = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    assert float(feature_spread(noise)) == pytest.approx(1, abs=0.02)
    assert float(feature_spread(torch.ones(32, 64))) == pytest.approx(0, abs=1e-6)
