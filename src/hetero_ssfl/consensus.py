"""The mean kernel of all clients, without ever writing out a kernel.

K_mean = sum_j w_j A_j A_j^T = B B^T with B = [sqrt(w_1) A_1 | sqrt(w_2) A_2 | ...]. Each client sends a factor A_j
(L x d_j) of its own kernel; the server keeps B (L x r), exact until `rank` columns.

Beyond, it keeps sum_j w_j K_j Omega with one Omega for all. Such sketches of unlike clients have one shape and add up
as their kernels do, so the server needs only their sum; or clients send sketches themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import AlignmentConfig
from .objectives import factor_hsic_debiased, gram
from .seeding import rng_for

LANDMARKS = 512  # rows that stand for all in the factor of a kernel that is not linear
SPARE = 2  # times the rank: columns of the server's own sums. Up to that many RAD images they are exact.
SINGLE = torch.finfo(torch.float32).eps  # relative precision of sketches that the server makes from factors


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


def combine(factors: Sequence[Tensor], weights: Sequence[float]) -> Consensus:
    """B = [sqrt(w_j) A_j ...] with weights scaled to sum 1: exact, and as wide as all factors together."""
    roots = [(w / sum(weights)) ** 0.5 for w in weights]
    return Consensus(torch.cat([r * a.double() for a, r in zip(factors, roots, strict=True)], dim=1).float())


def truncate(factor: Tensor, rank: int) -> Consensus:
    """The best `rank` directions of a factor A, by the eigenvectors of A^T A or A A^T, whichever is smaller."""
    rows, columns = factor.shape
    if columns <= rank:
        return Consensus(factor)
    a = factor.double()
    values, vectors = torch.linalg.eigh(a.T @ a if columns <= rows else a @ a.T)  # in rising order
    values, vectors = values.clamp_min(0).flip(0), vectors[:, -rank:].flip(1)
    kept = a @ vectors if columns <= rows else vectors * values[:rank].sqrt()
    total = float(values.sum())
    return Consensus(kept, max(0.0, 1 - float(values[:rank].sum()) / total) if total else 0.0)


# --- the consensus as a sum of equal shapes --------------------------------------------------------


@lru_cache(maxsize=2)
def sketching_matrix(rows: int, rank: int, seed: int) -> Tensor:
    """Omega (L x min(rank, L)) with orthogonal columns, the same for everyone who knows the run's seed."""
    gaussian = torch.randn(rows, min(rank, rows), dtype=torch.float64, generator=rng_for(seed, "sketch"))
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal().sign()  # QR alone leaves the signs to the library, and machines differ
    return rows * q  # K Omega of a kernel with norm 1 then has entries of order 1, where half precision is at its best


def sketch(factor: Tensor, omega: Tensor) -> Tensor:
    """Y_j = K_j Omega = A_j (A_j^T Omega), as wide as Omega whatever the width of A_j, in the precision of A_j."""
    return factor @ (factor.T @ omega.to(factor.dtype))


@dataclass(frozen=True)
class Sums:
    """sum_j w_j K_j Omega, sum_j w_j tr K_j and sum_j w_j. Whoever was added can be taken away again, so a server
    need not look at clients that have not changed. In double precision, so that old shares leave nothing behind."""

    sketch: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    trace: float = 0.0
    weight: float = 0.0

    def plus(self, weight: float, sketch: Tensor, trace: float) -> "Sums":
        total = torch.add(self.sketch.expand_as(sketch), sketch, alpha=weight)  # in one pass, whatever the wire's type
        return Sums(total, self.trace + weight * trace, self.weight + weight)

    def consensus(self, omega: Tensor, precision: float, rank: int) -> Consensus:
        """The weighted mean kernel, cut to `rank` columns."""
        found = combine_sketches(self.sketch / self.weight, self.trace / self.weight, omega, precision)
        cut = truncate(found.factor, rank)
        return Consensus(cut.factor.float(), 1 - (1 - found.lost) * (1 - cut.lost))


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
    values = torch.linalg.eigvalsh(a.T @ a if a.shape[1] <= len(a) else a @ a.T).clamp_min(0).flip(0)
    return values / values.sum().clamp_min(1e-300)


def mutual_cka(factors: Sequence[Tensor]) -> Tensor:
    """Debiased linear CKA between every two clients' features of the same images (0 for unrelated ones)."""
    centred = [a.double() - a.double().mean(0) for a in factors]
    hsic = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    for i, j in combinations_with_replacement(range(len(factors)), 2):
        hsic[i, j] = hsic[j, i] = factor_hsic_debiased(centred[i], centred[j])
    own = hsic.diagonal().clamp_min(1e-24).sqrt()
    return (hsic / own / own[:, None]).fill_diagonal_(1).float()
