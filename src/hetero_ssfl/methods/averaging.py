"""FedBYOL (and, with ssl.kind = "simsiam", FedSimSiam). Each round:
1. the server sends the global online encoder, projector and predictor; a client replaces its own by them;
2. the client trains its self-supervised loss; BYOL's target network stays local;
3. the client returns the three; the server averages them with weights n_k / n over the round's clients.

BatchNorm's running statistics are averaged like weights; its batch counter, an integer, takes the largest value.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..models import Learner
from ..training import Client, train
from .base import Broadcast, ClientId, Method, ServerState, Update

SHARED = ("encoder.", "projector.", "predictor.")


class FedBYOL(Method):
    name = "fedbyol"
    opening = True  # the first global model is one of the clients' untrained ones
    averages_weights = True

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        return Broadcast(state.round + 1, state.shared)

    def local_update(self, client: Client, down: Broadcast) -> Update:
        if down.arrays:
            client.learner.load_state_dict({**client.learner.state_dict(), **down.arrays})
            if client.round == 0 and client.learner.target is not None:  # a target of another beginning teaches noise
                client.learner.target.load_state_dict(client.learner.online.state_dict())
        metrics = train(client, down.round) if down.round > 0 else {}
        return Update(len(client.pixels), shared_weights(client.learner), metrics)

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        present = [name for name in state.roster if name in updates]
        if state.round < 0:  # the opening: start all from one initialisation, an average of several is none
            present = present[:1]
        models = [updates[name].arrays for name in present]
        shared = average(models, [updates[name].examples for name in present])
        return replace(state, round=state.round + 1, shared=shared)


def shared_weights(learner: Learner) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in learner.state_dict().items() if k.startswith(SHARED)}


def average(models: list[Mapping[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    """sum_k n_k W_k / sum_k n_k for floating-point entries, the maximum for integer ones."""
    total, out = sum(sizes), {}
    for key, first in models[0].items():
        if first.is_floating_point():
            mean = sum(m[key].double() * (n / total) for m, n in zip(models, sizes, strict=True))
            out[key] = torch.as_tensor(mean).to(first.dtype)
        else:
            out[key] = torch.stack([m[key] for m in models]).amax(0)
    return out
