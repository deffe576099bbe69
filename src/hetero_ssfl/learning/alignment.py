"""The alignment term of a client's loss: mu * distance(K_k, K_mean) on RAD images."""

from collections import deque

import torch
from torch import Generator, Tensor

from ..config import Config
from ..data import random_view, take, to_input
from ..kernels.distance import alignment_distance
from .learner import Learner
from .training import TrainingClient


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
