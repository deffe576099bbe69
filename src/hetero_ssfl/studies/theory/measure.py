"""Measure the paper's theorem on a run: one local round of every client, watched step by step.

The round is played twice: from the untrained networks with the mean of the untrained clients' kernels, and from the
saved networks with the server's current mean kernel. Each time:
1. every client trains a few steps with the run's own training loop, and its constants are estimated at each step;
2. the mean kernel is computed from all clients' new kernels;
3. the loss before, after the steps, and with the new mean kernel gives the change that the theorem bounds.

The loss is the mean over fixed minibatches (rows, views, RAD rows) with a fixed target network, in float32. The run
folder is only read.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from ...config import Config
from ...data import random_view, take, to_input
from ...errors import RunError
from ...federation.participants import open_site
from ...federation.participants.participant import Participant
from ...federation.start import torch_threads
from ...kernels.distance import alignment_distance
from ...learning.alignment import Alignment, mu_at
from ...learning.learner import Learner
from ...learning.training import Regulariser, TrainingClient, learning_rate, rad_representations, self_supervised, train
from ...methods import Broadcast, HeteroSSFL, ServerState, Update, method_for
from ...plugins import check_trusted
from ...runs.files import SavedTensors
from ...runs.folder import RunFolder
from ...seeding import global_seed, rng_for
from ...use.encoders import check_data, participants
from .bound import (
    Bound,
    Constants,
    Point,
    bound_for_every_step,
    bound_terms,
    for_all_clients,
    largest_eta,
    largest_mu,
    point,
    widened,
)

MINIBATCHES = 8  # of the measured loss
RAD_IMAGES = 256  # whose representations give L2 and R


@dataclass(frozen=True)
class ClientFigures:
    """The measured round of one client beside the theorem."""

    before: float
    """The loss before the local steps."""
    after_steps: float
    """The loss after the local steps, with the old mean kernel."""
    after_round: float
    """The loss with the new mean kernel."""
    eta: float
    mu: float
    constants: Constants
    """Measured along this client's steps."""
    bound: Bound
    """With the largest L2, P and R of all clients."""
    bound_for_every_step: float
    largest_eta: float
    largest_eta_without_alignment: float
    largest_mu: float

    @property
    def change(self) -> float:
        return self.after_round - self.before

    @property
    def local_change(self) -> float:
        return self.after_steps - self.before

    @property
    def ratio(self) -> float | None:
        """The bound divided by the size of the measured change; None if nothing changed."""
        return self.bound.total / abs(self.change) if self.change else None


@dataclass(frozen=True)
class MeasuredRound:
    start: str
    round: int
    clients: Mapping[str, ClientFigures]


def kernel_method(folder: RunFolder, what: str) -> HeteroSSFL:
    """Return the method of a run, or raise RunError if `what` says nothing about it.

    To measure a run is to train with its config, so all code that it names must be trusted.
    """
    for setting, spec in folder.read_config().own_code.items():
        check_trusted(spec, setting)
    method = method_for(folder.read_config())
    if not isinstance(method, HeteroSSFL):
        raise RunError(
            f"{what} is about methods that align kernels, but '{folder.path}' was trained with method "
            f"'{folder.read_config().method}'. Choose a run with method = 'hetero-ssfl'."
        )
    return method


def measure(folder: RunFolder, steps: int, done: Callable[[float], None] = lambda _: None) -> list[MeasuredRound]:
    """Play the measured rounds of a run, with at most `steps` steps each.

    `done` is called with the completed part of the work.
    """
    config = folder.read_config()
    if folder.read_facts().site == "python":
        raise RunError(
            f"the clients of '{folder.path}' are Python objects that do not exist in this process, so their rounds "
            "cannot be measured. Measure a run of `hetero-ssfl run`."
        )
    method = kernel_method(folder, "the theorem")
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

        return [_measured_round(method, start, state, everyone, steps, tick) for start, state in states]


def _opening(method: HeteroSSFL, everyone: list[Participant]) -> ServerState:
    """Return the state after round 0, in which untrained clients send their kernels."""
    updates = {p.name: method.local_update(_client(p, 0), Broadcast(0)) for p in everyone}
    return method.aggregate(ServerState(-1, tuple(sorted(updates))), updates)


def saved_state(folder: RunFolder) -> ServerState | None:
    """Return the state after the last finished round without changing any file; None before round 1."""
    found = folder.server_state()
    if found is None:
        return None
    shared, about = found
    clients = {name: SavedTensors(folder.shares(name).named(file)) for name, file in about["shares"].items()}
    state = ServerState(about["round"], tuple(about["roster"]), shared, clients, about["examples"])
    return state if state.round > 0 else None


def _client(participant: Participant, committed: int) -> TrainingClient:
    """Return the client with its networks of the last finished round."""
    newest = participant.newest_round(committed) if committed else 0
    pixels = participant.images.pixels
    return TrainingClient(
        participant.name, participant.config, participant.learner(newest), pixels, participant.rad, round=newest
    )


# --- one round of all clients ----------------------------------------------------------------------


def _measured_round(
    method: HeteroSSFL,
    start: str,
    state: ServerState,
    everyone: list[Participant],
    steps: int,
    tick: Callable[[], None],
) -> MeasuredRound:
    number = min(state.round + 1, method.config.rounds)  # after the end, the learning rate is not defined
    played: dict[str, LocalRound] = {}
    for participant in everyone:
        down = method.broadcast(state, participant.name)
        played[participant.name] = play(_client(participant, state.round), method, down, number, steps)
        tick()
    after = method.aggregate(state, {name: each.update for name, each in played.items()})
    constants = [each.constants for each in played.values()]
    figures = {
        name: each.figures(method.broadcast(after, name).arrays.get("factor"), constants)
        for name, each in played.items()
    }
    return MeasuredRound(start, number, figures)


@dataclass(frozen=True)
class LocalRound:
    """The local steps of one client, before the new mean kernel is known."""

    config: Config
    before: float
    """The loss before the steps."""
    after: "Parts"
    factor: Tensor | None
    """The mean kernel before the round; None if the client is not aligned with any."""
    eta: float
    mu: float
    constants: Constants
    squared_gradient_norms: Sequence[float]
    update: Update

    def figures(self, new_factor: Tensor | None, everyone: Sequence[Constants]) -> ClientFigures:
        """Return the loss with the new mean kernel, and the theorem with constants that hold for every client."""
        constants, norms = for_all_clients(self.constants, everyone), self.squared_gradient_norms
        return ClientFigures(
            before=self.before,
            after_steps=self.after.loss(self.factor, self.mu, self.config),
            after_round=self.after.loss(new_factor, self.mu, self.config),
            eta=self.eta,
            mu=self.mu,
            constants=self.constants,
            bound=bound_terms(constants, self.eta, self.mu, norms),
            bound_for_every_step=bound_for_every_step(constants, self.eta, self.mu, norms),
            largest_eta=largest_eta(constants, self.mu, norms),
            largest_eta_without_alignment=largest_eta(constants, 0.0, norms),
            largest_mu=largest_mu(constants, norms),
        )


def play(client: TrainingClient, method: HeteroSSFL, down: Broadcast, number: int, steps: int) -> LocalRound:
    """Train at most `steps` steps as the run does, and look at the networks before each step and after the last."""
    config, factor = client.config, down.arrays.get("factor")
    mu = mu_at(config, number) if factor is not None else 0.0
    short = shortened(client, steps)
    term = Alignment(short, factor, mu) if factor is not None and mu > 0 else None
    watch = Watch(Probe(client, factor, mu), term)
    train(short, number, watch)
    norms = tuple(watch.squared_gradient_norms)
    after = watch.look(short.learner)
    constants = replace(watch.constants, rows=len(client.rad), steps=len(norms))
    eta = max(learning_rate(short.config, number - 1 + step / len(norms)) for step in range(len(norms)))
    update = method.local_update(replace(client, learner=short.learner), Broadcast(0))  # its kernel, no training
    assert watch.before is not None
    return LocalRound(config, watch.before, after, factor, eta, mu, constants, norms, update)


def pool_of(client: TrainingClient) -> Tensor:
    """Return all images of the local loss."""
    return torch.cat([client.pixels, client.rad]) if client.config.rad.in_ssl else client.pixels


def shortened(client: TrainingClient, steps: int) -> TrainingClient:
    """Return the client with so few images and epochs that a round has at most `steps` steps."""
    config, pool = client.config, pool_of(client)
    batch = min(config.optim.batch, len(pool))
    rows = torch.randperm(len(pool), generator=rng_for(config.seed, "theory", client.name))[: steps * batch]
    epochs = min(config.local_epochs, steps // (len(rows) // batch))
    rad = config.rad.model_copy(update={"in_ssl": False})  # those images are in the pool
    return replace(client, config=config.model_copy(update={"local_epochs": epochs, "rad": rad}), pixels=pool[rows])


# --- the loss as a fixed function of the weights ---------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What the loss at one point is made of."""

    local: float
    """The self-supervised part."""
    rad: Sequence[tuple[Tensor, Tensor]]
    """RAD rows and their representations, one pair for each minibatch."""

    def loss(self, factor: Tensor | None, mu: float, config: Config) -> float:
        """Return the loss with this mean kernel, which may be newer than the representations."""
        if factor is None or not mu:
            return self.local
        distances = [alignment_distance(z, take(factor, rows, z.device), config.alignment) for rows, z in self.rad]
        return self.local + mu * float(torch.stack(distances).mean())


class Probe:
    """A copy of the networks, on which the loss and its gradients are computed in training mode.

    Only trainable parameters follow the client: the target network stays as it was at the start.
    """

    def __init__(self, client: TrainingClient, factor: Tensor | None, mu: float) -> None:
        self.client = replace(client, learner=copy.deepcopy(client.learner).train())
        self.factor, self.mu, self.pool = None if factor is None else factor.to(client.device), mu, pool_of(client)

    def at(self, learner: Learner) -> tuple[Point, Parts]:
        """Measure everything at the weights of these networks, which do not change."""
        own = list(self.client.learner.trainable())
        with torch.no_grad():
            for mine, theirs in zip(own, learner.trainable(), strict=True):
                mine.copy_(theirs)
        few = replace(self.client, learner=learner, rad=self.client.rad[:RAD_IMAGES])
        seen: list[tuple[float, Tensor, Tensor]] = []
        with torch.autocast(self.client.device.type, enabled=False):
            found = point(_flat(own), self._gradients(own, seen), rad_representations(few), sampled=True)
        local = sum(each for each, _, _ in seen) / len(seen)
        return found, Parts(local, [(rows, live) for _, rows, live in seen])

    def _gradients(self, own: list[torch.nn.Parameter], seen: list[tuple[float, Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield the gradient of each minibatch's loss, and note in `seen` what the loss is made of."""
        config, name = self.client.config, self.client.name
        for j in range(MINIBATCHES):
            scope = ("theory", name, j)
            with global_seed(config.seed, *scope, "global"), torch.enable_grad():
                rng = rng_for(config.seed, *scope)
                batch = torch.randperm(len(self.pool), generator=rng)[: config.optim.batch]
                local, _ = self_supervised(self.client, take(self.pool, batch, self.client.device), None, rng)
                rows, live = self._represented(rng_for(config.seed, *scope, "rad"))
                loss = local
                if self.factor is not None and self.mu:
                    distance = alignment_distance(live, take(self.factor, rows, live.device), config.alignment)
                    loss = local + self.mu * distance
                gradients = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
            seen.append((float(local.detach()), rows, live.detach()))
            yield _flat(gradients)

    def _represented(self, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return rows of the RAD and their representations, drawn as `methods.hetero.Alignment` draws them."""
        config, rad = self.client.config, self.client.rad
        rows = torch.randperm(len(rad), generator=rng)[: config.alignment.rad_batch or len(rad)]
        pixels = take(rad, rows, self.client.device)
        images = random_view(pixels, config.views, rng) if config.alignment.augment_rad else to_input(pixels)
        return rows, self.client.learner.represent(images, config.alignment.trained_layer)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors]).cpu()


class Watch:
    """A regulariser that measures at each step of the training loop and returns the alignment term, if there is one."""

    def __init__(self, probe: Probe, term: Regulariser | None) -> None:
        self.probe, self.term = probe, term
        self.constants, self.earlier = Constants(), list[Point]()
        self.before: float | None = None
        self.squared_gradient_norms: list[float] = []

    def __call__(self, learner: Learner, rng: Generator, step: int) -> Tensor:
        parts = self.look(learner)
        self.squared_gradient_norms.append(self.earlier[-1].squared_gradient_norm)
        if self.before is None:
            self.before = parts.loss(self.probe.factor, self.probe.mu, self.probe.client.config)
        if self.term is None:
            return torch.zeros((), device=self.probe.client.device)
        return self.term(learner, rng, step)

    def look(self, learner: Learner) -> Parts:
        """Widen the constants by the networks' current weights, compared with the first and the last ones."""
        here, parts = self.probe.at(learner)
        self.constants = widened(self.constants, here, self.earlier)
        self.earlier = [*self.earlier[:1], here]
        return parts
