"""SimSiam (Chen and He, 2021, arXiv:2011.10566): predict the projection of another view, without a target network.

    loss = sum over both orders of  (1 - cos(predictor(z_i), stop-gradient(z_j))) / 2

The published loss is -cos / 2. This one has the same gradient and is 0 at its minimum.

    loss, z = simsiam(learner, [view_1, view_2])
"""

from collections.abc import Sequence

from torch import Tensor

from ..learner import Learner
from .byol import both_orders


def simsiam(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss, and the projections of the first view to monitor for collapse."""
    z = [learner.represent(view, "projector") for view in views]
    return both_orders(learner, z, z) / 4, z[0]
