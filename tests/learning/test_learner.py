"""A client's networks: the online network, the predictor, and the target as a moving average."""

import pytest
import torch

from hetero_ssfl.config import ModelConfig, SslConfig, parse_config
from hetero_ssfl.learning.learner import Learner, build_learner, count_parameters
from hetero_ssfl.seeding import rng_for

SSL = SslConfig(kind="byol", projector=(12, 6), predictor=10, ema=0.75)
MODEL = ModelConfig(encoder="resnet8(width=4)")  # 16 wide


def learner(seed: int = 0, model: ModelConfig = MODEL, **ssl) -> Learner:
    return build_learner(model, SSL.model_copy(update=ssl), 3, 8, seed, "client", 0)


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def images(n: int = 4) -> torch.Tensor:
    return torch.randn(n, 3, 8, 8, generator=rng_for(0, "images"))


def perturb(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.add_(torch.randn(p.shape, generator=rng_for(number, "perturb")))


def test_the_target_starts_as_a_copy_of_the_online_network():
    byol = learner()
    assert byol.target is not None
    online, target = byol.online.state_dict(), byol.target.state_dict()
    assert list(online) == list(target)
    assert all(torch.equal(online[key], target[key]) for key in online)
    assert not {p.data_ptr() for p in byol.online.parameters()} & {p.data_ptr() for p in byol.target.parameters()}


def test_the_online_network_is_encoder_and_projector():
    byol = learner()
    byol.eval()
    assert torch.equal(byol.online(images()), byol.represent(images(), "projector"))
    assert count_parameters(byol.online) == count_parameters(byol.encoder) + count_parameters(byol.projector)


@pytest.mark.parametrize("ema", [0.0, 0.75, 1.0])
def test_the_target_moves_by_exactly_one_minus_ema(ema):
    byol = learner(ema=ema)
    perturb(byol.online)
    assert byol.target is not None
    old = [p.double() for p in byol.target.parameters()]
    new = [p.detach().double().clone() for p in byol.online.parameters()]
    byol.move_target()
    for moved, a, b in zip(byol.target.parameters(), old, new, strict=True):
        assert torch.allclose(moved.double(), ema * a + (1 - ema) * b, atol=1e-6)
    assert all(torch.equal(p.double(), b) for p, b in zip(byol.online.parameters(), new, strict=True))


def test_the_target_keeps_its_own_batch_statistics():
    byol = learner()
    byol.online(images())
    assert byol.target is not None
    before = [b.clone() for b in byol.target.buffers()]
    byol.move_target()
    assert all(torch.equal(a, b) for a, b in zip(before, byol.target.buffers(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, byol.online.buffers(), strict=True))


def test_simsiam_has_no_target():
    simsiam = learner(kind="simsiam")
    assert simsiam.target is None
    assert simsiam.target is None
    before = weights(simsiam)
    simsiam.move_target()
    assert torch.equal(weights(simsiam), before)
    assert count_parameters(learner()) == count_parameters(simsiam) + count_parameters(simsiam.online)


def test_the_target_gets_no_gradient_and_everything_else_does():
    byol = learner()
    goal = byol.targets(images())
    assert not goal.requires_grad
    (byol.represent(images().flip(3), "predictor") - goal).square().sum().backward()
    assert byol.target is not None
    assert all(p.grad is None for p in byol.target.parameters())
    trained = [*byol.encoder.parameters(), *byol.projector.parameters(), *byol.predictor.parameters()]
    assert all(p.grad is not None for p in trained)
    assert {id(p) for p in byol.trainable()} == {id(p) for p in trained}


def test_targets_are_the_target_networks_output():
    byol = learner()
    byol.eval()
    perturb(byol.online)
    assert byol.target is not None
    assert torch.equal(byol.targets(images()), byol.target(images()))
    assert not torch.allclose(byol.targets(images()), byol.represent(images(), "projector"))


@pytest.mark.parametrize(("layer", "width"), [("encoder", 16), ("projector", 6), ("predictor", 6)])
def test_each_layer_has_its_width(layer, width):
    assert learner().represent(images(), layer).shape == (4, width)


def test_the_layers_are_applied_in_order():
    byol = learner()
    byol.eval()
    encoded = byol.encoder(images())
    assert torch.equal(byol.represent(images(), "encoder"), encoded)
    assert torch.equal(byol.represent(images(), "projector"), byol.projector(encoded))
    assert torch.equal(byol.represent(images(), "predictor"), byol.predictor(byol.projector(encoded)))


def shapes(head: torch.nn.Sequential) -> list[tuple[int, ...]]:
    return [tuple(layer.weight.shape) for layer in head if isinstance(layer, torch.nn.Linear)]


def test_heads_have_the_widths_of_ssl():
    byol = learner()
    assert shapes(byol.projector) == [(12, 16), (6, 12)]
    assert shapes(byol.predictor) == [(10, 6), (6, 10)]


def test_a_client_can_have_its_own_heads():
    byol = learner(model=ModelConfig(encoder="resnet8(width=4)", projector=(9, 5), predictor=7))
    assert shapes(byol.projector) == [(9, 16), (5, 9)]
    assert shapes(byol.predictor) == [(7, 5), (5, 7)]
    assert byol.targets(images()).shape == byol.represent(images(), "predictor").shape == (4, 5)


def test_clients_of_one_config_get_their_own_heads():
    config = parse_config(
        """
        [ssl]
        projector = [12, 6]
        predictor = 10
        [clients]
        models = ["resnet8(width=4)", {encoder = "vit(width=8, depth=1, heads=2)", projector = [9, 5]}]
        """
    )
    first, second = (build_learner(config.model_of(k), config.ssl, 3, 8, 0, "client", k) for k in range(2))
    assert shapes(first.projector) == [(12, 16), (6, 12)]
    assert shapes(second.projector) == [(9, 8), (5, 9)]
    assert shapes(second.predictor) == [(10, 5), (5, 10)]


def test_the_parameters_depend_only_on_seed_and_scope():
    torch.manual_seed(1)
    first = weights(learner())
    torch.manual_seed(2)
    assert torch.equal(weights(learner()), first)
    assert not torch.equal(weights(learner(seed=1)), first)
    neighbour = build_learner(MODEL, SSL, 3, 8, 0, "client", 1)
    assert not torch.equal(weights(neighbour), first)


def test_building_does_not_change_the_global_generator():
    before = torch.get_rng_state()
    learner()
    assert torch.equal(torch.get_rng_state(), before)
