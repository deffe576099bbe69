"""Measure the paper's theorem on a run: one local round of every client, watched step by step.

The round is played twice: from the untrained networks with the mean of the untrained clients' kernels, and from the
saved networks with the server's current mean kernel. Each time:
1. every client trains a few steps with the run's own training loop, and its constants are estimated at each step;
2. the mean kernel is computed from all clients' new kernels;
3. the loss before, after the steps, and with the new mean kernel gives the change that the theorem bounds.

The loss of a client is measured as a fixed function of its weights: the mean over fixed minibatches (rows, views, RAD
rows) with a fixed target network, in float32. The run folder is only read.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ...config import Config
from ...data import random_view, take, to_input
from ...errors import RunError
from ...federation.participants import open_site
from ...federation.participants.participant import Participant
from ...federation.start import torch_threads
from ...kernels.distance import alignment_distance
from ...learning import training
from ...learning.alignment import mu_at
from ...learning.learner import Learner
from ...learning.training import TrainingClient
from ...methods import Broadcast, HeteroSSFL, ServerState, Update
from ...runs.folder import RunFolder
from ...seeding import global_seed, rng_for
from ...use.encoders import check_data, participants
from ..kernel_runs import kernel_method, saved_state
from . import bound
from .bound import Constants, ConstantsAlong, Point, point

MINIBATCHES = 8  # of the measured loss
RAD_IMAGES = 256  # whose representations give L2 and R


def measure(folder: RunFolder, steps: int, done: Callable[[float], None] = lambda _: None) -> list[dict[str, Any]]:
    """Play the measured rounds of a run, with at most `steps` steps each. Return each as JSON.

    `done` is called with the completed part of the work.
    """
    config = folder.read_config()
    if folder.read_facts().site == "python":
        raise RunError(f"the clients of '{folder.path}' are Python objects. Measure a run of `hetero-ssfl run`.")
    method = kernel_method(folder, "the theorem")
    if method.sends == "coordinates":
        raise RunError(
            f"'{folder.path}' was trained with alignment.distance = 'coordinates', which compares no kernels. "
            "Choose a run with distance = 'cka' or 'relational-kl'."
        )
    check_data(folder)
    with torch_threads(config.engine.threads):
        everyone = list(participants(folder, open_site(folder), config))
        opening = {p.name: method.local_update(_client(p, 0), Broadcast(0)) for p in everyone}
        states = [("untrained networks", method.aggregate(ServerState(-1, tuple(sorted(opening))), opening))]
        if saved := saved_state(folder):
            states.append((f"networks of round {saved.round}", saved))
        measured = itertools.count(1)

        def tick() -> None:
            done(next(measured) / (len(states) * len(everyone)))

        return [{"start": start, **_measured_round(method, state, everyone, steps, tick)} for start, state in states]


def _client(participant: Participant, committed: int) -> TrainingClient:
    """Return the client with its networks of the last finished round."""
    newest, p = participant.newest_round(committed) if committed else 0, participant
    return TrainingClient(p.name, p.config, p.learner(newest), p.images.pixels, p.rad, round=newest)


def _measured_round(
    method: HeteroSSFL, state: ServerState, everyone: list[Participant], steps: int, tick: Callable[[], None]
) -> dict[str, Any]:
    number = min(state.round + 1, method.config.rounds)  # after the end, the learning rate is not defined
    played: dict[str, LocalRound] = {}
    for participant in everyone:
        down = method.broadcast(state, participant.name)
        played[participant.name] = play(_client(participant, state.round), method, down, number, steps)
        tick()
    after = method.aggregate(state, {name: each.update for name, each in played.items()})
    constants = [each.constants for each in played.values()]
    factors = {name: method.broadcast(after, name).arrays.get("factor") for name in played}
    clients = {name: each.beside_the_bound(factors[name], constants) for name, each in played.items()}
    return {"round": number, "clients": clients}


class LocalRound(NamedTuple):
    """The local steps of one client, before the new mean kernel is known."""

    probe: "Probe"
    after: "Parts"
    eta: float
    constants: Constants  # measured along this client's steps
    update: Update

    def beside_the_bound(self, new_factor: Tensor | None, everyone: Sequence[Constants]) -> dict[str, Any]:
        """Return the measured changes beside the theorem, with constants that hold for every client.

        `after_steps` is the loss with the old mean kernel, `after_round` with the new one. `ratio` is the bound divided
        by the size of the change, null if nothing changed. A limit of 0 allows no value, null allows every value.
        """
        probe, eta, mu, config = self.probe, self.eta, self.probe.mu, self.probe.client.config
        constants = bound.for_all_clients(self.constants, everyone)
        norms = probe.squared_gradient_norms[: constants.steps]  # the last is after all steps
        terms = bound.bound_terms(constants, eta, mu, norms)
        assert probe.first is not None
        before = probe.first.loss(probe.factor, mu, config)
        after_steps, after_round = (self.after.loss(factor, mu, config) for factor in (probe.factor, new_factor))
        change = after_round - before
        limits = {
            "largest_eta": bound.largest_eta(constants, mu, norms),
            "largest_eta_without_alignment": bound.largest_eta(constants, 0.0, norms),
            "largest_mu": bound.largest_mu(constants, norms),
        }
        return {
            "before": before,
            "after_steps": after_steps,
            "after_round": after_round,
            "change": change,
            "local_change": after_steps - before,
            "ratio": terms.total / abs(change) if change else None,
            "eta": eta,
            "mu": mu,
            "constants": vars(self.constants),
            "bound": {**vars(terms), "local": terms.local, "total": terms.total},
            "bound_for_every_step": bound.bound_for_every_step(constants, eta, mu, norms),
            **{key: None if math.isinf(value) else value for key, value in limits.items()},
        }


def play(client: TrainingClient, method: HeteroSSFL, down: Broadcast, number: int, steps: int) -> LocalRound:
    """Train at most `steps` steps as the run does, and look at the networks before each step and after the last."""
    factor = down.arrays.get("factor")
    mu = mu_at(client.config, number) if factor is not None else 0.0
    short = shortened(client, steps)
    probe = Probe(client, factor, mu, method.term(short, down.arrays, mu))
    training.train(short, number, probe)
    after, count = probe.look(short.learner), len(probe.squared_gradient_norms) - 1
    constants = replace(probe.along.constants, rows=len(client.rad), steps=count)
    eta = max(training.learning_rate(short.config, number - 1 + step / count) for step in range(count))
    update = method.local_update(replace(client, learner=short.learner), Broadcast(0))  # its kernel, no training
    return LocalRound(probe, after, eta, constants, update)


def shortened(client: TrainingClient, steps: int) -> TrainingClient:
    """Return the client with so few images and epochs that a round has at most `steps` steps."""
    config, pool = client.config, pool_of(client)
    batch = min(config.optim.batch, len(pool))
    rows = torch.randperm(len(pool), generator=rng_for(config.seed, "theory", client.name))[: steps * batch]
    epochs = min(config.epochs_of(len(pool)), steps // (len(rows) // batch))
    rad = config.rad.model_copy(update={"in_ssl": False})  # those images are in the pool
    return replace(client, config=config.model_copy(update={"local_epochs": epochs, "rad": rad}), pixels=pool[rows])


# --- the measured loss ---


class Parts(NamedTuple):
    """What the loss at one point is made of."""

    local: float  # the self-supervised part
    rad: Sequence[tuple[Tensor, Tensor]]  # RAD rows and their representations, one pair for each minibatch

    def loss(self, factor: Tensor | None, mu: float, config: Config) -> float:
        """Return the loss with this mean kernel, which may be newer than the representations."""
        if factor is None or not mu:
            return self.local
        distances = [alignment_distance(z, take(factor, rows, z.device), config.alignment) for rows, z in self.rad]
        return self.local + mu * float(torch.stack(distances).mean())


def pool_of(client: TrainingClient) -> Tensor:
    """Return all images of the local loss."""
    return torch.cat([client.pixels, client.rad]) if client.config.rad.in_ssl else client.pixels


class Probe:
    """A regulariser that measures at each step of the training loop and returns the alignment term, if there is one.

    The loss and its gradients are computed on a copy of the networks in training mode. Only trainable parameters follow
    the client: the target network stays as it was at the start.
    """

    def __init__(
        self, client: TrainingClient, factor: Tensor | None, mu: float, term: training.Regulariser | None = None
    ):
        self.client = replace(client, learner=copy.deepcopy(client.learner).train())
        self.factor, self.mu, self.pool = None if factor is None else factor.to(client.device), mu, pool_of(client)
        self.term, self.along = term, ConstantsAlong()
        self.first: Parts | None = None
        self.squared_gradient_norms: list[float] = []

    def __call__(self, learner: Learner, rng: Generator, step: training.Step) -> Tensor:
        self.look(learner)
        return self.term(learner, rng, step) if self.term else torch.zeros((), device=self.client.device)

    def look(self, learner: Learner) -> Parts:
        """Measure at the networks' current weights, as a point of the sequence of steps."""
        here, parts = self.at(learner)
        self.along.add(here)
        self.squared_gradient_norms.append(here.squared_gradient_norm)
        self.first = self.first or parts
        return parts

    def at(self, learner: Learner) -> tuple[Point, Parts]:
        """Measure everything at the weights of these networks, which do not change."""
        own = list(self.client.learner.trainable())
        with torch.no_grad():
            for mine, theirs in zip(own, learner.trainable(), strict=True):
                mine.copy_(theirs)
        few = replace(self.client, learner=learner, rad=self.client.rad[:RAD_IMAGES])
        minibatches: list[tuple[float, Tensor, Tensor]] = []
        with torch.autocast(self.client.device.type, enabled=False):
            here = point(_flat(own), self._gradients(own, minibatches), training.rad_representations(few), sampled=True)
        local = sum(loss for loss, _, _ in minibatches) / len(minibatches)
        return here, Parts(local, [(rows, live) for _, rows, live in minibatches])

    def _gradients(self, own: Sequence[Tensor], minibatches: list[tuple[float, Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield the gradient of each minibatch's loss, and add to `minibatches` what the loss is made of."""
        config = self.client.config
        for j in range(MINIBATCHES):
            scope = ("theory", self.client.name, j)
            with global_seed(config.seed, *scope, "global"), torch.enable_grad():
                rng = rng_for(config.seed, *scope)
                batch = torch.randperm(len(self.pool), generator=rng)[: config.optim.batch]
                loss, _ = training.self_supervised(self.client, take(self.pool, batch, self.client.device), None, rng)
                rows, live = self._represented(rng_for(config.seed, *scope, "rad"))
                minibatches.append((float(loss.detach()), rows, live.detach()))
                if self.factor is not None and self.mu:
                    wanted = take(self.factor, rows, live.device)
                    loss = loss + self.mu * alignment_distance(live, wanted, config.alignment)
                gradients = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
            yield _flat(gradients)

    def _represented(self, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return rows of the RAD and their representations, drawn as `learning.alignment.Alignment` draws them."""
        config, rad = self.client.config, self.client.rad
        rows = torch.randperm(len(rad), generator=rng)[: config.alignment.rad_batch or len(rad)]
        pixels = take(rad, rows, self.client.device)
        images = random_view(pixels, config.views, rng) if config.alignment.augment_rad else to_input(pixels)
        return rows, self.client.learner.represent(images, config.alignment.trained_layer)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors]).cpu()
