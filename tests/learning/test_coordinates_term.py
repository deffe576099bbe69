"""The alignment term with coordinates: the formula, and what it costs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.learning.alignment import Coordinates
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.learning.training import Step, TrainingClient, train
from hetero_ssfl.seeding import rng_for

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

SETTINGS = (
    *("alignment.distance=coordinates", "alignment.coordinates=5", "rad.in_ssl=true", "ssl.kind=simclr"),
    *("optim.batch=12", "local_epochs=1", "ssl.projector=[16, 8]", "alignment.rad_batch=16"),
)


def tiny(*overrides: str) -> Config:
    return load_config("smoke", [*SETTINGS, *overrides])


def make_client(config: Config) -> TrainingClient:
    """Return a client with 24 images of its own and 24 in the RAD."""
    model = config.model_of(0).model_copy(update={"encoder": "resnet8(width=4)"})
    learner = build_learner(model, config.ssl, 3, 16, 0, coordinates=5)
    own, rad = (torch.randint(0, 256, (24, 3, 16, 16), dtype=torch.uint8, generator=rng_for(0, s)) for s in ("a", "b"))
    return TrainingClient("client-000", config, learner, own, rad)


def wanted(rows: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, 5, generator=rng_for(1)), dim=1)


def places_of(vectors: torch.Tensor, anchors: torch.Tensor) -> Array:
    """Return the softmax of each vector's similarities to the anchors, at temperature 0.1."""
    units = vectors.detach().numpy() / np.linalg.norm(vectors.detach().numpy(), axis=1, keepdims=True)
    weights = np.exp(units @ anchors.numpy().T / 0.1)
    return weights / weights.sum(1, keepdims=True)


def divergence(there: Array, here: Array) -> float:
    return float((there * np.log(there / here)).sum(1).mean())


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_head_is_pulled_to_an_rad_images_coordinates_and_to_an_own_images_other_view(weight: float) -> None:
    client, targets = make_client(tiny(f"alignment.own_images={weight}")), wanted(24)
    head = client.learner.head
    assert head is not None
    features = [torch.randn(6, head.in_features, generator=rng_for(k)) for k in range(2)]
    rows = torch.tensor([3, 24, 0, 47, 23, 30])  # the client has 24 images of its own: RAD images 0, 23 and 6
    term = Coordinates(client, targets, mu=3.0)(client.learner, rng_for(0), Step(0, rows, features))
    shared = [
        divergence(places_of(targets[[0, 23, 6]], targets), places_of(head(f[[1, 3, 5]]), targets)) for f in features
    ]
    first, second = (places_of(head(f[[0, 2, 4]]), targets) for f in features)
    own = (divergence(second, first) + divergence(first, second)) / 2
    assert float(term.detach()) == pytest.approx(3.0 * (sum(shared) / 2 + weight * own), rel=1e-4)


def test_without_rad_images_in_a_batch_only_own_images_count() -> None:
    client, targets = make_client(tiny("alignment.own_images=0")), wanted(24)
    features = [torch.randn(2, 16, generator=rng_for(k)) for k in range(2)]
    assert (
        float(Coordinates(client, targets, mu=3.0)(client.learner, rng_for(0), Step(0, torch.tensor([1, 2]), features)))
        == 0
    )


def test_the_place_of_the_other_view_has_no_gradient() -> None:
    client, targets = make_client(tiny()), wanted(24)
    still, moved = (torch.randn(2, 16, generator=rng_for(k), requires_grad=True) for k in range(2))
    rows = torch.tensor([1, 2])
    head = client.learner.head
    assert head is not None
    term = Coordinates(client, targets, mu=1.0)(client.learner, rng_for(0), Step(0, rows, [still, moved]))
    there = torch.from_numpy(places_of(head(moved), targets))
    units = F.normalize(head(still), dim=1) @ targets.T / 0.1
    alone = F.kl_div(units.log_softmax(1), there, reduction="batchmean") / 2
    (gradient,) = torch.autograd.grad(term, still)
    (expected,) = torch.autograd.grad(alone, still)
    assert torch.allclose(gradient, expected, atol=1e-6)


def passes_of_a_round(*settings: str) -> tuple[int, float]:
    """Return how often the encoder ran in one round of training, and the mean of the term."""
    client = make_client(tiny(*settings))
    calls = []
    client.learner.encoder.register_forward_hook(lambda *_: calls.append(1))
    metrics = train(client, 1, Coordinates(client, wanted(24), mu=1.0))
    return len(calls), metrics["loss_alignment"]


def test_rad_images_that_are_in_the_batch_cost_no_additional_pass() -> None:
    steps = (24 + 24) // 12
    calls, term = passes_of_a_round()
    assert calls == 2 * steps
    assert 0.5 < term < 10
    steps = 24 // 12
    assert passes_of_a_round("rad.in_ssl=false")[0] == 3 * steps


def test_training_moves_the_head_to_the_coordinates() -> None:
    client, targets = make_client(tiny("optim.kind=adamw", "optim.lr=0.01", "local_epochs=16")), wanted(24)

    def distance(learner: Learner) -> float:
        learner.eval()
        assert learner.head is not None
        with torch.no_grad():
            outputs = learner.head(learner.encoder((client.rad.float() / 255 - 0.5) / 0.25))
        return divergence(places_of(targets, targets), places_of(outputs, targets))

    before = distance(client.learner)
    train(client, 1, Coordinates(client, targets, mu=2.0))
    assert distance(client.learner) < 0.8 * before
