"""Losses that compare the projections of two views directly, without predictor or target network.

Each loss is a pure function of two projections z_1, z_2 (n x d) of the same images. With more than two views, the local
loss is the mean over all pairs of views.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import SslConfig
from ..kernels.cka import at_least_float32
from ..models import Learner

EPS = 1e-4  # keeps the gradient of a standard deviation finite at 0


def vicreg(z_1: Tensor, z_2: Tensor, ssl: SslConfig) -> Tensor:
    """VICReg (Bardes et al., 2022): views agree, every dimension varies, dimensions are uncorrelated.

    invariance * mean (z_1 - z_2)^2 + variance * mean_j max(0, 1 - std_j) + covariance * sum_{i != j} C_ij^2 / d; the
    second term is averaged over the two views and the third is summed, as in the published code.
    """
    spread = sum(F.relu(1 - (z.var(0) + EPS).sqrt()).mean() for z in (z_1, z_2)) / 2
    shared = sum(off_diagonal(torch.cov(z.T)).square().sum() / z.shape[1] for z in (z_1, z_2))
    return ssl.invariance * F.mse_loss(z_1, z_2) + ssl.variance * spread + ssl.covariance * shared


def barlow_twins(z_1: Tensor, z_2: Tensor, ssl: SslConfig) -> Tensor:
    """Barlow Twins (Zbontar et al., 2021): sum_i (1 - C_ii)^2 + redundancy * sum_{i != j} C_ij^2, where C is the
    correlation between the dimensions of one view and those of the other over the batch."""
    z_1, z_2 = ((z - z.mean(0)) / (z.var(0, correction=0) + EPS).sqrt() for z in (z_1, z_2))
    c = z_1.T @ z_2 / len(z_1)
    return (1 - c.diagonal()).square().sum() + ssl.redundancy * off_diagonal(c).square().sum()


def simclr(z_1: Tensor, z_2: Tensor, ssl: SslConfig) -> Tensor:
    """SimCLR (Chen et al., 2020): distinguish the other view of an image from the 2n - 2 views of other images with a
    softmax over cosine similarities divided by the temperature."""
    z = F.normalize(torch.cat([z_1, z_2]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = (z @ z.T / ssl.temperature).masked_fill(itself, float("-inf"))
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device).roll(len(z_1)))


def off_diagonal(square: Tensor) -> Tensor:
    return square - torch.diag(square.diagonal())


def on_pairs(
    loss: Callable[[Tensor, Tensor, SslConfig], Tensor],
) -> Callable[[Learner, Sequence[Tensor]], tuple[Tensor, Tensor]]:
    """Return a local loss: the mean of `loss` over all pairs of views, and the projections of the first view."""

    def local_loss(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        z = [at_least_float32(learner.represent(view, "projector")) for view in views]
        with torch.autocast(z[0].device.type, enabled=False):  # sums over the batch need single precision
            losses = [loss(a, b, learner.ssl) for a, b in combinations(z, 2)]
        return torch.stack(losses).mean(), z[0]

    return local_loss
