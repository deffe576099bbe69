"""BYOL and SimSiam: predict one view's representation from another's."""

from collections.abc import Sequence
from itertools import combinations

import torch.nn.functional as F
from torch import Tensor

from ..models import Learner
from .alignment import at_least_float32


def regression_loss(prediction: Tensor, target: Tensor, normalize: bool = True) -> Tensor:
    """Squared distance of l2-normalised vectors, 2 - 2 cos, averaged over the batch; or of raw ones."""
    if not normalize:
        return (at_least_float32(prediction) - at_least_float32(target.detach())).square().sum(1).mean()
    return 2 - 2 * F.cosine_similarity(at_least_float32(prediction), at_least_float32(target.detach()), dim=1).mean()


def byol(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """2 - 2 cos(predictor(z_i), t_j), where t is the target network's output, both orders of each pair summed.

    Also returns the projections of the first view, to watch for collapse.
    """
    z = [learner.represent(view, "projector") for view in views]
    targets = [learner.targets(view) for view in views]
    return _both_orders(learner, z, targets), z[0]


def simsiam(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """-cos(predictor(z_i), stop-gradient(z_j)) / 2, both orders of each pair summed. Shown as (1 - cos) / 2, which is 0
    at its best and has the same gradient."""
    z = [learner.represent(view, "projector") for view in views]
    return _both_orders(learner, z, z) / 4, z[0]


def _both_orders(learner: Learner, z: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """The mean over pairs of views of what both orders cost."""
    predictions = [learner.predictor(each) for each in z]
    pairs = list(combinations(range(len(z)), 2))
    total = sum(
        regression_loss(predictions[i], targets[j], learner.ssl.normalize)
        + regression_loss(predictions[j], targets[i], learner.ssl.normalize)
        for i, j in pairs
    )
    return total / len(pairs)  # type: ignore[return-value]


def feature_spread(z: Tensor) -> Tensor:
    """Standard deviation of l2-normalised features, scaled so that 1 is isotropic and 0 is collapsed."""
    unit = F.normalize(z.detach().float(), dim=1)
    return unit.std(0).mean() * z.shape[1] ** 0.5
