"""FedU: FedBYOL with a divergence-aware predictor. Each round:
1. the server sends the global online encoder, projector and predictor;
2. the client loads the global encoder and projector; it loads the global predictor only if the divergence of its
   encoder is below a threshold; then it trains;
3. the client returns the three networks; the server averages them as FedBYOL does.

The divergence is that of the published code, for which the thresholds 0.4 and 0.6 were chosen: between the client's
encoder before and after its last training, as a mean over convolutions. With `averaging.divergence = "global"` and
`averaging.norm = "euclidean"` it is the distance between the global and the client's encoder over all parameters, as in
the paper.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..learning.training import TrainingClient
from .averaging import FedBYOL, divergence, global_weights, load_shared, measured_training, shared_weights
from .base import Broadcast, ClientId, ServerState, Update


class FedU(FedBYOL):
    name = "fedu"

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        return Broadcast(state.round + 1, {**state.shared, **state.clients.get(client, {})})

    def load(self, client: TrainingClient, down: Broadcast) -> None:
        weights = global_weights(down)
        if weights and not self.takes_predictor(client, weights, down.arrays.get("drift")):
            weights = {key: value for key, value in weights.items() if not key.startswith("predictor.")}
        load_shared(client, weights)

    def train(self, client: TrainingClient, round_number: int) -> dict[str, float]:
        return measured_training(client, round_number)

    def takes_predictor(self, client: TrainingClient, weights: Mapping[str, Tensor], drift: Tensor | None) -> bool:
        settings = self.config.averaging
        if client.round == 0:
            return True  # the client has not trained yet
        if settings.divergence == "training":
            return drift is not None and float(drift) < settings.threshold
        return divergence(weights, shared_weights(client.learner), settings.norm) < settings.threshold

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        drifts = {n: {"drift": torch.tensor(u.metrics["drift"])} for n, u in updates.items() if "drift" in u.metrics}
        return replace(super().aggregate(state, updates), clients={**state.clients, **drifts})
