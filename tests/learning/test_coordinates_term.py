"""The alignment term with coordinates: the formula, and what it costs."""

import pytest
import torch
import torch.nn.functional as F

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.learning.alignment import Coordinates
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.learning.training import Step, TrainingClient, train
from hetero_ssfl.seeding import rng_for

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


def test_the_term_pulls_the_heads_output_for_rad_images_to_their_coordinates() -> None:
    client, targets = make_client(tiny()), wanted(24)
    features = [torch.randn(6, client.learner.head.in_features, generator=rng_for(k)) for k in range(2)]  # type: ignore[union-attr]
    rows = torch.tensor([3, 24, 0, 47, 23, 30])  # the client has 24 images of its own: RAD images 0, 23 and 6
    term = Coordinates(client, targets, mu=3.0)(client.learner, rng_for(0), Step(0, rows, features))
    expected = 0.0
    for view in features:
        for place, image in ((1, 0), (3, 23), (5, 6)):
            predicted = client.learner.head(view[place])  # type: ignore[misc]
            cosine = predicted @ targets[image] / predicted.norm() / targets[image].norm()
            expected += 3.0 * float(1 - cosine) / 6
    assert float(term.detach()) == pytest.approx(expected, rel=1e-5)
    none = Step(0, torch.tensor([1, 2]), [view[:2] for view in features])
    assert float(Coordinates(client, targets, mu=3.0)(client.learner, rng_for(0), none)) == 0


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
    assert 0.5 < term < 1.5
    steps = 24 // 12
    assert passes_of_a_round("rad.in_ssl=false")[0] == 3 * steps


def test_training_moves_the_head_to_the_coordinates() -> None:
    client, targets = make_client(tiny("optim.kind=adamw", "optim.lr=0.01", "local_epochs=16")), wanted(24)

    def distance(learner: Learner) -> float:
        learner.eval()
        assert learner.head is not None
        with torch.no_grad():
            outputs = learner.head(learner.encoder((client.rad.float() / 255 - 0.5) / 0.25))
        return float(1 - F.cosine_similarity(outputs, targets).mean())

    before = distance(client.learner)
    train(client, 1, Coordinates(client, targets, mu=8.0))
    assert distance(client.learner) < before - 0.1
