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

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from ..config import Config
from ..data import random_view, take, to_input
from ..errors import ProtocolError
from ..kernels.distance import alignment_distance
from ..kernels.factor import effective_rank, kernel_factor
from ..kernels.mean import Sums
from ..learning.learner import Learner
from ..learning.training import TrainingClient, rad_representations, train
from ..privacy.accountant import epsilon_of
from ..privacy.sums import Layout, Vector
from .base import Broadcast, ClientId, Method, ServerState, Update
from .kernels import Kernels, KernelState, check_rows
from .private import Summands

POOR_RANK = 3.0  # effective rank of the mean kernel


class HeteroSSFL(Method):
    name = "hetero-ssfl"
    story = "learned together: each aligned its kernel on {rad} shared {things} (the RAD) with the mean kernel"
    keeps_replies = True
    sums_only = True
    opening = "all"  # Algorithm 1 computes K_mean(0) from the untrained models

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kernels = Kernels(config, self.weight)
        self.summands = Summands(config)

    def broadcast(self, state: ServerState, client: ClientId) -> Broadcast:
        mean = KernelState.from_tensors(state.shared)
        if self.config.alignment.leave_one_out and client in state.clients:
            others = {name: kept for name, kept in state.clients.items() if name != client}
            mean = self.kernels.consensus(state, replace(state, clients=others), [client]) if others else None
        return Broadcast(state.round + 1, {} if mean is None else {"factor": mean.factor})

    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        metrics: dict[str, float] = {}
        if down.round > 0:
            mu = mu_at(self.config, down.round)
            wanted = down.arrays.get("factor")
            term = Alignment(client, wanted, mu) if mu > 0 and wanted is not None else None
            metrics = train(client, down.round, term)
        factor = kernel_factor(rad_representations(client), self.config.alignment)
        metrics["effective_rank"] = effective_rank(factor)
        return Update(len(client.pixels), self.kernels.contribution(factor), metrics)

    def check(self, state: ServerState, client: ClientId, update: Update) -> None:
        super().check(state, client, update)
        self.kernels.check(state, client, update.arrays)

    def check_broadcast(self, client: TrainingClient, down: Broadcast) -> None:
        super().check_broadcast(client, down)
        for name, array in down.arrays.items():
            if name != "factor":
                raise ProtocolError(f"the server sent '{name[:40]}', expected only 'factor'.")
            check_rows(array, len(client.rad), 1, self.config.alignment.rank, "the server")

    def aggregate(self, state: ServerState, updates: Mapping[ClientId, Update]) -> ServerState:
        if self.config.privacy.secure:  # the same mean, where no server has to be kept from knowing the summands
            total = self.layout().zeros()
            for update in updates.values():
                total.add(self.summand(update, len(updates)))
            return self.aggregate_sum(state, total, len(updates), len(updates))[0]
        kept = {**state.clients, **{client: u.arrays for client, u in updates.items()}}
        examples = {**state.examples, **{name: u.examples for name, u in updates.items()}}
        after = replace(state, round=state.round + 1, clients=kept, examples=examples)
        return replace(after, shared=self.kernels.consensus(state, after, list(updates)).to_tensors())

    def forget(self, state: ServerState, gone: Collection[ClientId]) -> ServerState:
        after = super().forget(state, gone)
        leaving = [name for name in gone if name in state.clients]
        if not leaving or not after.clients:  # a mean of nothing would teach nothing
            return state
        return replace(after, shared=self.kernels.consensus(state, after, leaving).to_tensors())

    def with_noise(self, update: Update) -> Update:
        return Update(1, self.kernels.with_noise(update.arrays))

    def spent(self, releases: int) -> float:
        """Return the squared mu of this many contributions with noise."""
        noise = self.kernels.noise
        return releases * (noise.clip / noise.deviation) ** 2 if noise else 0.0

    def layout(self) -> Layout:
        return self.summands.layout()

    def summand(self, update: Update, participants: int) -> Vector:
        return self.summands.encode(update, participants)

    def aggregate_sum(
        self, state: ServerState, total: Vector, participants: int, summands: int
    ) -> tuple[ServerState, dict[str, float]]:
        means = self.summands.decode(total, participants, summands)
        new, noise = Sums().plus(1.0, means.sketch, means.trace), self.summands.noise_in_mean(participants, summands)
        mixed = self.kernels.mixed(state, new, self.config.privacy.keep, noise)
        return replace(state, round=state.round + 1, shared=mixed.to_tensors()), dict(means.figures)

    def metrics(self, state: ServerState) -> dict[str, float]:
        mean = KernelState.from_tensors(state.shared)
        if mean is None:
            return {}
        found = {"consensus_effective_rank": effective_rank(mean.factor), "consensus_lost_share": mean.lost}
        privacy = self.config.privacy
        if privacy.epsilon is None:
            return found
        del found["consensus_lost_share"]  # traces are not sent
        return {**found, "epsilon": epsilon_of(self.spent(state.round + 1), privacy.delta)}

    def start_warning(self, clients: int) -> str | None:
        noise, privacy, entries = self.summands.noise, self.config.privacy, self.layout().body
        if noise is None:
            return None
        per_round = self.config.clients.selected_per_round(clients)
        summed = self.summands.noise_in_mean(per_round, per_round)
        alone = noise.deviation / clients**0.5  # in the mean of the last contributions of all clients
        ratio = (summed if privacy.secure else alone) * entries**0.5 / noise.clip
        edge = ratio * (2 / self.config.rad.size) ** 0.5  # the largest eigenvalue of noise alone (consensus.py)
        learns = "it can learn from the consensus" if edge < 0.1 else "it learns only what is strongest in the kernels"
        learns = learns if edge < 1 else "it will not learn from the consensus"
        who = f"with {per_round} clients per round" if privacy.secure else f"with {clients} clients and no secure sums"
        worse = "" if privacy.secure else f" ({alone / summed:.2g} times as large as with privacy.secure)"
        probes = " Accuracies of probes are sent without noise (evaluation.probes)." if self._evaluates() else ""
        return (
            f"privacy.epsilon = {privacy.epsilon:g}: {who} the noise in the mean kernel is {ratio:.3g} times as large "
            f"as the largest signal{worse}, so {learns}; see docs/privacy.md.{probes}"
        )

    def _evaluates(self) -> bool:
        return bool(self.config.evaluation.probes or self.config.evaluation.label_shares)

    def round_warning(self, figures: Mapping[str, float]) -> str | None:
        clipped = figures.get("clipped", 0.0)
        if clipped > 0:
            return (
                f"{clipped:.1%} of the entries of the sketches exceed privacy.largest_entry = "
                f"{self.config.privacy.largest_entry:g} and were clipped. Raise it."
            )
        rank = figures.get("consensus_effective_rank", POOR_RANK)
        if rank >= POOR_RANK:
            return None
        return f"the effective rank of the consensus is only {rank:.1f}, which teaches little: see docs/alignment.md"

    def example_messages(self, learner: Learner, sample: Tensor) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        with torch.no_grad():
            learner.eval()
            width = learner.represent(sample, self.config.alignment.layer).shape[1]
        rank, rows = self.config.alignment.rank, self.config.rad.size
        up, down = min(width, rank), min(width * self.config.clients.count, rank)
        if self.config.alignment.form == "sketch":
            up = down = min(rank, rows)
        wire = self.kernels.wire
        sent = getattr(torch, f"int{self.layout().word}") if self.config.privacy.secure else wire
        return {"factor": torch.zeros(rows, down, dtype=wire)}, {"factor": torch.zeros(rows, up, dtype=sent)}

    def extra_images_per_step(self) -> float:
        alignment, rows = self.config.alignment, self.config.rad.size
        if alignment.mu == 0:
            return 0.0
        return min(alignment.rad_batch or rows, rows) / 2 / alignment.every  # one view per image, not a pair

    def portrait(self, state: ServerState) -> dict[str, Any]:
        return self.kernels.portrait(state)

    def weight(self, state: ServerState, name: ClientId) -> float:
        """Return w_j of the consensus, before the weights are scaled to sum to 1."""
        weights = self.config.clients.weights
        if isinstance(weights, tuple):
            place = state.roster.index(name)
            return weights[place] if place < len(weights) else 1.0  # a client that joined later
        return float(state.examples[name]) if weights == "size" else 1.0


class Alignment:
    """mu * distance(K_k, K_mean) on a new batch of RAD images, at each step or once per epoch."""

    def __init__(self, client: TrainingClient, consensus: Tensor, mu: float) -> None:
        self.config, self.mu = client.config, mu
        self.rad, self.consensus = client.rad, consensus.to(client.device)
        batch = client.config.alignment.rad_batch
        self.batch = min(batch, len(self.rad)) if batch else len(self.rad)
        self.memory: deque[tuple[Tensor, Tensor]] = deque()  # rows and their representations, oldest first

    def __call__(self, learner: Learner, rng: Generator, step: int) -> Tensor:
        alignment = self.config.alignment
        if (alignment.when == "epoch" and step > 0) or step % alignment.every:
            return torch.zeros((), device=self.consensus.device)
        rows = torch.randperm(len(self.rad), generator=rng)[: self.batch]
        pixels = take(self.rad, rows, self.consensus.device)
        images = random_view(pixels, self.config.views, rng) if alignment.augment_rad else to_input(pixels)
        live = learner.represent(images, alignment.trained_layer)
        all_rows, representations = self._with_memory(rows, live)
        wanted = take(self.consensus, all_rows, live.device)
        return self.mu * alignment.every * alignment_distance(representations, wanted, alignment, len(rows))

    def _with_memory(self, rows: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Return this step's rows followed by remembered rows that are not among them, newest first."""
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
        kept = torch.tensor(unique, dtype=torch.long)
        return torch.cat([rows, old_rows[kept]]), torch.cat([live, take(old, kept, live.device).to(live.dtype)])


def mu_at(config: Config, round_number: int) -> float:
    """Return mu of a round: constant, or growing linearly over the first `ramp_rounds`."""
    ramp = config.alignment.ramp_rounds
    return config.alignment.mu * (min(1.0, round_number / ramp) if ramp else 1.0)
