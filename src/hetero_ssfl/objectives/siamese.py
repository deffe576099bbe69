"""BYOL and SimSiam: predict the representation of one view from another view."""

from collections.abc import Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.cka import at_least_float32
from ..models import Learner


def regression_loss(prediction: Tensor, target: Tensor, normalize: bool = True) -> Tensor:
    """Return the mean squared distance of l2-normalised vectors, 2 - 2 cos, or of raw vectors."""
    if not normalize:
        return (at_least_float32(prediction) - at_least_float32(target.detach())).square().sum(1).mean()
    return 2 - 2 * F.cosine_similarity(at_least_float32(prediction), at_least_float32(target.detach()), dim=1).mean()


def byol(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return 2 - 2 cos(predictor(z_i), t_j), summed over both orders of a pair; t is the target network's output.

    Also return the projections of the first view to monitor for collapse.
    """
    z = [learner.represent(view, "projector") for view in views]
    targets = [learner.targets(view) for view in views]
    return _both_orders(learner, z, targets), z[0]


def simsiam(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return -cos(predictor(z_i), stop-gradient(z_j)) / 2, summed over both orders of a pair. It is computed as
    (1 - cos) / 2, which is 0 at its minimum and has the same gradient."""
    z = [learner.represent(view, "projector") for view in views]
    return _both_orders(learner, z, z) / 4, z[0]


def _both_orders(learner: Learner, z: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the mean loss over pairs of views, summed over both orders, or of one order if not `ssl.symmetric`."""
    predictions = [learner.predictor(each) for each in z]
    pairs = list(combinations(range(len(z)), 2))
    orders = [*pairs, *((j, i) for i, j in pairs)] if learner.ssl.symmetric else pairs
    losses = [regression_loss(predictions[i], targets[j], learner.ssl.normalize) for i, j in orders]
    return torch.stack(losses).sum() / len(pairs)


def feature_spread(z: Tensor) -> Tensor:
    """Return the standard deviation of l2-normalised features, scaled so that 1 is isotropic and 0 is collapsed."""
    unit = F.normalize(z.detach().float(), dim=1)
    return unit.std(0).mean() * z.shape[1] ** 0.5
