"""The mean kernel of all clients, without ever writing out a kernel.

K_mean = sum_j w_j A_j A_j^T = B B^T with B = [sqrt(w_1) A_1 | sqrt(w_2) A_2 | ...]. Each client sends a factor A_j
(L x d_j) of its own kernel; the server keeps B (L x r), exact until `rank` columns and cut to the strongest
directions beyond.

Or each client sends a sketch K_j Omega (L x r) with one Omega for all. Sketches of unlike clients have one shape and
add up as their kernels do, so the server needs only their sum.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import AlignmentConfig
from .objectives import gram
from .seeding import rng_for

LANDMARKS = 512  # rows that stand for all in the factor of a kernel that is not linear


@dataclass(frozen=True)
class Consensus:
    """B with K_mean = B B^T, and the share of K_mean's trace that the rank limit left out."""

    factor: Tensor
    lost: float = 0.0


def client_factor(representations: Tensor, config: AlignmentConfig) -> Tensor:
    """What client j sends in factor form: A_j, cut to the rank that may travel."""
    return truncate(kernel_factor(representations, config), config.rank).factor.float()


def kernel_factor(representations: Tensor, config: AlignmentConfig) -> Tensor:
    """A_j made comparable with the others', so that K_j = A_j A_j^T may be averaged."""
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
    """U S^power for a = U S V^T. Below 1 the weak directions weigh more and the effective rank rises."""
    values, vectors = torch.linalg.eigh(a.T @ a)
    singular = values.clamp_min(0).sqrt()
    kept = singular > 1e-6 * singular.max()  # the rest is rounding error that a small power would blow up
    return a @ (vectors[:, kept] * singular[kept] ** (power - 1))


def nystroem(a: Tensor, config: AlignmentConfig) -> Tensor:
    """A factor of a nonlinear kernel from at most LANDMARKS rows; exact when there are no more rows than that."""
    step = max(1, -(-len(a) // LANDMARKS))
    landmarks = a[::step]
    values, vectors = torch.linalg.eigh(gram(landmarks, config))
    kept = values > 1e-10 * values.max()
    return gram(a, config, landmarks) @ (vectors[:, kept] * values[kept].rsqrt())


def combine(factors: Sequence[Tensor], weights: Sequence[float], rank: int) -> Consensus:
    """B = [sqrt(w_j) A_j ...] with weights scaled to sum 1, cut to `rank` columns.

    Beyond the rank, factors are taken up one at a time and several times over: a sequence may load them when asked.
    """
    total = sum(weights)
    roots = [(w / total) ** 0.5 for w in weights]
    if len(factors) > rank or sum(a.shape[1] for a in factors) > rank:
        consensus = strongest(lambda: (r * a.float() for a, r in zip(factors, roots, strict=True)), rank)
    else:
        consensus = Consensus(torch.cat([r * a.double() for a, r in zip(factors, roots, strict=True)], dim=1))
    return Consensus(consensus.factor.float(), consensus.lost)


def truncate(factor: Tensor, rank: int) -> Consensus:
    """The best `rank` directions of a factor."""
    return Consensus(factor) if factor.shape[1] <= rank else strongest(lambda: iter([factor]), rank)


def strongest(parts: Callable[[], Iterator[Tensor]], rank: int) -> Consensus:
    """The best `rank` directions of F = [A_1 | A_2 | ...] by subspace iteration: O(L R r), never L x L nor all of F.

    Products are in the precision of the parts; what decides which directions are strongest is in double.
    """
    rng, columns = rng_for(0, "truncate"), rank + 16
    mixed = sum(a @ torch.randn(a.shape[1], columns, dtype=torch.float64, generator=rng).to(a.dtype) for a in parts())
    basis = torch.linalg.qr(mixed).Q
    for _ in range(4):
        basis = torch.linalg.qr(sum(a @ (a.T @ basis) for a in parts())).Q
    core, size = torch.zeros(basis.shape[1], basis.shape[1], dtype=torch.float64), 0.0
    for a in parts():
        seen = (a.T @ basis).double()
        core, size = core + seen.T @ seen, size + float(a.double().square().sum())
    values, vectors = torch.linalg.eigh(core)  # of basis^T F F^T basis: squared singular values, in rising order
    values, vectors = values[-rank:].flip(0).clamp_min(0), vectors[:, -rank:].flip(1)
    kept = basis.double() @ (vectors * values.sqrt())
    return Consensus(kept, max(0.0, 1 - float(kept.square().sum()) / size) if size else 0.0)


# --- the consensus as a sum of equal shapes --------------------------------------------------------


def sketching_matrix(rows: int, rank: int, seed: int) -> Tensor:
    """Omega (L x min(rank, L)) with orthogonal columns, the same for everyone who knows the run's seed."""
    gaussian = torch.randn(rows, min(rank, rows), dtype=torch.float64, generator=rng_for(seed, "sketch"))
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal().sign()  # QR alone leaves the signs to the library, and machines differ
    return rows * q  # K Omega of a kernel with norm 1 then has entries of order 1, where half precision is at its best


def sketch(factor: Tensor, omega: Tensor) -> Tensor:
    """Y_j = K_j Omega = A_j (A_j^T Omega), as wide as Omega whatever the width of A_j."""
    a = factor.double()
    return a @ (a.T @ omega)


def weighted_mean(shares: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_j w_j Y_j / sum_j w_j."""
    return sum((w * y.double() for y, w in zip(shares, weights, strict=True)), torch.zeros(())) / sum(weights)


def combine_sketches(mean: Tensor, trace: float, omega: Tensor, precision: float) -> Consensus:
    """Nystroem: K ~= Y (Omega^T Y)^+ Y^T from Y = K Omega, never above K, and K itself if rank K <= columns of Omega.

    `trace` is tr K, which says what is missing; `precision` is the relative error of the shares that make up Y.
    """
    y = mean.double()
    core = omega.T @ y
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    # What is smaller is rounding error of either sign, and its inverse would be all one sees.
    real = values > precision * values.abs().max()
    columns = max(1, int(real.sum()))  # eigenvalues come in rising order; a kernel of zeros keeps one column of zeros
    inverse_root = values.where(real, torch.inf).rsqrt()
    factor = y @ (vectors * inverse_root)[:, -columns:]
    lost = 1 - float(factor.square().sum()) / trace if trace > 0 else 0.0
    return Consensus(factor.float(), max(0.0, lost))  # rounding can reach just below 0


# --- what a factor holds ---------------------------------------------------------------------------


def effective_rank(factor: Tensor) -> float:
    """Participation ratio (sum of eigenvalues)^2 / (sum of their squares) of the centred kernel: 1 when all
    images lie on one line, the number of directions when all are equally strong."""
    a = factor.double() - factor.double().mean(0)
    small = a.T @ a if a.shape[1] <= len(a) else a @ a.T
    return float(small.trace() ** 2 / small.square().sum().clamp_min(1e-300))


def spectrum(factor: Tensor) -> Tensor:
    """Eigenvalues of the centred kernel, largest first, as shares of their sum."""
    a = factor.double() - factor.double().mean(0)
    values = torch.linalg.svdvals(a).square()
    return values / values.sum().clamp_min(1e-300)
