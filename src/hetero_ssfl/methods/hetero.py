"""Hetero-SSFL. Each round:
1. the server sends the consensus kernel K_mean as a factor B (K_mean = B B^T);
2. client k minimises L_ssl + mu * distance(K_k, K_mean) on its own images and the RAD;
3. client k returns its contribution to the next consensus, a factor or a sketch of its kernel on the RAD; weights and
   images are never sent.

A client that was not selected has not changed, so its last contribution is still exact and is not requested again.
(After a reply that was lost or refused, the last good one is used.)

With `privacy.secure` the server learns only the sum of the sketches of a round. The consensus is then the mean over the
clients of that round, or a mix of it with the last one. With `privacy.epsilon` each client adds noise to its sketch: a
part of what the sum needs, or without `privacy.secure` as much as a single sketch needs.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ProtocolError
from ..kernels.agreement import MIN_CLIENTS, agreements, drawn, relative, smoothed, weight_of
from ..kernels.cka import mutual_cka
from ..kernels.consensus import Group, MeanKernel
from ..kernels.contribution import TOLERANCE, check_contribution, check_rows, contribution
from ..kernels.factor import effective_rank, spectrum
from ..learning.alignment import Alignment, Coordinates, mu_at
from ..learning.training import Regulariser, TrainingClient, rad_representations, train
from ..privacy.accountant import epsilon_of
from .base import Broadcast, ClientId, ServerState, Update, without
from .private import PrivateSketches

MAX_NORM_RATIO = 1000.0  # of a kernel that is not normalised to the median norm of the others
MAX_SCALED, MAX_UNSCALED = 2.0, 1e6  # entries of a consensus, whose scale is known or not
LEARNED = "agreement"  # in the server's state
MIN_RANK = 3.0  # effective rank of a mean kernel that teaches something
SNAPSHOT_CLIENTS, SNAPSHOT_IMAGES, SNAPSHOT_VALUES = 20, 200, 64  # in a round's events


class HeteroSSFL(PrivateSketches):
    name = "hetero-ssfl"
    keeps_replies = True
    opening = "all"  # Algorithm 1 computes K_mean(0) from the untrained models

    @property
    def sends(self) -> str:
        """The array that clients receive: a factor of the mean kernel, or its coordinates."""
        return "coordinates" if self.config.alignment.distance == "coordinates" else "factor"

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        mean = MeanKernel.from_tensors(state.shared)
        if self.config.alignment.leave_one_out and client in state.clients:
            others = {name: kept for name, kept in state.clients.items() if name != client}
            mean = self.mean_kernel(state, replace(state, clients=others), [client]) if others else None
        if mean is None:
            return Broadcast(state.round + 1)
        arrays = {"factor": mean.factor} if mean.coordinates is None else {"coordinates": mean.coordinates}
        return Broadcast(state.round + 1, arrays)

    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        term = self.term(client, down.arrays, mu_at(self.config, down.round))
        metrics = train(client, down.round, term) if down.round > 0 else {}
        sent = contribution(rad_representations(client), self.config.alignment, self.config.seed, self.wire)
        return Update(len(client.pixels), sent.arrays, {**metrics, "effective_rank": sent.effective_rank})

    def term(self, client: TrainingClient, arrays: Mapping[str, Tensor], mu: float) -> Regulariser | None:
        """Return the alignment term of a client's loss, if there is a consensus."""
        wanted = arrays.get(self.sends)
        if wanted is None or not mu:
            return None
        return (Coordinates if self.sends == "coordinates" else Alignment)(client, wanted, mu)

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        if self.config.privacy.secure:  # the same mean, where no server has to be kept from knowing the summands
            total = self.layout().zeros()
            for update in updates.values():
                total.add(self.summand(update, len(updates)))
            return self.aggregate_sum(state, total, len(updates), len(updates))[0]
        kept = {**state.clients, **{client: u.arrays for client, u in updates.items()}}
        examples = {**state.examples, **{name: u.examples for name, u in updates.items()}}
        after = replace(state, round=state.round + 1, clients=kept, examples=examples)
        after = replace(after, shared={**state.shared, **self.learned(after, updates)})
        return self.with_mean(state, after, updates)

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        super().check(state, client, update)
        max_norm, mean = 1 + TOLERANCE, MeanKernel.from_tensors(state.shared)
        if not self.config.alignment.normalize:  # then there is no agreed scale, and only extreme norms can be refused
            max_norm = MAX_NORM_RATIO * (mean.usual_norm(state.roster, client) if mean else float("inf"))
        noise = self.noise.deviation if self.noise else 0.0
        check_contribution(update.arrays, self.config.rad.size, self.config.alignment, client, max_norm, noise)

    def check_broadcast(self, client: TrainingClient, down: Broadcast) -> None:
        super().check_broadcast(client, down)
        for name, array in down.arrays.items():
            if name != self.sends:
                raise ProtocolError(f"the server sent '{name[:40]}', expected only '{self.sends}'.")
            alignment = self.config.alignment
            widths = (1, alignment.rank) if name == "factor" else (alignment.coordinates, alignment.coordinates)
            check_rows(array, len(client.rad), *widths, "the server")
            # Rows of coordinates have length 1, and so has the mean of kernels of norm 1, but for sketching.
            scaled = name == "coordinates" or (alignment.normalize and self.noise is None)
            largest, limit = float(array.abs().max()), MAX_SCALED if scaled else MAX_UNSCALED
            if largest > limit:
                raise ProtocolError(
                    f"the server sent '{name}' with a value of {largest:.3g}, expected at most {limit:g}."
                )

    # --- the mean kernel ---

    def mean_kernel(self, before: ServerState, after: ServerState, changed: Collection[ClientId]) -> MeanKernel:
        """Return the mean kernel of the state `after`; `changed` are the clients that differ from `before`."""
        kept, noise = MeanKernel.from_tensors(before.shared), self.noise.deviation if self.noise else 0.0
        return self.averaging.update(kept, self._group(before), self._group(after), changed, noise)

    def with_mean(self, before: ServerState, after: ServerState, changed: Collection[ClientId]) -> ServerState:
        """Return the state `after` with its mean kernel."""
        weighed = [
            name for name in after.clients if name in before.clients and self._weights_differ(before, after, name)
        ]
        kept = {LEARNED: after.shared[LEARNED]} if LEARNED in after.shared else {}
        mean = self.mean_kernel(before, after, {*changed, *weighed})
        return replace(after, shared={**mean.to_tensors(), **kept})

    def _weights_differ(self, before: ServerState, after: ServerState, name: ClientId) -> bool:
        return LEARNED in after.shared and self.weight(before, name) != self.weight(after, name)

    def learned(self, state: ServerState, updates: Mapping[ClientId, Update]) -> dict[str, Tensor]:
        """Return the smoothed agreement of each client in the order of the roster, NaN for those without a kernel.

        The values of clients that did not reply stay: nobody becomes an outlier by being idle.
        """
        present = [name for name in state.roster if name in state.clients]
        if self.config.clients.weights != "agreement" or len(present) < MIN_CLIENTS:
            return {}
        values = dict.fromkeys(state.roster, math.nan) | self._learned(state)
        reported = [str(update.metrics) for update in updates.values()]  # which no client knows of the others
        panel, rows = drawn(present, self.config.rad.size, self.config.seed, state.round, *reported)
        compared = [*panel, *(name for name in updates if name not in panel)]
        factors = [state.clients[name]["factor"][rows] for name in compared]
        found = agreements(factors[: len(panel)], factors[len(panel) :])
        for name, value in zip(compared, relative(found), strict=True):
            if name in updates:
                values[name] = smoothed(None if math.isnan(values[name]) else values[name], value)
        return {LEARNED: torch.tensor(list(values.values()), dtype=torch.float64)}

    def _learned(self, state: ServerState) -> dict[ClientId, float]:
        values = state.shared[LEARNED].tolist() if LEARNED in state.shared else []
        return dict(zip(state.roster, values, strict=False))  # newcomers come last in the roster

    def _group(self, state: ServerState) -> Group:
        weights = {name: self.weight(state, name) for name in state.clients}
        equal = dict.fromkeys(weights, 1.0)  # if learned weights leave nobody
        return Group(state.roster, state.clients, weights if any(weights.values()) else equal)

    def weight(self, state: ServerState, name: ClientId) -> float:
        """Return w_j of the consensus, before the weights are scaled to sum to 1."""
        weights = self.config.clients.weights
        if isinstance(weights, tuple):
            place = state.roster.index(name)
            return weights[place] if place < len(weights) else 1.0  # a client that joined later
        if weights == "agreement":
            value = self._learned(state).get(name, math.nan)
            return 1.0 if math.isnan(value) else weight_of(value)
        return float(state.examples[name]) if weights == "size" else 1.0

    def forget(self, state: ServerState, gone: Collection[ClientId]) -> ServerState:
        after = without(state, gone)
        if len(after.clients) in (0, len(state.clients)):  # nobody is left to average, or nothing has changed
            return state
        return self.with_mean(state, after, gone)

    # --- for events and reports ---

    def metrics(self, state: ServerState) -> dict[str, float]:
        mean, privacy = MeanKernel.from_tensors(state.shared), self.config.privacy
        if mean is None:
            return {}
        rank = {"consensus_effective_rank": effective_rank(mean.factor)}
        if privacy.epsilon is None:
            return {**rank, "consensus_lost_share": mean.lost}
        return {**rank, "epsilon": epsilon_of(self.spent(state.round + 1), privacy.delta)}  # traces are not sent

    def kernel_snapshot(self, state: ServerState) -> dict[str, Any]:
        """Return the spectrum of the consensus and the mutual CKA of the clients on some of the RAD images."""
        mean = MeanKernel.from_tensors(state.shared)
        if mean is None:
            return {}
        fields: dict[str, Any] = {"spectrum": _rounded(spectrum(mean.factor)[:SNAPSHOT_VALUES])}
        if self.config.alignment.form == "factor":
            names = [name for name in state.roster if name in state.clients][:SNAPSHOT_CLIENTS]
            step = -(-self.config.rad.size // SNAPSHOT_IMAGES)
            factors = [state.clients[name]["factor"][::step].clone() for name in names]  # a view would keep all rows
            fields |= {"clients": names, "mutual_cka": [_rounded(row) for row in mutual_cka(factors)]}
        if LEARNED in state.shared:
            known = {name: value for name, value in self._learned(state).items() if name in state.clients}
            fields["agreement"] = {name: round(value, 4) for name, value in known.items() if not math.isnan(value)}
            fields["weights"] = {name: round(weight_of(value), 4) for name, value in fields["agreement"].items()}
        return fields

    def round_warning(self, metrics: Mapping[str, float]) -> str | None:
        clipped, rank = metrics.get("clipped", 0.0), metrics.get("consensus_effective_rank", MIN_RANK)
        if clipped > 0:
            limit = f"privacy.largest_entry = {self.config.privacy.largest_entry:g}"
            return f"{clipped:.1%} of the entries of the sketches exceed {limit} and were clipped. Raise it."
        if rank < MIN_RANK:
            teaches = f"the consensus's effective rank is only {rank:.1f}, which teaches little"
            return f"{teaches}. Use a larger or more varied RAD."
        return None


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
