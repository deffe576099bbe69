"""Averaging of weights: FedSSL, its cases FedBYOL and FedSimSiam, and supervised FedAvg. Each round:
1. the server sends the global online encoder, projector and predictor, which replace the client's own;
2. the client trains on its loss; BYOL's target network stays local;
3. the client returns the three networks; the server averages them with weights n_k / n over the round's clients.

BatchNorm's running statistics are averaged like weights; its integer batch counter takes the largest value.

A reply that is far from the others is refused (weight_checks.py). With `averaging.trim` the mean is a trimmed one.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..data import random_view
from ..errors import ProtocolError
from ..learning.learner import Learner
from ..learning.training import TrainingClient, train
from .base import Broadcast, ClientId, Method, ServerState, Update, check_like
from .weight_checks import STATISTICS, check_statistics, misfits, parameters

ENCODER = ("encoder.", "projector.")
NETWORKS = (*ENCODER, "predictor.")
MAX_GROWTH = 10.0  # a round may multiply the norm of all parameters by at most this factor
SHORTCUTS = (".shortcut.", ".downsample.")  # their names in this package and in torchvision


class FedSSL(Method):
    """FedAvg of networks that train with any local loss. With SimCLR it is known as FedSimCLR."""

    name = "fedssl"
    opening = "first"  # all clients start from one initialisation: an average of several would be useless
    averages_weights = True
    shared: ClassVar[tuple[str, ...]] = NETWORKS
    """Prefixes of the weights that are sent."""

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        return Broadcast(state.round + 1, state.shared)

    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        self.load(client, down)
        metrics = self.train(client, down.round) if down.round > 0 else {}
        return Update(len(client.pixels), shared_weights(client.learner, self.shared), metrics)

    def load(self, client: TrainingClient, down: Broadcast) -> None:
        """Client: replace or mix its networks with the global ones."""
        load_shared(client, down.arrays)

    def train(self, client: TrainingClient, round_number: int) -> dict[str, float]:
        return train(client, round_number)

    def global_model(self, state: ServerState) -> Mapping[str, Tensor]:
        return state.shared

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        super().check(state, client, update)
        check_statistics(update.arrays, state.shared, client)
        if not state.shared:  # the opening: there is nothing to compare with yet
            if not update.arrays:
                raise ProtocolError(f"{client} sent no weights, expected the weights of its networks.")
            return
        check_like(update.arrays, state.shared, client)
        size, usual = norm_of_parameters(update.arrays), max(norm_of_parameters(state.shared), 1.0)
        if size > MAX_GROWTH * usual:
            raise ProtocolError(
                f"{client} sent weights {size / usual:.0f} times as large as the global weights, "
                f"expected at most {MAX_GROWTH:.0f} times."
            )

    def check_broadcast(self, client: TrainingClient, down: Broadcast) -> None:
        super().check_broadcast(client, down)
        weights = {key: value for key, value in down.arrays.items() if key.startswith(self.shared)}
        if weights or down.round > 0:
            check_like(weights, shared_weights(client.learner, self.shared), "the server")

    def misfits(self, state: ServerState, updates: Mapping[ClientId, Update]) -> Mapping[ClientId, str]:
        if not state.shared:
            return {}
        steps = {name: self.config.steps_of(update.examples) for name, update in updates.items()}
        return misfits(state.shared, {name: update.arrays for name, update in updates.items()}, steps)

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        replies, trim = [updates[name] for name in state.roster if name in updates], self.config.averaging.trim
        models = [reply.arrays for reply in replies]
        shared = trimmed_mean(models, trim) if trim else average(models, [reply.examples for reply in replies])
        return replace(state, round=state.round + 1, shared=shared)


class FedBYOL(FedSSL):
    """FedSSL with BYOL, whose target networks stay with the clients."""

    name = "fedbyol"
    ssl_kind = "byol"


class FedSimSiam(FedSSL):
    """FedSSL with SimSiam."""

    name = "fedsimsiam"
    ssl_kind = "simsiam"


class FedAvg(FedSSL):
    """Supervised training of the encoder and a linear classifier on one view of each image. BYOL's heads are unused."""

    name = "fedavg"
    needs_labels = True
    shared = ("encoder.", "classifier.")

    def train(self, client: TrainingClient, round_number: int) -> dict[str, float]:
        return train(client, round_number, objective=supervised)


def supervised(client: TrainingClient, pixels: Tensor, labels: Tensor | None, rng: Generator) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of the classifier."""
    assert labels is not None
    assert client.learner.classifier is not None
    features = client.learner.encoder(random_view(pixels, client.config.views, rng))
    return F.cross_entropy(client.learner.classifier(features), labels), features


def load_shared(client: TrainingClient, weights: Mapping[str, Tensor], also_target: bool = False) -> None:
    """Replace the client's networks by the global ones. Does nothing in the opening, which sends no weights."""
    learner = client.learner
    if weights:
        learner.load_state_dict({**learner.state_dict(), **weights})
        if learner.target is not None and (also_target or client.round == 0):
            # A target network with a different initialisation than the online network would give noise as targets.
            learner.target.load_state_dict(learner.online.state_dict())


def global_weights(down: Broadcast) -> dict[str, Tensor]:
    """Return only the networks of a broadcast."""
    return {key: value for key, value in down.arrays.items() if key.startswith(NETWORKS)}


def measured_training(client: TrainingClient, round_number: int) -> dict[str, float]:
    """Train, and measure how far training moved the encoder (`drift`)."""
    before = shared_weights(client.learner)
    metrics = train(client, round_number)
    return {**metrics, "drift": divergence(before, shared_weights(client.learner), client.config.averaging.norm)}


def divergence(a: Mapping[str, Tensor], b: Mapping[str, Tensor], norm: str) -> float:
    """Return the distance between two online encoders.

    `layer-mean` is the mean of ||W_a - W_b|| over convolutions, as in FedU's published code, without shortcuts,
    projector and BatchNorm. For an encoder without convolutions it is the mean over weight matrices.
    `euclidean` is ||W_a - W_b|| over all parameters of encoder and projector.
    """
    keys = [k for k in a if k.startswith(ENCODER) and a[k].is_floating_point() and not k.endswith(STATISTICS)]
    if norm == "layer-mean":
        weights = [k for k in keys if k.startswith("encoder.") and not any(part in k for part in SHORTCUTS)]
        convolutions = [k for k in weights if a[k].ndim == 4] or [k for k in weights if a[k].ndim > 1]
        return sum(float((a[k] - b[k]).norm()) for k in convolutions) / len(convolutions)
    return sum(float((a[k].double() - b[k].double()).square().sum()) for k in keys) ** 0.5


def norm_of_parameters(weights: Mapping[str, Tensor]) -> float:
    """Return ||W|| over all parameters."""
    return sum(float(weights[key].double().square().sum()) for key in parameters(weights)) ** 0.5


def shared_weights(learner: Learner, parts: tuple[str, ...] = NETWORKS) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in learner.state_dict().items() if k.startswith(parts)}


def average(models: list[Mapping[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    """Return sum_k n_k W_k / sum_k n_k for floating-point entries, the maximum for integer entries."""
    total, out = sum(sizes), {}
    for key, first in models[0].items():
        if first.is_floating_point():
            mean = sum(m[key].double() * (n / total) for m, n in zip(models, sizes, strict=True))
            out[key] = torch.as_tensor(mean).to(first.dtype)
        else:
            out[key] = torch.stack([m[key] for m in models]).amax(0)
    return out


def trimmed_mean(models: list[Mapping[str, Tensor]], trim: float) -> dict[str, Tensor]:
    """Return the mean of each entry without its smallest and largest values, a fraction `trim` of the models each, but
    of at least one or two in the middle. All models count equally, since a liar would claim a large size."""
    count = len(models)
    cut = min(math.ceil(trim * count), (count - 1) // 2)
    out = {}
    for key, first in models[0].items():
        kept = torch.stack([model[key] for model in models]).sort(0).values[cut : count - cut]
        out[key] = kept.double().mean(0).to(first.dtype) if first.is_floating_point() else kept.amax(0)
    return out
