"""What losses of two projections z_1, z_2 (n x d) of the same images share. They need no predictor and no target."""

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ...config import SslConfig
from ...kernels.cka import at_least_float32
from ..learner import Learner

EPS = 1e-4  # keeps the gradient of a standard deviation finite at 0


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
