"""The mean kernel of all clients, computed without forming an L x L kernel.

K_mean = sum_j w_j A_j A_j^T = B B^T with B = [sqrt(w_1) A_1 | sqrt(w_2) A_2 | ...]. Each client sends a factor A_j
(L x d_j) of its own kernel; the server keeps B (L x r), which is exact for up to `rank` columns.

For more columns the server keeps sum_j w_j K_j Omega with the same Omega for all clients. These sketches have the same
shape for all architectures and are linear in the kernels, so the server needs only their sum. Clients can also send
sketches themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..seeding import rng_for

SPARE = 2  # the server's own sums have SPARE * rank columns; they are exact for up to that many RAD images

SINGLE = torch.finfo(torch.float32).eps  # relative precision of sketches that the server makes from factors


@dataclass(frozen=True)
class Consensus:
    """B with K_mean = B B^T, and the fraction of K_mean's trace that the rank limit drops."""

    factor: Tensor
    lost: float = 0.0


def combine(factors: Sequence[Tensor], weights: Sequence[float]) -> Consensus:
    """Return the exact B = [sqrt(w_j) A_j ...], as wide as all factors together. Weights are scaled to sum to 1."""
    roots = [(w / sum(weights)) ** 0.5 for w in weights]
    return Consensus(torch.cat([r * a.double() for a, r in zip(factors, roots, strict=True)], dim=1).float())


def truncate(factor: Tensor, rank: int) -> Consensus:
    """Return the best `rank` directions of a factor A, from the eigenvectors of the smaller of A^T A and A A^T."""
    rows, columns = factor.shape
    if columns <= rank:
        return Consensus(factor)
    a = factor.double()
    values, vectors = torch.linalg.eigh(a.T @ a if columns <= rows else a @ a.T)  # in ascending order
    values, vectors = values.clamp_min(0).flip(0), vectors[:, -rank:].flip(1)
    kept = a @ vectors if columns <= rows else vectors * values[:rank].sqrt()
    total = float(values.sum())
    return Consensus(kept, max(0.0, 1 - float(values[:rank].sum()) / total) if total else 0.0)


# --- the consensus as a sum of sketches ------------------------------------------------------------


@lru_cache(maxsize=2)
def sketching_matrix(rows: int, rank: int, seed: int) -> Tensor:
    """Return Omega (L x min(rank, L)) with orthogonal columns, the same for all clients of a run."""
    gaussian = torch.randn(rows, min(rank, rows), dtype=torch.float64, generator=rng_for(seed, "sketch"))
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal().sign()  # the signs of QR differ between machines
    return rows * q  # K Omega of a kernel with norm 1 then has entries of order 1, which suits half precision


def sketch(factor: Tensor, omega: Tensor) -> Tensor:
    """Return Y_j = K_j Omega = A_j (A_j^T Omega), as wide as Omega and in the precision of A_j."""
    return factor @ (factor.T @ omega.to(factor.dtype))


@dataclass(frozen=True)
class Sums:
    """sum_j w_j K_j Omega, sum_j w_j tr K_j and sum_j w_j. A client can be added and subtracted, so the server does not
    read clients that have not changed. Double precision makes subtraction leave no visible remainder."""

    sketch: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    trace: float = 0.0
    weight: float = 0.0

    def plus(self, weight: float, sketch: Tensor, trace: float) -> "Sums":
        total = torch.add(self.sketch.expand_as(sketch), sketch, alpha=weight)  # one pass, for any wire type
        return Sums(total, self.trace + weight * trace, self.weight + weight)

    def consensus(self, omega: Tensor, precision: float, rank: int, noise: float = 0.0) -> Consensus:
        """Return the weighted mean kernel, truncated to `rank` columns."""
        found = combine_sketches(self.sketch / self.weight, self.trace / self.weight, omega, precision, noise)
        cut = truncate(found.factor, rank)
        return Consensus(cut.factor.float(), 1 - (1 - found.lost) * (1 - cut.lost))


def combine_sketches(mean: Tensor, trace: float, omega: Tensor, precision: float, noise: float = 0.0) -> Consensus:
    """Nystroem: K ~= Y (Omega^T Y)^+ Y^T from Y = K Omega, never above K, and K itself if rank K <= columns of Omega.

    `trace` is tr K, from which `lost` is computed; `precision` is the relative error of the sketches in Y, and `noise`
    the standard deviation of normal noise in its entries.
    """
    y = mean.double()
    core = omega.T @ y
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    # Smaller eigenvalues are errors of either sign, and their inverses would dominate the result. The columns of Omega
    # have norm L, so noise alone gives the core eigenvalues up to this size (Wigner's semicircle).
    of_noise = noise * len(y) * (2 * len(core)) ** 0.5
    real = values > max(of_noise, precision * float(values.abs().max()))
    columns = max(1, int(real.sum()))  # eigenvalues are ascending; a zero kernel keeps one column of zeros
    inverse_root = values.where(real, torch.inf).rsqrt()
    factor = y @ (vectors * inverse_root)[:, -columns:]
    lost = 1 - float(factor.square().sum()) / trace if trace > 0 else 0.0
    return Consensus(factor.float(), max(0.0, lost))  # rounding can make it slightly negative
