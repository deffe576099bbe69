"""VICReg (Bardes et al., 2022, arXiv:2105.04906): views agree, every dimension varies, dimensions are uncorrelated.

    loss = invariance * mean (z_1 - z_2)^2 + variance * mean_j max(0, 1 - std_j) + covariance * sum_{i != j} C_ij^2 / d

The second term is averaged over the two views and the third is summed, as in the published code.

    vicreg(z_1, z_2, SslConfig(kind="vicreg"))  # z_1, z_2: projections (n, d) of two views of the same images
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import SslConfig
from .pairs import EPS, off_diagonal


def vicreg(z_1: Tensor, z_2: Tensor, ssl: SslConfig) -> Tensor:
    """Return the loss of one pair of views."""
    spread = sum(F.relu(1 - (z.var(0) + EPS).sqrt()).mean() for z in (z_1, z_2)) / 2
    shared = sum(off_diagonal(torch.cov(z.T)).square().sum() / z.shape[1] for z in (z_1, z_2))
    return ssl.invariance * F.mse_loss(z_1, z_2) + ssl.variance * spread + ssl.covariance * shared
