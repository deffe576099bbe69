"""Barlow Twins (Zbontar et al., 2021, arXiv:2103.03230): each dimension agrees with itself and no other.

    loss = sum_i (1 - C_ii)^2 + redundancy * sum_{i != j} C_ij^2

C is the correlation, over the batch, between the dimensions of one view and those of the other.

    barlow_twins(z_1, z_2, SslConfig(kind="barlow-twins"))  # z_1, z_2: projections (n, d) of two views
"""

from torch import Tensor

from ...config import SslConfig
from .pairs import off_diagonal

EPS = 1e-5  # that of the batch normalisation in the authors' code


def barlow_twins(z_1: Tensor, z_2: Tensor, ssl: SslConfig) -> Tensor:
    """Return the loss of one pair of views."""
    z_1, z_2 = ((z - z.mean(0)) / (z.var(0, correction=0) + EPS).sqrt() for z in (z_1, z_2))
    c = z_1.T @ z_2 / len(z_1)
    return (1 - c.diagonal()).square().sum() + ssl.redundancy * off_diagonal(c).square().sum()
