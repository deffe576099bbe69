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
        self.client, self.consensus, self.mu = client, consensus.to(client.device), mu
        self.memory: deque[tuple[Tensor, Tensor]] = deque()  # rows and their representations, oldest first

    def __call__(self, learner: Learner, rng: Generator, step: Step) -> Tensor:
        alignment = self.client.config.alignment
        if (alignment.when == "epoch" and step.number > 0) or step.number % alignment.every:
            return torch.zeros((), device=self.consensus.device)
        rows, images = rad_batch(self.client, rng, alignment.augment_rad)
        live = learner.represent(images, alignment.trained_layer)
        all_rows, representations = self._with_memory(rows, live)
        wanted = take(self.consensus, all_rows, live.device)
        return self.mu * alignment.every * alignment_distance(representations, wanted, alignment, len(rows))

    def _with_memory(self, rows: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Return this step's rows followed by remembered rows that are not among them, newest first."""
        size, fixed = self.client.config.alignment.memory, live.detach()
        if not size:
            return rows, live
        old_rows, old = (torch.cat(parts) for parts in zip((rows[:0], fixed[:0]), *self.memory, strict=True))
        newest = {row: place for place, row in enumerate(old_rows.tolist())}
        unseen = [newest[row] for row in newest.keys() - set(rows.tolist())]
        kept = torch.tensor(sorted(unseen, reverse=True)[:size], dtype=torch.long)
        self.memory.append((rows, fixed))
        while sum(len(r) for r, _ in self.memory) - len(self.memory[0][0]) >= size:
            self.memory.popleft()
        return torch.cat([rows, old_rows[kept]]), torch.cat([live, take(old, kept, live.device).to(live.dtype)])


class Coordinates:
    """mu * the distance between where an image lies among the RAD images and where the head h(f(view)) puts it.

    A RAD image lies at its coordinates, and an own image where the head puts its other view (`alignment.own_images`
    is the weight of this part). RAD images that are in the local loss anyway cost no additional forward pass.
    """

    def __init__(self, client: TrainingClient, coordinates: Tensor, mu: float) -> None:
        self.client, self.coordinates, self.mu = client, coordinates.to(client.device), mu

    def __call__(self, learner: Learner, rng: Generator, step: Step) -> Tensor:
        head, config, count = learner.head, self.client.config, len(self.client.pixels)
        assert head is not None
        if config.rad.in_ssl:
            rows, views = features_of(step, step.rows >= count)
            rows = rows - count
        else:
            rows, images = rad_batch(self.client, rng)
            views = [learner.encoder(images)]
        loss = torch.zeros((), device=self.coordinates.device)
        if len(rows):
            wanted = take(self.coordinates, rows, self.coordinates.device).repeat(len(views), 1)
            loss = self._distance(head(torch.cat(views)), wanted)
        own, views = features_of(step, step.rows < count)
        if len(own) and len(views) > 1 and config.alignment.own_images:
            here = [head(view) for view in views]
            there = [*here[1:], here[0]]
            loss = loss + config.alignment.own_images * self._distance(torch.cat(here), torch.cat(there).detach())
        return self.mu * loss

    def _distance(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        return alignment_distance(predicted, wanted, self.client.config.alignment, anchors=self.coordinates)


def features_of(step: Step, chosen: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the chosen rows of a step's images, and the features of their views."""
    places = chosen.nonzero().squeeze(1)
    return step.rows[places], [take(view, places, view.device) for view in step.features]


def rad_batch(client: TrainingClient, rng: Generator, augment: bool = True) -> tuple[Tensor, Tensor]:
    """Return random rows of the RAD, and a view of each image (or the image itself)."""
    size = len(client.rad)
    rows = torch.randperm(size, generator=rng)[: client.config.alignment.rad_batch or size]
    pixels = take(client.rad, rows, client.device)
    return rows, random_view(pixels, client.config.views, rng) if augment else to_input(pixels)


def mu_at(config: Config, round_number: int) -> float:
    """Return mu of a round: constant, or growing linearly over the first `ramp_rounds`."""
    ramp = config.alignment.ramp_rounds
    return config.alignment.mu * (min(1.0, round_number / ramp) if ramp else 1.0)
