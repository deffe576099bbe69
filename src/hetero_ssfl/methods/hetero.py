"""Hetero-SSFL. Each round:
1. the server sends the consensus kernel K_mean as a factor B (K_mean = B B^T);
2. client k minimises L_ssl + mu * distance(K_k, K_mean) on its own images and the RAD;
3. client k returns its share of the next consensus, a factor or a sketch of its kernel on the RAD; weights and images
   stay home.

A client that was not selected has not changed, so its last share is still exact: nobody is asked again. (After a reply
that was lost or refused, the last good one stands in.)
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Generator, Tensor

from ..config import Config
from ..consensus import (
    Consensus,
    combine,
    combine_sketches,
    effective_rank,
    kernel_factor,
    sketch,
    sketching_matrix,
    truncate,
    weighted_mean,
)
from ..data import random_view, to_input
from ..errors import ProtocolError
from ..models import Learner
from ..objectives import alignment_distance
from ..training import Client, rad_representations, train
from .base import Broadcast, ClientId, Method, ServerState, Update

PARTS = {"factor": ("factor",), "sketch": ("sketch", "trace")}
TOLERANCE = 0.05  # of a norm that is 1 but for rounding on the wire
WILD = 1000.0  # times the median of the others' norms


class HeteroSSFL(Method):
    name = "hetero-ssfl"
    opening = "all"  # Algorithm 1 computes K_mean(0) from the untrained models

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        arrays: Mapping[str, Tensor] = state.shared
        if self.config.alignment.leave_one_out and client in state.clients:
            others = {name: kept for name, kept in state.clients.items() if name != client}
            arrays = self._consensus(replace(state, clients=others)) if others else {}
        return Broadcast(state.round + 1, {k: v for k, v in arrays.items() if k == "factor"})

    def local_update(self, client: Client, down: Broadcast) -> Update:
        metrics: dict[str, float] = {}
        if down.round > 0:
            mu = mu_at(self.config, down.round)
            wanted = down.arrays.get("factor")
            term = Alignment(client, wanted, mu) if mu > 0 and wanted is not None else None
            metrics = train(client, down.round, term)
        factor = kernel_factor(rad_representations(client), self.config.alignment)
        metrics["effective_rank"] = effective_rank(factor)
        return Update(len(client.pixels), self._share(factor), metrics)

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        super().check(state, client, update)
        form, rows, rank = self.config.alignment.form, self.config.rad.size, self.config.alignment.rank
        odd = sorted(update.arrays.keys() ^ set(PARTS[form]))
        if odd:
            raise ProtocolError(f"{client} sent other arrays than a {form}: '{odd[0][:40]}' is on one side only.")
        narrowest, widest = (1, rank) if form == "factor" else (min(rank, rows),) * 2
        check_rows(update.arrays[form], rows, narrowest, widest, client)
        if form == "sketch" and update.arrays["trace"].numel() != 1:
            raise ProtocolError(f"{client} sent a trace of shape {tuple(update.arrays['trace'].shape)}, expected one.")
        size, most = self._norm(update.arrays), 1 + TOLERANCE
        if not self.config.alignment.normalize:  # then no scale is agreed on; only a wild one can be known
            others = [self._norm(kept) for name, kept in state.clients.items() if name != client]
            most = WILD * median(others) if others else math.inf
        if not 0 < size <= most:
            raise ProtocolError(
                f"{client} sent a kernel of norm {size:.3g}, expected more than 0 and at most {most:.3g}: it would "
                "outweigh the others, or says nothing."
            )

    def check_broadcast(self, client: Client, down: Broadcast) -> None:
        super().check_broadcast(client, down)
        for name, array in down.arrays.items():
            if name != "factor":
                raise ProtocolError(f"the server sent '{name[:40]}', expected nothing but a 'factor'.")
            check_rows(array, len(client.rad), 1, self.config.alignment.rank, "the server")

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        kept = {**state.clients, **{client: u.arrays for client, u in updates.items()}}
        examples = {**state.examples, **{name: u.examples for name, u in updates.items()}}
        state = replace(state, round=state.round + 1, clients=kept, examples=examples)
        return replace(state, shared=self._consensus(state))

    def metrics(self, state: ServerState) -> dict[str, float]:
        if "factor" not in state.shared:
            return {}
        return {
            "consensus_effective_rank": effective_rank(state.shared["factor"]),
            "consensus_lost_share": float(state.shared["lost"]),
        }

    def _share(self, factor: Tensor) -> dict[str, Tensor]:
        """What a client sends: A_k cut to the rank, or K_k Omega and tr K_k."""
        config, wire = self.config.alignment, getattr(torch, self.config.alignment.wire)
        if config.form == "factor":
            return {"factor": truncate(factor, config.rank).factor.to(wire)}
        return {"sketch": sketch(factor, self._omega()).to(wire), "trace": factor.square().sum().float().view(1)}

    def _consensus(self, state: ServerState) -> dict[str, Tensor]:
        """B from all shares in the order of the roster, so that the sum's last bits never depend on who was first."""
        present = [name for name in state.roster if name in state.clients]
        shares, weights = [state.clients[n] for n in present], [self._weight(state, n) for n in present]
        consensus, wire = self._combine(shares, weights), getattr(torch, self.config.alignment.wire)
        return {"factor": consensus.factor.to(wire), "lost": torch.tensor(consensus.lost)}

    def _combine(self, shares: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Consensus:
        config = self.config.alignment
        if config.form == "factor":
            return combine(Column(shares, "factor"), weights, config.rank)
        mean, trace = (weighted_mean(Column(shares, key), weights) for key in ("sketch", "trace"))
        precision = torch.finfo(getattr(torch, config.wire)).eps
        return combine_sketches(mean, float(trace), self._omega(), precision)

    def _norm(self, share: Mapping[str, Tensor]) -> float:
        """Frobenius norm of a client's kernel; of a sketch the part that Omega sees, which is no greater."""
        if self.config.alignment.form == "factor":
            a = share["factor"].double()
            return float((a.T @ a).norm())
        return float(share["sketch"].double().norm()) / self.config.rad.size  # Omega's columns have that length

    def _omega(self) -> Tensor:
        return sketching_matrix(self.config.rad.size, self.config.alignment.rank, self.config.seed)

    def _weight(self, state: ServerState, name: ClientId) -> float:
        weights = self.config.clients.weights
        if isinstance(weights, tuple):
            place = state.roster.index(name)
            return weights[place] if place < len(weights) else 1.0  # one who joined later
        return float(state.examples[name]) if weights == "size" else 1.0


class Column(Sequence[Tensor]):
    """One array of every share, looked up when it is used: shares that wait on disk need not all be in memory."""

    def __init__(self, shares: Sequence[Mapping[str, Tensor]], key: str) -> None:
        self.shares, self.key = shares, key

    def __len__(self) -> int:
        return len(self.shares)

    def __getitem__(self, k: Any) -> Any:
        return self.shares[k][self.key]


def check_rows(array: Tensor, rows: int, narrowest: int, widest: int, sender: str) -> None:
    """One row per RAD image, and no more columns than were agreed on."""
    if array.ndim != 2 or len(array) != rows or not narrowest <= array.shape[1] <= widest:
        raise ProtocolError(
            f"{sender} sent representations of shape {tuple(array.shape)}, expected {rows} rows and {narrowest} to "
            f"{widest} columns: it may hold another RAD."
        )
    if not array.is_floating_point():
        raise ProtocolError(f"{sender} sent representations of type {array.dtype}, expected floating point.")


class Alignment:
    """mu * distance(K_k, K_mean) on a fresh batch of RAD images, at each step or once per epoch."""

    def __init__(self, client: Client, consensus: Tensor, mu: float) -> None:
        self.config, self.mu = client.config, mu
        self.rad, self.consensus = client.rad, consensus.to(client.device)
        batch = client.config.alignment.rad_batch
        self.batch = min(batch, len(self.rad)) if batch else len(self.rad)
        self.memory: deque[tuple[Tensor, Tensor]] = deque()  # rows and their representations, oldest first

    def __call__(self, learner: Learner, rng: Generator, step: int) -> Tensor:
        alignment = self.config.alignment
        if alignment.when == "epoch" and step > 0:
            return torch.zeros(())
        rows = torch.randperm(len(self.rad), generator=rng)[: self.batch]
        pixels = self.rad[rows].to(self.consensus.device)
        images = random_view(pixels, self.config.views, rng) if alignment.augment_rad else to_input(pixels)
        live = learner.represent(images, alignment.layer)
        all_rows, representations = self._with_memory(rows, live)
        return self.mu * alignment_distance(representations, self.consensus[all_rows], alignment)

    def _with_memory(self, rows: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """This step's rows followed by remembered ones that it does not hold, newest first."""
        size = self.config.alignment.memory
        if not size:
            return rows, live
        old_rows, old = (
            (torch.cat(parts) for parts in zip(*self.memory, strict=True)) if self.memory else (rows[:0], live[:0])
        )
        seen, unique = set(rows.tolist()), list[int]()
        for position in range(len(old_rows) - 1, -1, -1):
            row = int(old_rows[position])
            if row not in seen and len(unique) < size:
                seen.add(row)
                unique.append(position)
        self.memory.append((rows, live.detach()))
        while sum(len(r) for r, _ in self.memory) - len(self.memory[0][0]) >= size:
            self.memory.popleft()
        return torch.cat([rows, old_rows[unique]]), torch.cat([live, old[unique].to(live.dtype)])


def mu_at(config: Config, round_number: int) -> float:
    """mu of a round: constant, or growing linearly over the first `ramp_rounds`."""
    ramp = config.alignment.ramp_rounds
    return config.alignment.mu * (min(1.0, round_number / ramp) if ramp else 1.0)
