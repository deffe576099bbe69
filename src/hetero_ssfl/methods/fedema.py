"""FedEMA: FedBYOL whose clients move towards the global model instead of becoming it. Each round:
1. the server sends the global online encoder, projector and predictor, and the client's lambda if it has one and the
   client took part in the round before;
2. with lambda, the client keeps the share m = min(lambda * ||W_g - W_k||, 1) of its own: encoder, projector and
   predictor become m * local + (1 - m) * global, and the target stays; without, all of them and the target become the
   global ones; then it trains;
3. the client returns its networks; the server averages them as FedBYOL does;
4. after a client's first participation the server fixes lambda_k = tau / ||W_g - W_k||, with the new global model.

The published code measures both distances from before to after the client's own training, averaged over layers:
`averaging.divergence = "training"`, `averaging.norm = "layer-mean"`.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import ProtocolError
from ..training import TrainingClient
from .averaging import FedBYOL, divergence, global_weights, load_shared, measured_training, shared_weights
from .base import Broadcast, ClientId, ServerState, Update


class FedEMA(FedBYOL):
    name = "fedema"

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        kept = state.clients.get(client, {})
        took_part = "lambda" in kept and int(kept["round"]) == state.round
        more = {key: kept[key] for key in ("lambda", "drift")} if took_part else {}
        return Broadcast(state.round + 1, {**state.shared, **more})

    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        weights, own = global_weights(down), shared_weights(client.learner)
        if "lambda" in down.arrays:
            as_in_code = self.config.averaging.divergence == "training"
            moved = float(down.arrays["drift"])
            distance = moved if as_in_code else divergence(weights, own, self.config.averaging.norm)
            share = min(float(down.arrays["lambda"]) * distance, 1.0)
            weights = {k: torch.lerp(w, own[k], share) if w.is_floating_point() else w for k, w in weights.items()}
            load_shared(client, weights)
        else:
            load_shared(client, weights, also_target=True)
        metrics = measured_training(client, down.round)
        return Update(len(client.pixels), shared_weights(client.learner), metrics)

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        super().check(state, client, update)
        if state.round >= 0 and not update.metrics.get("drift", -1.0) >= 0:
            raise ProtocolError(f"{client} did not say how far its training moved it, expected the figure 'drift'.")

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        after = super().aggregate(state, updates)
        if after.round == 0:  # the opening: nobody has trained yet
            return after
        settings, kept = self.config.averaging, dict(state.clients)
        for name, update in updates.items():
            drift = update.metrics["drift"]
            scale = kept.get(name, {}).get("lambda")
            if scale is None:
                distance = divergence(after.shared, update.arrays, settings.norm)
                scale = torch.tensor(
                    settings.tau / max(drift if settings.divergence == "training" else distance, 1e-12)
                )
            kept[name] = {"lambda": scale, "drift": torch.tensor(drift), "round": torch.tensor(after.round)}
        return replace(after, clients=kept)
