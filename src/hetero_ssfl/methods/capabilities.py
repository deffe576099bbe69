"""What a method may do besides exchanging messages: small protocols, asked for with isinstance.

A method implements a capability by having its methods. It need not name the protocol.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..privacy.sums.vectors import Layout, Vector
from .base import ClientId, ServerState, Update


@runtime_checkable
class SecureSums(Protocol):
    """The server needs only the sum of all replies, so that `privacy.secure` can hide each of them."""

    def layout(self) -> Layout:
        """Return the shape of a reply as a vector of integers."""

    def summand(self, update: Update, participants: int) -> Vector:
        """Client: return the reply as a vector of integers, of which the server learns only the sum."""

    def aggregate_sum(
        self, state: ServerState, total: Vector, participants: int, summands: int
    ) -> tuple[ServerState, dict[str, float]]:
        """Server: return the state after a round and the means of the clients' metrics, from the sum of `summands`
        vectors of the form for `participants`. Raise ProtocolError for a sum that must not be used."""


@runtime_checkable
class GroupSums(Protocol):
    """The server can also do with one sum for each group of clients (`privacy.groups`)."""

    def aggregate_groups(
        self, state: ServerState, sums: Sequence[tuple[Vector, int, int]]
    ) -> tuple[ServerState, dict[str, float], list[str]]:
        """Server: do as `aggregate_sum` for (sum, participants, summands) of each group, so that a minority of spoilt
        sums changes little. Also return warnings. Raise ProtocolError if too few sums can be used."""


@runtime_checkable
class Noise(Protocol):
    """Replies can carry noise with a privacy budget (`privacy.epsilon`)."""

    def with_noise(self, update: Update) -> Update:
        """Client: return the reply with noise that is enough for a server that sees it, and with nothing beside it that
        depends on the client's data."""

    def spent(self, releases: int) -> float:
        """Return the squared mu (privacy/accountant.py) of this many replies; 0 without noise."""


@runtime_checkable
class ComparesReplies(Protocol):
    """Replies can be wrong in a way that only the other replies of the round show."""

    def misfits(self, state: ServerState, updates: Mapping[ClientId, Update]) -> Mapping[ClientId, str]:
        """Server: return why a reply must not be used beside the others, for each client of which that is so."""


@runtime_checkable
class Forgets(Protocol):
    """What clients that left have contributed can be taken out of the shared state."""

    def forget(self, state: ServerState, gone: Collection[ClientId]) -> ServerState:
        """Server: return the state without the contributions of these clients."""


@runtime_checkable
class GlobalModel(Protocol):
    """There is one model for all clients, which is probed beside their own."""

    def global_model(self, state: ServerState) -> Mapping[str, Tensor]:
        """Server: return its weights."""


@runtime_checkable
class Metrics(Protocol):
    """The server's state has metrics of its own, which become part of a round's events."""

    def metrics(self, state: ServerState) -> dict[str, float]: ...


@runtime_checkable
class KernelSnapshot(Protocol):
    """A report can draw the kernels of a round."""

    def kernel_snapshot(self, state: ServerState) -> dict[str, Any]:
        """Server: return fields of the event `KernelsSeen`; {} if there are no kernels yet."""


@runtime_checkable
class Warnings(Protocol):
    """The method knows when its settings or a round's metrics promise little."""

    def start_warning(self, clients: int) -> str | None:
        """Server: return a warning before the first round with this many clients, or None."""

    def round_warning(self, metrics: Mapping[str, float]) -> str | None:
        """Server: return a warning about a round, or None."""
