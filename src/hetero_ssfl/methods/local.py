"""Local SSL: each client trains alone (the paper's Table 4). One client with all images is centralised BYOL."""

from collections.abc import Mapping
from dataclasses import replace

from ..learning.training import TrainingClient, train
from .base import Broadcast, ClientId, Method, ServerState, Update


class Local(Method):
    name = "local"

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        return Broadcast(state.round + 1)

    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        return Update(len(client.pixels), metrics=train(client, down.round))

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        return replace(state, round=state.round + 1)
