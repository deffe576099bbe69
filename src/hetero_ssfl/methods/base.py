"""The interface of a method: what is sent, and what each side does with it.

The server loop (federation/server/loop.py) and the training loop (training.py) are the same for all methods:
1. `broadcast`     the server returns the message to one client;
2. `local_update`  the client trains and returns its reply;
3. `aggregate`     the server turns the replies of a round into its next state.
Round 0 is an optional opening: all clients, or the first, reply once without training.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..config import Config
from ..errors import ProtocolError
from ..learning.learner import Learner
from ..learning.training import TrainingClient
from ..privacy.sums import Layout, Vector

ClientId = str


@dataclass(frozen=True)
class Broadcast:
    """Message from the server to a client, for one round. The arrays arrive on the device of the client's networks."""

    round: int
    arrays: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Broadcast":
        return Broadcast(self.round, {name: array.to(device) for name, array in self.arrays.items()})


@dataclass(frozen=True)
class Update:
    """Reply from a client to the server, after one round."""

    examples: int
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerState:
    """Everything the server knows after `round`. It contains plain tensors, so that saving it needs no pickle."""

    round: int
    roster: tuple[ClientId, ...]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the method keeps for all clients."""
    clients: Mapping[ClientId, Mapping[str, Tensor]] = field(default_factory=dict)
    """Tensors that the method keeps from each client's last reply. Saved ones are read from disk on access."""
    examples: Mapping[ClientId, int] = field(default_factory=dict)
    seats: Mapping[ClientId, int] = field(default_factory=dict)
    """The node that holds each name, in a real federation."""


COLLAPSED = 0.1  # feature spread: 1 is isotropic, 0 is a single point


class Method(ABC):
    name: ClassVar[str]
    story: ClassVar[str | None] = None
    """A phrase for reports that says what the clients did. It may use {rad}, the number of shared {things}."""
    opening: ClassVar[Literal["nobody", "first", "all"]] = "nobody"
    """Which clients reply once, untrained, before round 1."""
    keeps_replies: ClassVar[bool] = False
    """Whether `aggregate` keeps the arrays of each reply unchanged in `ServerState.clients`. They are then written to
    disk as they arrive, and read one by one."""
    averages_weights: ClassVar[bool] = False
    """Whether all clients need equal models."""
    needs_labels: ClassVar[bool] = False
    sums_only: ClassVar[bool] = False
    """Whether the server needs only the sum of all replies, so that `privacy.secure` can hide each of them. Only then
    is there a `with_noise`, too."""
    ssl_kind: ClassVar[str | None] = None
    """The only value of `ssl.kind` that the method supports, or None if it supports all."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        """Server: return the message to `client` for round `state.round + 1`."""

    @abstractmethod
    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        """Client: train, and return the reply to the server."""

    @abstractmethod
    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        """Server: return the state after a round, from the replies that arrived and passed `check`."""

    def forget(self, state: ServerState, gone: Collection[ClientId]) -> ServerState:
        """Server: return the state without what clients that left have contributed."""
        clients = {name: kept for name, kept in state.clients.items() if name not in gone}
        examples = {name: count for name, count in state.examples.items() if name not in gone}
        return replace(state, clients=clients, examples=examples)

    def layout(self) -> Layout:
        """Return the shape of a reply as a vector of integers, for a secure sum."""
        raise NotImplementedError(f"{self.name} does not support secure sums")

    def summand(self, update: Update, participants: int) -> Vector:
        """Client: return the reply as a vector of integers, of which the server learns only the sum."""
        raise NotImplementedError(f"{self.name} does not support secure sums")

    def aggregate_sum(
        self, state: ServerState, total: Vector, participants: int, summands: int
    ) -> tuple[ServerState, dict[str, float]]:
        """Server: return the state after a round and the means of the clients' figures, from the sum of `summands`
        vectors of the form for `participants`. Raise ProtocolError for a sum that must not be used."""
        raise NotImplementedError(f"{self.name} does not support secure sums")

    def with_noise(self, update: Update) -> Update:
        """Client: return the reply with noise that is enough for a server that sees it, and with nothing beside it that
        depends on the client's data."""
        raise NotImplementedError(f"{self.name} does not support noise")

    def spent(self, releases: int) -> float:
        """Return the squared mu (`noise.py`) of this many replies; 0 without noise."""
        return 0.0

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        """Server: raise ProtocolError for a reply that must not be used."""
        check_finite(update.arrays, client)

    def check_broadcast(self, client: TrainingClient, down: Broadcast) -> None:
        """Client: raise ProtocolError for a message that must not be used."""
        check_finite(down.arrays, "the server")

    def global_model(self, state: ServerState) -> Mapping[str, Tensor]:
        """Server: return the weights of the global model, if the method has one."""
        return {}

    def metrics(self, state: ServerState) -> dict[str, float]:
        """Server: return figures about the state, for the events of a round."""
        return {}

    def portrait(self, state: ServerState) -> dict[str, Any]:
        """Server: return fields of `events.KernelsSeen`, from which a report draws the state."""
        return {}

    def client_warning(self, update: Update) -> str | None:
        """Server: return a warning about a client, based on its figures, or None."""
        spread = update.metrics.get("spread", 1.0)
        return f"features have collapsed (spread {spread:.3f})" if spread < COLLAPSED else None

    def start_warning(self, clients: int) -> str | None:
        """Server: return a warning before the first round with this many clients, or None."""
        return None

    def round_warning(self, figures: Mapping[str, float]) -> str | None:
        """Server: return a warning about the round, based on the figures of `metrics`, or None."""
        return None

    # --- costs, estimated before a run ---

    def example_messages(
        self, learner: Learner, sample: Tensor
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None:
        """Return arrays of the sizes sent down and up per client and round, or None if the sizes are unknown."""
        return None

    def extra_images_per_step(self) -> float:
        """Return the cost of a step beyond its own batch, in pairs of views."""
        return 0.0


def check_finite(arrays: Mapping[str, Tensor], sender: str) -> None:
    for name, array in arrays.items():
        if not bool(array.isfinite().all()):
            raise ProtocolError(f"{sender} sent '{name[:40]}' with values that are not finite, expected numbers.")


def check_like(arrays: Mapping[str, Tensor], wanted: Mapping[str, Tensor], sender: str) -> None:
    """Raise ProtocolError unless names, shapes and types are the same."""
    odd = sorted(arrays.keys() ^ wanted.keys())
    if odd:
        raise ProtocolError(
            f"{sender} sent the wrong arrays: '{odd[0][:40]}' is missing or unexpected. "
            "Check that the models are equal."
        )
    for name, array in arrays.items():
        found, expected = ((tuple(a.shape), a.dtype) for a in (array, wanted[name]))
        if found != expected:
            raise ProtocolError(
                f"{sender} sent '{name}' as {found}, expected {expected}. Check that the models are equal."
            )
