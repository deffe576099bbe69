"""The interface of a method: what is sent, and what each side does with it.

The server loop (federation/server/loop.py) and the training loop (learning/training.py) are the same for all methods:
1. `broadcast`     the server returns the message to one client;
2. `local_update`  the client trains and returns its reply;
3. `aggregate`     the server turns the replies of a round into its next state.
Round 0 is an optional opening: all clients, or the first, reply once without training.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..config import Config
from ..errors import ProtocolError
from ..learning.training import TrainingClient

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
    trained: Mapping[ClientId, int] = field(default_factory=dict)
    """The last round in which each client trained and saved its own state; 0 if never."""


class Method(ABC):
    """A federated method. Everything else that a method may do is a capability (capabilities.py)."""

    name: ClassVar[str]
    opening: ClassVar[Literal["nobody", "first", "all"]] = "nobody"
    """Which clients reply once, untrained, before round 1."""
    keeps_replies: ClassVar[bool] = False
    """Whether `aggregate` keeps the arrays of each reply unchanged in `ServerState.clients`. They are then written to
    disk as they arrive, and read one by one."""
    averages_weights: ClassVar[bool] = False
    """Whether all clients need equal models."""
    needs_labels: ClassVar[bool] = False
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

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        """Server: raise ProtocolError for a reply that must not be used."""
        check_finite(update.arrays, client)

    def check_broadcast(self, client: TrainingClient, down: Broadcast) -> None:
        """Client: raise ProtocolError for a message that must not be used."""
        check_finite(down.arrays, "the server")


def without(state: ServerState, gone: Collection[ClientId]) -> ServerState:
    """Return the state without what it keeps of these clients."""
    clients = {name: kept for name, kept in state.clients.items() if name not in gone}
    examples = {name: count for name, count in state.examples.items() if name not in gone}
    return replace(state, clients=clients, examples=examples)


def check_finite(arrays: Mapping[str, Tensor], sender: str) -> None:
    for name, array in arrays.items():
        if not bool(array.isfinite().all()):
            raise ProtocolError(f"{sender} sent '{name[:40]}' with values that are not finite, expected numbers.")


def check_like(arrays: Mapping[str, Tensor], wanted: Mapping[str, Tensor], sender: str) -> None:
    """Raise ProtocolError unless names, shapes and types are the same."""
    got, expected = ({name: f"{a.dtype} {tuple(a.shape)}" for name, a in side.items()} for side in (arrays, wanted))
    for name in sorted(got.keys() | expected.keys()):
        sent, due = got.get(name, "nothing"), expected.get(name, "nothing")
        if sent != due:
            raise ProtocolError(f"{sender} sent {sent} as '{name[:40]}', expected {due}. Use equal models everywhere.")
