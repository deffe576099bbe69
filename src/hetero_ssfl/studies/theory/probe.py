"""The loss of a client as a fixed function of its weights: the mean over fixed minibatches (rows, views, RAD rows) with
a fixed target network, in float32."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from ...config import Config
from ...data import random_view, take, to_input
from ...kernels.distance import alignment_distance
from ...learning.learner import Learner
from ...learning.training import Regulariser, Step, TrainingClient, rad_representations, self_supervised
from ...seeding import global_seed, rng_for
from .bound import ConstantsAlong, Point, point

MINIBATCHES = 8  # of the measured loss
RAD_IMAGES = 256  # whose representations give L2 and R


@dataclass(frozen=True)
class Parts:
    """What the loss at one point is made of."""

    local: float
    """The self-supervised part."""
    rad: Sequence[tuple[Tensor, Tensor]]
    """RAD rows and their representations, one pair for each minibatch."""

    def loss(self, factor: Tensor | None, mu: float, config: Config) -> float:
        """Return the loss with this mean kernel, which may be newer than the representations."""
        if factor is None or not mu:
            return self.local
        distances = [alignment_distance(z, take(factor, rows, z.device), config.alignment) for rows, z in self.rad]
        return self.local + mu * float(torch.stack(distances).mean())


def pool_of(client: TrainingClient) -> Tensor:
    """Return all images of the local loss."""
    return torch.cat([client.pixels, client.rad]) if client.config.rad.in_ssl else client.pixels


class Probe:
    """A copy of the networks, on which the loss and its gradients are computed in training mode.

    Only trainable parameters follow the client: the target network stays as it was at the start.
    """

    def __init__(self, client: TrainingClient, factor: Tensor | None, mu: float) -> None:
        self.client = replace(client, learner=copy.deepcopy(client.learner).train())
        self.factor, self.mu, self.pool = None if factor is None else factor.to(client.device), mu, pool_of(client)

    def at(self, learner: Learner) -> tuple[Point, Parts]:
        """Measure everything at the weights of these networks, which do not change."""
        own = list(self.client.learner.trainable())
        with torch.no_grad():
            for mine, theirs in zip(own, learner.trainable(), strict=True):
                mine.copy_(theirs)
        few = replace(self.client, learner=learner, rad=self.client.rad[:RAD_IMAGES])
        minibatches: list[tuple[float, Tensor, Tensor]] = []
        with torch.autocast(self.client.device.type, enabled=False):
            here = point(_flat(own), self._gradients(own, minibatches), rad_representations(few), sampled=True)
        local = sum(loss for loss, _, _ in minibatches) / len(minibatches)
        return here, Parts(local, [(rows, live) for _, rows, live in minibatches])

    def _gradients(
        self, own: list[torch.nn.Parameter], minibatches: list[tuple[float, Tensor, Tensor]]
    ) -> Iterator[Tensor]:
        """Yield the gradient of each minibatch's loss, and add to `minibatches` what the loss is made of."""
        config, name = self.client.config, self.client.name
        for j in range(MINIBATCHES):
            scope = ("theory", name, j)
            with global_seed(config.seed, *scope, "global"), torch.enable_grad():
                rng = rng_for(config.seed, *scope)
                batch = torch.randperm(len(self.pool), generator=rng)[: config.optim.batch]
                local, _ = self_supervised(self.client, take(self.pool, batch, self.client.device), None, rng)
                rows, live = self._represented(rng_for(config.seed, *scope, "rad"))
                loss = local
                if self.factor is not None and self.mu:
                    distance = alignment_distance(live, take(self.factor, rows, live.device), config.alignment)
                    loss = local + self.mu * distance
                gradients = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
            minibatches.append((float(local.detach()), rows, live.detach()))
            yield _flat(gradients)

    def _represented(self, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return rows of the RAD and their representations, drawn as `learning.alignment.Alignment` draws them."""
        config, rad = self.client.config, self.client.rad
        rows = torch.randperm(len(rad), generator=rng)[: config.alignment.rad_batch or len(rad)]
        pixels = take(rad, rows, self.client.device)
        images = random_view(pixels, config.views, rng) if config.alignment.augment_rad else to_input(pixels)
        return rows, self.client.learner.represent(images, config.alignment.trained_layer)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors]).cpu()


class Watch:
    """A regulariser that measures at each step of the training loop and returns the alignment term, if there is one."""

    def __init__(self, probe: Probe, term: Regulariser | None) -> None:
        self.probe, self.term, self.along = probe, term, ConstantsAlong()
        self.first: Parts | None = None
        self.squared_gradient_norms: list[float] = []

    def __call__(self, learner: Learner, rng: Generator, step: Step) -> Tensor:
        self.look(learner)
        if self.term is None:
            return torch.zeros((), device=self.probe.client.device)
        return self.term(learner, rng, step)

    def look(self, learner: Learner) -> Parts:
        """Measure at the networks' current weights."""
        here, parts = self.probe.at(learner)
        self.along.add(here)
        self.squared_gradient_norms.append(here.squared_gradient_norm)
        self.first = self.first or parts
        return parts
