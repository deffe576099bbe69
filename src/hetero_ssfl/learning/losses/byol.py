"""BYOL (Grill et al., 2020, arXiv:2006.07733): predict the target network's projection of another view.

    loss = sum over both orders of  2 - 2 cos(predictor(z_i), t_j)

z_i is the online projection of view i, and t_j the target network's projection of view j, without gradient. The target
network is a moving average of the online network.

    loss, z = byol(learner, [random_view(pixels, views, rng), random_view(pixels, views, rng)])
    loss.backward()
    learner.move_target()
"""

from collections.abc import Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cka import at_least_float32
from ..learner import Learner


def byol(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss, and the projections of the first view to monitor for collapse."""
    z = [learner.represent(view, "projector") for view in views]
    targets = [learner.targets(view) for view in views]
    return both_orders(learner, z, targets), z[0]


def both_orders(learner: Learner, z: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the mean loss over pairs of views, summed over both orders, or of one order if not `ssl.symmetric`."""
    predictions = [learner.predictor(each) for each in z]
    pairs = list(combinations(range(len(z)), 2))
    orders = [*pairs, *((j, i) for i, j in pairs)] if learner.ssl.symmetric else pairs
    losses = [regression_loss(predictions[i], targets[j], learner.ssl.normalize) for i, j in orders]
    return torch.stack(losses).sum() / len(pairs)


def regression_loss(prediction: Tensor, target: Tensor, normalize: bool = True) -> Tensor:
    """Return the mean squared distance of l2-normalised vectors, 2 - 2 cos, or of raw vectors."""
    if not normalize:
        return (at_least_float32(prediction) - at_least_float32(target.detach())).square().sum(1).mean()
    return 2 - 2 * F.cosine_similarity(at_least_float32(prediction), at_least_float32(target.detach()), dim=1).mean()
