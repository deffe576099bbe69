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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from ..config import Config
from ..consensus import (
    EXACT,
    SPARE,
    Sums,
    combine,
    effective_rank,
    kernel_factor,
    mutual_cka,
    sketch,
    sketching_matrix,
    spectrum,
    truncate,
)
from ..data import random_view, to_input
from ..errors import ProtocolError
from ..models import Learner
from ..objectives import alignment_distance
from ..training import Client, rad_representations, train
from .base import Broadcast, ClientId, Method, ServerState, Update

PARTS = {"factor": ("factor",), "sketch": ("sketch", "trace")}
TOLERANCE = 0.05  # of a norm that is 1 but for rounding on the wire
WILD = 1000.0  # times the norm of the mean kernel
SHOWN, SHOWN_IMAGES = 20, 200  # clients and RAD images of the mutual CKA in a round's events


class HeteroSSFL(Method):
    name = "hetero-ssfl"
    opening = "all"  # Algorithm 1 computes K_mean(0) from the untrained models

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        arrays: Mapping[str, Tensor] = state.shared
        if self.config.alignment.leave_one_out and client in state.clients:
            others = {name: kept for name, kept in state.clients.items() if name != client}
            arrays = self._consensus(state, replace(state, clients=others), [client]) if others else {}
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
            most = WILD * _norm(state.shared["factor"]) if "factor" in state.shared else math.inf
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
        after = replace(state, round=state.round + 1, clients=kept, examples=examples)
        return replace(after, shared=self._consensus(state, after, list(updates)))

    def metrics(self, state: ServerState) -> dict[str, float]:
        if "factor" not in state.shared:
            return {}
        return {
            "consensus_effective_rank": effective_rank(state.shared["factor"]),
            "consensus_lost_share": float(state.shared["lost"]),
        }

    def portrait(self, state: ServerState) -> dict[str, Any]:
        """The consensus' spectrum and how alike the clients' kernels are, on some of the RAD images."""
        if "factor" not in state.shared:
            return {}
        found: dict[str, Any] = {"spectrum": _rounded(spectrum(state.shared["factor"])[:64])}
        if self.config.alignment.form == "factor":
            names = [name for name in state.roster if name in state.clients][:SHOWN]
            step = -(-self.config.rad.size // SHOWN_IMAGES)
            factors = [state.clients[name]["factor"][::step] for name in names]
            found |= {"clients": names, "mutual_cka": [_rounded(row) for row in mutual_cka(factors)]}
        return found

    def _share(self, factor: Tensor) -> dict[str, Tensor]:
        """What a client sends: A_k cut to the rank, or K_k Omega and tr K_k."""
        config, wire = self.config.alignment, getattr(torch, self.config.alignment.wire)
        if config.form == "factor":
            return {"factor": truncate(factor, config.rank).factor.to(wire)}
        return {"sketch": sketch(factor, self._omega()).to(wire), "trace": factor.square().sum().float().view(1)}

    def _consensus(self, before: ServerState, after: ServerState, changed: Collection[ClientId]) -> dict[str, Tensor]:
        """B of the state `after`: from all shares while they fit, else from the sums of `before` and what changed."""
        config, wire = self.config.alignment, getattr(torch, self.config.alignment.wire)
        names = [name for name in after.roster if name in after.clients]  # the order decides the last bits
        found: dict[str, Tensor] = {}
        if "sums" not in before.shared and self._fit(after):
            factors, weights = [after.clients[n]["factor"] for n in names], [self.weight(after, n) for n in names]
            consensus = combine(factors, weights, config.rank)
        else:
            sums = self._sums(before, after, [name for name in before.roster if name in changed])
            consensus = sums.consensus(self._omega(), self._precision, config.rank)
            found = {"sums": sums.sketch, "totals": torch.tensor([sums.trace, sums.weight], dtype=torch.float64)}
        return {"factor": consensus.factor.to(wire), "lost": torch.tensor(consensus.lost), **found}

    def _fit(self, state: ServerState) -> bool:
        """Whether all factors together are no wider than the consensus may be."""
        config, most = self.config.alignment, self.config.alignment.rank
        if config.form == "sketch" or len(state.clients) > most:
            return False
        return sum(share["factor"].shape[1] for share in state.clients.values()) <= most

    def _sums(self, before: ServerState, after: ServerState, changed: Sequence[ClientId]) -> Sums:
        """Those of `before`, less the old shares of those who changed, plus their new ones; or all anew."""
        if "sums" in before.shared:
            sums = Sums(before.shared["sums"], *before.shared["totals"].tolist())
        else:
            sums, before, changed = Sums(), replace(before, clients={}), after.roster
        for state, sign in ((before, -1), (after, 1)):
            for name in changed:
                if name in state.clients:
                    sums = sums.plus(sign * self.weight(state, name), *self._sketched(state.clients[name]))
        return sums

    def _sketched(self, share: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """K_k Omega and tr K_k, whichever form the client sent."""
        if self.config.alignment.form == "sketch":
            return share["sketch"], float(share["trace"])
        factor = share["factor"]
        return sketch(factor, self._omega()), float(factor.double().square().sum())

    def _norm(self, share: Mapping[str, Tensor]) -> float:
        """Frobenius norm of a client's kernel; of a sketch the part that Omega sees, which is no greater."""
        if self.config.alignment.form == "factor":
            return _norm(share["factor"])
        return float(share["sketch"].double().norm()) / self.config.rad.size  # Omega's columns have that length

    def _omega(self) -> Tensor:
        """The clients' own or, for sums of factors, the server's."""
        columns = self.config.alignment.rank * (SPARE if self.config.alignment.form == "factor" else 1)
        return sketching_matrix(self.config.rad.size, columns, self.config.seed)

    @property
    def _precision(self) -> float:
        """Relative, of what the sums are made of."""
        config = self.config.alignment
        return EXACT if config.form == "factor" else torch.finfo(getattr(torch, config.wire)).eps

    def weight(self, state: ServerState, name: ClientId) -> float:
        """w_j of the consensus, before all are scaled to sum 1."""
        weights = self.config.clients.weights
        if isinstance(weights, tuple):
            place = state.roster.index(name)
            return weights[place] if place < len(weights) else 1.0  # one who joined later
        return float(state.examples[name]) if weights == "size" else 1.0


def _norm(factor: Tensor) -> float:
    """Frobenius norm of A A^T."""
    a = factor.double()
    return float((a.T @ a).norm())


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


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
