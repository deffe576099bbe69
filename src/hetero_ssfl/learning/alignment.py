"""The alignment term of a client's loss: mu * distance(K_k, K_mean) on RAD images."""

from collections import deque

import torch
from torch import Generator, Tensor

from ..config import Config
from ..data import random_view, take, to_input
from ..kernels.distance import alignment_distance
from .learner import Learner
from .training import Step, TrainingClient


class Alignment:
    """mu * distance(K_k, K_mean) on a new batch of RAD images, at each step or once per epoch."""

    def __init__(self, client: TrainingClient, consensus: Tensor, mu: float) -> None:
        self.config, self.mu = client.config, mu
        self.rad, self.consensus = client.rad, consensus.to(client.device)
        batch = client.config.alignment.rad_batch
        self.batch = min(batch, len(self.rad)) if batch else len(self.rad)
        self.memory: deque[tuple[Tensor, Tensor]] = deque()  # rows and their representations, oldest first

    def __call__(self, learner: Learner, rng: Generator, step: Step) -> Tensor:
        alignment = self.config.alignment
        if (alignment.when == "epoch" and step.number > 0) or step.number % alignment.every:
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


class Coordinates:
    """mu * (1 - cos(h(f(x)), T_x)): the head's output for a RAD image is pulled to the image's coordinates.

    RAD images that are in the local loss anyway cost no additional forward pass.
    """

    def __init__(self, client: TrainingClient, coordinates: Tensor, mu: float) -> None:
        self.config, self.mu = client.config, mu
        self.rad, self.own_images, self.coordinates = client.rad, len(client.pixels), coordinates.to(client.device)

    def __call__(self, learner: Learner, rng: Generator, step: Step) -> Tensor:
        rows, features = self._rad_features(learner, rng, step)
        if not len(rows):
            return torch.zeros((), device=self.coordinates.device)
        assert learner.head is not None
        wanted = take(self.coordinates, rows, features.device)
        return self.mu * alignment_distance(learner.head(features), wanted, self.config.alignment)

    def _rad_features(self, learner: Learner, rng: Generator, step: Step) -> tuple[Tensor, Tensor]:
        """Return rows of the RAD and features of views of them."""
        if self.config.rad.in_ssl:
            places = (step.rows >= self.own_images).nonzero().squeeze(1)
            features = torch.cat([take(view, places, view.device) for view in step.features])
            return (step.rows[places] - self.own_images).repeat(len(step.features)), features
        batch = min(self.config.alignment.rad_batch or len(self.rad), len(self.rad))
        rows = torch.randperm(len(self.rad), generator=rng)[:batch]
        images = random_view(take(self.rad, rows, self.coordinates.device), self.config.views, rng)
        return rows, learner.encoder(images)


def mu_at(config: Config, round_number: int) -> float:
    """Return mu of a round: constant, or growing linearly over the first `ramp_rounds`."""
    ramp = config.alignment.ramp_rounds
    return config.alignment.mu * (min(1.0, round_number / ramp) if ramp else 1.0)
