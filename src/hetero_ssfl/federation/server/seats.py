"""Who may take part in a real federation, and how much each participant counts.

A seat belongs to a node: Flower gives each registered key one node id and keeps it. A node has one name for the whole
run, and a name belongs to one node.
"""

from collections.abc import Collection, Mapping
from statistics import median, median_low, mode

from ...config import ClientsConfig
from ...errors import ProtocolError
from ...methods import ClientId, Update


class NoSeatError(ProtocolError):
    """A node has no right to take part under its name."""


class Seats:
    def __init__(self, clients: ClientsConfig) -> None:
        self.clients = clients
        self.holders: dict[ClientId, int | None] = {}
        """Flower's id of the node that holds each name; None if the name belongs to the run, but to no known node."""

    def reopen(self, connected: Collection[int]) -> bool:
        """Forget the node ids, not the names, if the SuperLink has a new database, in which every node has a new id.

        As long as it has the old one, at least one of the connected nodes has a known id.
        """
        known = set(self.holders.values()) - {None}
        if not connected or not known or known & set(connected):
            return False
        self.holders = dict.fromkeys(self.holders)
        return True

    def take(self, name: ClientId, node: int) -> None:
        """Give the node the seat `name`, or raise NoSeatError if it has no right to it."""
        registered = next((seat for seat in self.clients.seats if seat.name == name), None)
        holder = self.holders.get(name)
        if self.clients.seats and registered is None:
            raise NoSeatError(f"node {node} has the name '{name}', which is not in clients.seats. Add it there.")
        if registered is not None and registered.node not in (None, node):
            raise NoSeatError(f"node {node} has the name '{name}', which belongs to node {registered.node}.")
        if self.clients.rejoin == "key":
            if holder not in (None, node):
                remedy = "Give each node its own name, or set clients.rejoin = 'name' if nodes have no keys."
                raise NoSeatError(f"node {node} has the name '{name}', which belongs to node {holder}. {remedy}")
            before = next((other for other, held in self.holders.items() if held == node and other != name), None)
            if before:
                raise NoSeatError(f"node {node} has the name '{name}', but it was '{before}'. A node keeps its name.")
        most = self.clients.count + self.clients.newcomers
        if name not in self.holders and len(self.holders) >= most:
            remedy = "Raise clients.count, or clients.newcomers during a run."
            raise NoSeatError(f"node {node} ('{name}') cannot join: all {most} seats are taken. {remedy}")
        self.holders[name] = node


def capped_sizes(
    claims: Mapping[ClientId, int], others: Mapping[ClientId, int], clients: ClientsConfig
) -> dict[ClientId, int]:
    """Return the number of images that each claim counts for.

    A registered size is the most that its node can claim. Other claims count up to a multiple of the median of all
    sizes, including those of `others` that do not reply in this round.
    """
    registered = {seat.name: seat.images for seat in clients.seats if seat.images}
    capped = {name: min(size, registered.get(name, size)) for name, size in {**others, **claims}.items()}
    most = max(1, int(clients.size_ratio * median_low(capped.values())))
    return {name: capped[name] if name in registered else min(capped[name], most) for name in claims}


UNUSUAL = 10.0  # times the median norm, or a fraction of it


def typical_opening(updates: Mapping[ClientId, Update]) -> ClientId:
    """Return the first client whose networks have the same tensors as most, at a similar scale.

    All clients start from its weights. Others could not load weights of another shape, and all would be excluded.
    """
    arrays = {name: update.arrays for name, update in updates.items()}
    kinds = {name: tuple(sorted((k, a.shape, str(a.dtype)) for k, a in own.items())) for name, own in arrays.items()}
    usual = mode(kinds.values())
    alike = [name for name in arrays if kinds[name] == usual]
    norms = {name: sum(float(a.double().square().sum()) for a in arrays[name].values()) ** 0.5 for name in alike}
    middle = median(norms.values())
    similar = (name for name, norm in norms.items() if middle / UNUSUAL <= norm <= middle * UNUSUAL)
    return next(similar, next(iter(norms)))
