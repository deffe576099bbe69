"""FedEMA: FedBYOL whose clients move towards the global model instead of replacing theirs by it. Each round:
1. the server sends the global online encoder, projector and predictor, and lambda_k if it is set and client k took part
   in the previous round;
2. with lambda_k, the client computes m = min(lambda_k * d_k, 1): encoder, projector and predictor become
   m * local + (1 - m) * global, and the target stays; without it, all of them and the target become the global ones;
   then the client trains;
3. the client returns its networks; the server averages them as FedBYOL does;
4. after the first participation of client k the server sets lambda_k = tau / d_k.

The distance d_k is that of the published code: between the client's encoder before and after its own training, as a
mean over convolutions. With `averaging.divergence = "global"` and `averaging.norm = "euclidean"` it is ||W_g - W_k||
over all parameters, as in the paper, in step 4 with the new global model.

Only parameters are mixed. As in the published code, BatchNorm's statistics become the global ones, except that those of
the predictor stay the client's own if m > 0.5.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import ProtocolError
from ..learning.training import TrainingClient
from .averaging import FedBYOL, divergence, global_weights, load_shared, measured_training, shared_weights
from .base import Broadcast, ClientId, ServerState, Update


class FedEMA(FedBYOL):
    name = "fedema"

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        kept = state.clients.get(client, {})
        took_part = "lambda" in kept and int(kept["round"]) == state.round
        more = {key: kept[key] for key in ("lambda", "drift")} if took_part else {}
        return Broadcast(state.round + 1, {**state.shared, **more})

    def load(self, client: TrainingClient, down: Broadcast) -> None:
        weights, own = global_weights(down), shared_weights(client.learner)
        if "lambda" not in down.arrays:
            load_shared(client, weights, also_target=True)
            return
        as_in_code = self.config.averaging.divergence == "training"
        moved = float(down.arrays["drift"])
        distance = moved if as_in_code else divergence(weights, own, self.config.averaging.norm)
        kept = min(float(down.arrays["lambda"]) * distance, 1.0)
        parameters = {key for key, _ in client.learner.named_parameters()}
        mixed = {key: torch.lerp(weights[key], own[key], kept) for key in weights.keys() & parameters}
        own_statistics = {key: w for key, w in own.items() if key.startswith("predictor.") and kept > 0.5}
        load_shared(client, {**weights, **own_statistics, **mixed})

    def train(self, client: TrainingClient, round_number: int) -> dict[str, float]:
        return measured_training(client, round_number)

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        super().check(state, client, update)
        if state.round >= 0 and not update.metrics.get("drift", -1.0) >= 0:
            raise ProtocolError(f"{client} did not send the metric 'drift' (how far training moved its encoder).")

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        after = super().aggregate(state, updates)
        if after.round == 0:  # the opening: no client has trained yet
            return after
        settings, kept = self.config.averaging, dict(state.clients)
        for name, update in updates.items():
            drift = update.metrics["drift"]
            scale = kept.get(name, {}).get("lambda")
            if scale is None:
                distance = divergence(after.shared, update.arrays, settings.norm)
                moved = drift if settings.divergence == "training" else distance
                scale = torch.tensor(settings.tau / max(moved, 1e-12))
            kept[name] = {"lambda": scale, "drift": torch.tensor(drift), "round": torch.tensor(after.round)}
        return replace(after, clients=kept)
