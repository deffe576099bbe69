"""Train an encoder whose kernel on the RAD is a client's, from the kernel alone."""

import torch
from torch import Tensor

from ...config import AlignmentConfig, Config
from ...data import random_view, take, to_input
from ...kernels.distance import alignment_distance
from ...kernels.factor import flatten_spectrum
from ...learning.learner import Learner
from ...seeding import global_seed, rng_for

BATCH = 64  # RAD images per step
LR = 3e-3


def steal(learner: Learner, rad: Tensor, factor: Tensor, config: Config, steps: int, *scope: str) -> None:
    """Train the learner in place to maximise the CKA of its kernel with that of `factor` on the RAD.

    Every other batch consists of random views, because the client's encoder was trained to ignore them.
    """
    alignment = config.alignment.model_copy(update={"distance": "cka", "estimator": "biased"})
    device = next(learner.parameters()).device
    wanted = undone(factor, alignment)
    rng = rng_for(config.seed, "audit", "steal", *scope)
    optimiser = torch.optim.Adam(learner.trainable(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    learner.train()
    with global_seed(config.seed, "audit", "steal", *scope, "global"):
        for step in range(steps):
            rows = torch.randperm(len(rad), generator=rng)[:BATCH]
            pixels = take(rad, rows, device)
            images = random_view(pixels, config.views, rng) if step % 2 else to_input(pixels)
            live = learner.represent(images, alignment.layer)
            loss = alignment_distance(live, take(wanted, rows, device), alignment)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    learner.eval()


def undone(factor: Tensor, alignment: AlignmentConfig) -> Tensor:
    """Return the factor before `alignment.power`: then it is the client's features except for a rotation and a scale.

    For a mean of several kernels, this is only what comes closest.
    """
    if alignment.power == 1 or alignment.kernel != "linear":
        return factor.float()
    return flatten_spectrum(factor.double(), 1 / alignment.power).float()
