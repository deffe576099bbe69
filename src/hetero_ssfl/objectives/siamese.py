"""BYOL and SimSiam: predict one view's representation from the other's."""

import torch.nn.functional as F
from torch import Tensor

from ..models import Learner
from .alignment import at_least_float32


def regression_loss(prediction: Tensor, target: Tensor, normalize: bool = True) -> Tensor:
    """Squared distance of l2-normalised vectors, 2 - 2 cos, averaged over the batch; or of raw ones."""
    if not normalize:
        return (at_least_float32(prediction) - at_least_float32(target.detach())).square().sum(1).mean()
    return 2 - 2 * F.cosine_similarity(at_least_float32(prediction), at_least_float32(target.detach()), dim=1).mean()


def siamese_loss(learner: Learner, view_1: Tensor, view_2: Tensor) -> tuple[Tensor, Tensor]:
    """Both orders of the views summed, and the projections of the first view (to watch for collapse).

    SimSiam scales each order by a half (-cos instead of 2 - 2 cos); only the learning rate notices.
    """
    z_1, z_2 = (learner.represent(view, "projector") for view in (view_1, view_2))
    t_1, t_2 = learner.targets(view_1), learner.targets(view_2)
    loss = regression_loss(learner.predictor(z_1), z_2 if t_2 is None else t_2, learner.normalize)
    loss = loss + regression_loss(learner.predictor(z_2), z_1 if t_1 is None else t_1, learner.normalize)
    return loss, z_1


def feature_spread(z: Tensor) -> Tensor:
    """Standard deviation of l2-normalised features, scaled so that 1 is isotropic and 0 is collapsed."""
    unit = F.normalize(z.detach().float(), dim=1)
    return unit.std(0).mean() * z.shape[1] ** 0.5
