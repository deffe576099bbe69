"""FedU: FedBYOL with a divergence-aware predictor. Each round:
1. the server sends the global online encoder, projector and predictor;
2. the client takes the global encoder; it takes the global predictor only if the divergence between the global encoder
   and its own is below a threshold, and otherwise keeps its own; then it trains;
3. the client returns the three; the server averages them as FedBYOL does.

The published code measures the divergence from before to after the client's last training instead, as a mean over
layers: `averaging.divergence = "training"`, `averaging.norm = "layer-mean"`.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..training import Client, train
from .averaging import FedBYOL, divergence, load_shared, shared_weights
from .base import Broadcast, ClientId, ServerState, Update


class FedU(FedBYOL):
    name = "fedu"

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        drift = state.clients.get(client, {})  # how far the client's last training moved its encoder
        return Broadcast(state.round + 1, {**state.shared, **drift})

    def local_update(self, client: Client, down: Broadcast) -> Update:
        weights = {key: value for key, value in down.arrays.items() if key != "drift"}
        if weights and not self.takes_predictor(client, weights, down.arrays.get("drift")):
            weights = {key: value for key, value in weights.items() if not key.startswith("predictor.")}
        load_shared(client, weights)
        before = shared_weights(client.learner)
        metrics = train(client, down.round) if down.round > 0 else {}
        after = shared_weights(client.learner)
        moved = divergence(before, after, self.config.averaging.norm)
        drift = {"drift": torch.tensor(moved)} if down.round > 0 else {}
        return Update(len(client.pixels), {**after, **drift}, metrics)

    def takes_predictor(self, client: Client, weights: Mapping[str, Tensor], drift: Tensor | None) -> bool:
        settings = self.config.averaging
        if client.round == 0:
            return True  # it has trained nothing of its own yet
        if settings.divergence == "training":
            return drift is not None and float(drift) < settings.threshold
        return divergence(weights, shared_weights(client.learner), settings.norm) < settings.threshold

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        drifts = {name: {"drift": u.arrays["drift"]} for name, u in updates.items() if "drift" in u.arrays}
        plain = {
            name: replace(u, arrays={k: v for k, v in u.arrays.items() if k != "drift"}) for name, u in updates.items()
        }
        return replace(super().aggregate(state, plain), clients={**state.clients, **drifts})
