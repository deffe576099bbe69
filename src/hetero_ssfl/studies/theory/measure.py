"""Measure the paper's theorem on a run: one local round of every client, watched step by step.

The round is played twice: from the untrained networks with the mean of the untrained clients' kernels, and from the
saved networks with the server's current mean kernel. Each time:
1. every client trains a few steps with the run's own training loop, and its constants are estimated at each step;
2. the mean kernel is computed from all clients' new kernels;
3. the loss before, after the steps, and with the new mean kernel gives the change that the theorem bounds.

The run folder is only read.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...config import Config
from ...errors import RunError
from ...federation.participants import open_site
from ...federation.participants.participant import Participant
from ...federation.start import torch_threads
from ...learning.alignment import Alignment, mu_at
from ...learning.training import TrainingClient, learning_rate, train
from ...methods import Broadcast, HeteroSSFL, ServerState, Update
from ...runs.folder import RunFolder
from ...seeding import rng_for
from ...use.encoders import check_data, participants
from ..kernel_runs import kernel_term_method, saved_state
from .bound import Constants, bound_for_every_step, bound_terms, for_all_clients, largest_eta, largest_mu
from .probe import Parts, Probe, Watch, pool_of


def measure(folder: RunFolder, steps: int, done: Callable[[float], None] = lambda _: None) -> list[dict[str, Any]]:
    """Play the measured rounds of a run, with at most `steps` steps each. Return each as JSON.

    `done` is called with the completed part of the work.
    """
    config = folder.read_config()
    if folder.read_facts().site == "python":
        raise RunError(
            f"the clients of '{folder.path}' are Python objects that do not exist in this process, so their rounds "
            "cannot be measured. Measure a run of `hetero-ssfl run`."
        )
    method = kernel_term_method(folder, "the theorem")
    check_data(folder)
    with torch_threads(config.engine.threads):
        everyone = list(participants(folder, open_site(folder), config))
        states = [("untrained networks", _opening(method, everyone))]
        saved = saved_state(folder)
        if saved is not None:
            states.append((f"networks of round {saved.round}", saved))
        measured = itertools.count(1)

        def tick() -> None:
            done(next(measured) / (len(states) * len(everyone)))

        return [{"start": start, **_measured_round(method, state, everyone, steps, tick)} for start, state in states]


def _opening(method: HeteroSSFL, everyone: list[Participant]) -> ServerState:
    """Return the state after round 0, in which untrained clients send their kernels."""
    updates = {p.name: method.local_update(_client(p, 0), Broadcast(0)) for p in everyone}
    return method.aggregate(ServerState(-1, tuple(sorted(updates))), updates)


def _client(participant: Participant, committed: int) -> TrainingClient:
    """Return the client with its networks of the last finished round."""
    newest = participant.newest_round(committed) if committed else 0
    pixels = participant.images.pixels
    return TrainingClient(
        participant.name, participant.config, participant.learner(newest), pixels, participant.rad, round=newest
    )


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
    clients = {
        name: each.beside_the_bound(method.broadcast(after, name).arrays.get("factor"), constants)
        for name, each in played.items()
    }
    return {"round": number, "clients": clients}


@dataclass(frozen=True)
class LocalRound:
    """The local steps of one client, before the new mean kernel is known."""

    config: Config
    before: float
    """The loss before the steps."""
    after: Parts
    factor: Tensor | None
    """The mean kernel before the round; None if the client is not aligned with any."""
    eta: float
    mu: float
    constants: Constants
    """Measured along this client's steps."""
    squared_gradient_norms: Sequence[float]
    update: Update

    def beside_the_bound(self, new_factor: Tensor | None, everyone: Sequence[Constants]) -> dict[str, Any]:
        """Return the measured changes beside the theorem, with constants that hold for every client.

        `after_steps` is the loss with the old mean kernel, `after_round` with the new one. `ratio` is the bound divided
        by the size of the change, null if nothing changed. A limit of 0 allows no value, null allows every value.
        """
        constants, norms = for_all_clients(self.constants, everyone), self.squared_gradient_norms
        bound = bound_terms(constants, self.eta, self.mu, norms)
        after_steps = self.after.loss(self.factor, self.mu, self.config)
        after_round = self.after.loss(new_factor, self.mu, self.config)
        change = after_round - self.before
        limits = {
            "largest_eta": largest_eta(constants, self.mu, norms),
            "largest_eta_without_alignment": largest_eta(constants, 0.0, norms),
            "largest_mu": largest_mu(constants, norms),
        }
        return {
            "before": self.before,
            "after_steps": after_steps,
            "after_round": after_round,
            "change": change,
            "local_change": after_steps - self.before,
            "ratio": bound.total / abs(change) if change else None,
            "eta": self.eta,
            "mu": self.mu,
            "constants": vars(self.constants),
            "bound": {**vars(bound), "local": bound.local, "total": bound.total},
            "bound_for_every_step": bound_for_every_step(constants, self.eta, self.mu, norms),
            **{key: None if math.isinf(value) else value for key, value in limits.items()},
        }


def play(client: TrainingClient, method: HeteroSSFL, down: Broadcast, number: int, steps: int) -> LocalRound:
    """Train at most `steps` steps as the run does, and look at the networks before each step and after the last."""
    config, factor = client.config, down.arrays.get("factor")
    mu = mu_at(config, number) if factor is not None else 0.0
    short = shortened(client, steps)
    term = Alignment(short, factor, mu) if factor is not None and mu > 0 else None
    watch = Watch(Probe(client, factor, mu), term)
    train(short, number, watch)
    after = watch.look(short.learner)
    norms = watch.squared_gradient_norms[:-1]
    constants = replace(watch.along.constants, rows=len(client.rad), steps=len(norms))
    eta = max(learning_rate(short.config, number - 1 + step / len(norms)) for step in range(len(norms)))
    update = method.local_update(replace(client, learner=short.learner), Broadcast(0))  # its kernel, no training
    assert watch.first is not None
    before = watch.first.loss(factor, mu, config)
    return LocalRound(config, before, after, factor, eta, mu, constants, norms, update)


def shortened(client: TrainingClient, steps: int) -> TrainingClient:
    """Return the client with so few images and epochs that a round has at most `steps` steps."""
    config, pool = client.config, pool_of(client)
    batch = min(config.optim.batch, len(pool))
    rows = torch.randperm(len(pool), generator=rng_for(config.seed, "theory", client.name))[: steps * batch]
    epochs = min(config.local_epochs, steps // (len(rows) // batch))
    rad = config.rad.model_copy(update={"in_ssl": False})  # those images are in the pool
    return replace(client, config=config.model_copy(update={"local_epochs": epochs, "rad": rad}), pixels=pool[rows])
