"""The contract of a method: what travels, and what each side does with it. Nothing else.

The server loop (federation/server_app.py) and the training loop (training.py) are the same for all methods:
1. `broadcast`     the server says what goes down to one client;
2. `local_update`  the client trains on it and says what goes up;
3. `aggregate`     the server turns the replies of a round into its next state.
Round 0 is an opening, where the method wants one: all clients, or the first, answer once without having trained.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..config import Config
from ..errors import ProtocolError
from ..models import Learner
from ..training import TrainingClient

ClientId = str


@dataclass(frozen=True)
class Broadcast:
    """Server to client, for one round. A client gets the arrays on the device of its networks."""

    round: int
    arrays: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Broadcast":
        return Broadcast(self.round, {name: array.to(device) for name, array in self.arrays.items()})


@dataclass(frozen=True)
class Update:
    """Client to server, after one round."""

    examples: int
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerState:
    """All the server knows after `round`. Plain tensors, so that it can be saved without pickling."""

    round: int
    roster: tuple[ClientId, ...]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """What the method keeps for all clients."""
    clients: Mapping[ClientId, Mapping[str, Tensor]] = field(default_factory=dict)
    """What the method keeps of each client's last reply. Saved ones are read from disk when they are looked at."""
    examples: Mapping[ClientId, int] = field(default_factory=dict)


COLLAPSED = 0.1  # feature spread: 1 is isotropic, 0 a single point


class Method(ABC):
    name: ClassVar[str]
    story: ClassVar[str | None] = None
    """What the clients did, for a report; may name {rad}, the number of shared {things}."""
    opening: ClassVar[Literal["nobody", "first", "all"]] = "nobody"
    """Which clients answer once, untrained, before round 1."""
    averages_weights: ClassVar[bool] = False
    """Needs equal models everywhere."""
    needs_labels: ClassVar[bool] = False
    ssl_kind: ClassVar[str | None] = None
    """The only self-supervision the method is defined for, if there is only one."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        """Server: what `client` needs for round `state.round + 1`."""

    @abstractmethod
    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        """Client: train, and say what the server may know of it."""

    @abstractmethod
    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        """Server: the state after a round, from the replies that arrived and passed `check`."""

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        """Server: raise ProtocolError for a reply that must not be used."""
        check_finite(update.arrays, client)

    def check_broadcast(self, client: TrainingClient, down: Broadcast) -> None:
        """Client: raise ProtocolError for an instruction that must not be followed."""
        check_finite(down.arrays, "the server")

    def global_model(self, state: ServerState) -> Mapping[str, Tensor]:
        """Server: the weights of a model for all, where the method has one."""
        return {}

    def metrics(self, state: ServerState) -> dict[str, float]:
        """Server: figures about the state, for the events of a round."""
        return {}

    def portrait(self, state: ServerState) -> dict[str, Any]:
        """Server: what a report may draw of the state: fields of `events.KernelsSeen`."""
        return {}

    def client_warning(self, update: Update) -> str | None:
        """Server: what is wrong with a client, by its figures."""
        spread = update.metrics.get("spread", 1.0)
        return f"features have collapsed (spread {spread:.3f})" if spread < COLLAPSED else None

    def round_warning(self, figures: Mapping[str, float]) -> str | None:
        """Server: what is wrong with the round, by the figures of `metrics`."""
        return None

    # --- what it would cost, before it is run ---

    def example_messages(
        self, learner: Learner, sample: Tensor
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None:
        """Arrays of the sizes that go down and up for one client and round; None where the method does not say."""
        return None

    def extra_images_per_step(self) -> float:
        """How many pairs of views a step costs beyond its own batch."""
        return 0.0


def check_finite(arrays: Mapping[str, Tensor], sender: str) -> None:
    for name, array in arrays.items():
        if not bool(array.isfinite().all()):
            raise ProtocolError(f"{sender} sent '{name[:40]}' with values that are not finite, expected numbers.")


def check_like(arrays: Mapping[str, Tensor], wanted: Mapping[str, Tensor], sender: str) -> None:
    """The same names, shapes and types."""
    odd = sorted(arrays.keys() ^ wanted.keys())
    if odd:
        raise ProtocolError(
            f"{sender} sent other arrays than were expected: '{odd[0][:40]}' is on one side only. Are the models equal?"
        )
    for name, array in arrays.items():
        found, expected = ((tuple(a.shape), a.dtype) for a in (array, wanted[name]))
        if found != expected:
            raise ProtocolError(f"{sender} sent '{name}' as {found}, expected {expected}. Are the models equal?")
