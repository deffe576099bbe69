"""Clients that a process keeps in memory between messages."""

from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from ...learning.learner import Learner
from ...learning.training import TrainingClient
from ..participants.participant import Participant


class CachedClient(NamedTuple):
    client: TrainingClient
    kind: Hashable
    size: int  # size of its networks and images in bytes


class ClientCache:
    """A least-recently-used cache of clients, whose state is also on disk. Networks of evicted clients are reused."""

    def __init__(self) -> None:
        self._cached: OrderedDict[Path, CachedClient] = OrderedDict()
        self._spare: dict[Hashable, Learner] = {}

    def get(self, participant: Participant, limit: int, wanted: int | None = None) -> TrainingClient:
        """Return the client as it was after round `wanted`, or else after its newest round up to `limit`."""
        key, budget = participant.states.path, participant.config.engine.memory_mb * 2**20
        newest = participant.states.newest(limit) if wanted is None else wanted
        cached = self._cached.pop(key, None)
        if cached is None or cached.client.round != newest or cached.client.config != participant.config:
            own, name, config = participant.images, participant.name, participant.config
            labels = own.labels if participant.classes else None
            learner = participant.learner(newest, self._spare.pop(participant.kind, None))
            client = TrainingClient(name, config, learner, own.pixels, participant.rad, labels, newest)
            cached = CachedClient(client, participant.kind, move_images(client, budget))
        self._cached[key] = cached
        self._shrink(budget)
        return cached.client

    def drop(self, participant: Participant) -> None:
        """Remove a client whose training was interrupted: its networks do not belong to any round."""
        self._cached.pop(participant.states.path, None)

    def _shrink(self, budget: int) -> None:
        while len(self._cached) > 1 and sum(cached.size for cached in self._cached.values()) > budget:
            _, oldest = self._cached.popitem(last=False)
            if oldest.kind:
                self._spare[oldest.kind] = oldest.client.learner


def move_images(client: TrainingClient, budget: int) -> int:
    """Move images and RAD to the client's accelerator if they fit beside its networks. Return the bytes in use."""
    networks = sum(tensor.nbytes for tensor in client.learner.state_dict().values())
    pixels, rad = client.pixels.nbytes, client.rad.nbytes
    if client.device.type == "cpu":
        return networks + pixels  # all clients of this process use the same RAD tensor
    if networks + pixels + rad > budget:
        return networks
    client.pixels, client.rad = client.pixels.to(client.device), client.rad.to(client.device)
    return networks + pixels + rad
