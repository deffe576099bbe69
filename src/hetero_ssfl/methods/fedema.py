"""FedEMA: FedBYOL whose clients move towards the global model instead of becoming it. Each round:
1. the server sends the global online encoder, projector and predictor, and the client's lambda if it has one and the
   client took part in the round before;
2. with lambda, the client keeps the share m = min(lambda * ||W_g - W_k||, 1) of its own: encoder, projector and
   predictor become m * local + (1 - m) * global, and the target stays; without, all of them and the target become the
   global ones; then it trains;
3. the client returns its networks; the server averages them as FedBYOL does;
4. after a client's first participation the server fixes lambda_k = tau / ||W_g - W_k||, with the new global model.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..training import Client, train
from .averaging import FedBYOL, divergence, load_shared, shared_weights
from .base import Broadcast, ClientId, ServerState, Update


class FedEMA(FedBYOL):
    name = "fedema"

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        kept = state.clients.get(client, {})
        recent = "lambda" in kept and int(kept["round"]) == state.round
        return Broadcast(state.round + 1, {**state.shared, **({"lambda": kept["lambda"]} if recent else {})})

    def local_update(self, client: Client, down: Broadcast) -> Update:
        weights = {key: value for key, value in down.arrays.items() if key != "lambda"}
        own = shared_weights(client.learner)
        if "lambda" in down.arrays:
            distance = divergence(weights, own, self.config.averaging.norm)
            share = min(float(down.arrays["lambda"]) * distance, 1.0)
            weights = {k: torch.lerp(w, own[k], share) if w.is_floating_point() else w for k, w in weights.items()}
            load_shared(client, weights)
        else:
            load_shared(client, weights, also_target=True)
        metrics = train(client, down.round) if down.round > 0 else {}
        return Update(len(client.pixels), shared_weights(client.learner), metrics)

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        after = super().aggregate(state, updates)
        if after.round == 0:  # the opening: nobody has trained yet
            return after
        kept = dict(state.clients)
        for name, update in updates.items():
            scale = kept.get(name, {}).get("lambda")
            if scale is None:
                distance = divergence(after.shared, update.arrays, self.config.averaging.norm)
                scale = torch.tensor(self.config.averaging.tau / max(distance, 1e-12))
            kept[name] = {"lambda": scale, "round": torch.tensor(after.round)}
        return replace(after, clients=kept)
