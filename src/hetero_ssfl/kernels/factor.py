"""A factor A of a client's kernel K = A A^T, from its representations of the RAD; and properties of a factor."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import AlignmentConfig
from .cka import gram

LANDMARKS = 512  # rows that represent all rows in the factor of a nonlinear kernel


def kernel_factor(representations: Tensor, config: AlignmentConfig) -> Tensor:
    """Return A_j, scaled so that the kernels K_j = A_j A_j^T of all clients can be averaged."""
    a = representations.double()
    if config.row_normalize:
        a = F.normalize(a, dim=1)
    if config.kernel != "linear":
        a = nystroem(a, config)
    if config.center:
        a = a - a.mean(0)
    if config.power != 1:
        a = flatten_spectrum(a, config.power)
    if config.normalize:
        a = a / (a.T @ a).norm().sqrt().clamp_min(1e-12)
    return a


def flatten_spectrum(a: Tensor, power: float) -> Tensor:
    """Return U S^power for a = U S V^T. A power below 1 strengthens weak directions and raises the effective rank."""
    values, vectors = torch.linalg.eigh(a.T @ a)
    singular = values.clamp_min(0).sqrt()
    kept = singular > 1e-6 * singular.max()  # the rest is rounding error that a small power would amplify
    return a @ (vectors[:, kept] * singular[kept] ** (power - 1))


def nystroem(a: Tensor, config: AlignmentConfig) -> Tensor:
    """Return a factor of a nonlinear kernel from at most LANDMARKS rows; exact if there are no more rows."""
    step = max(1, -(-len(a) // LANDMARKS))
    landmarks = a[::step]
    values, vectors = torch.linalg.eigh(gram(landmarks, config))
    kept = values > 1e-10 * values.max()
    return gram(a, config, landmarks) @ (vectors[:, kept] * values[kept].rsqrt())


def effective_rank(factor: Tensor) -> float:
    """Return the participation ratio (sum of eigenvalues)^2 / (sum of their squares) of the centred kernel: 1 if all
    images lie on one line, the number of directions if all are equally strong."""
    a = factor.double() - factor.double().mean(0)
    small = a.T @ a if a.shape[1] <= len(a) else a @ a.T
    return float(small.trace() ** 2 / small.square().sum().clamp_min(1e-300))


def spectrum(factor: Tensor) -> Tensor:
    """Return the eigenvalues of the centred kernel, largest first, as fractions of their sum."""
    a = factor.double() - factor.double().mean(0)
    values = torch.linalg.eigvalsh(a.T @ a if a.shape[1] <= len(a) else a @ a.T).clamp_min(0).flip(0)
    return values / values.sum().clamp_min(1e-300)
