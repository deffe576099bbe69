"""Similarity of two kernels on the same images: linear CKA and related measures, as pure functions.

A kernel K (n x n) of representations A (n x d) is given either as a matrix (`gram`) or as its factor A with K = A A^T.
The factor forms cost O(n d r) and never build an n x n matrix; the dense forms are for nonlinear kernels and serve as
reference in the tests.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..config import AlignmentConfig
from ..errors import ConfigError
from ..plugins import find

EPS = 1e-12


def at_least_float32(z: Tensor) -> Tensor:
    """Half precision would overflow: squared norms grow with the width times the number of images."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


# --- dense kernels ---------------------------------------------------------------------------------


def gram(a: Tensor, config: AlignmentConfig, landmarks: Tensor | None = None) -> Tensor:
    """Return K(p, q) for all rows of `a` (or between `a` and `landmarks`) with the kernel in the config."""
    b = a if landmarks is None else landmarks
    if ":" in config.kernel:
        return own_kernel(config.kernel, a, b)
    inner = a @ b.T
    if config.kernel == "linear":
        return inner
    # Scales come from `b` alone, so that K(a, landmarks) and K(landmarks, landmarks) are the same kernel.
    squared_b = b.square().sum(1)
    if config.kernel == "polynomial":
        return (inner / squared_b.mean().clamp_min(EPS) + 1) ** config.degree
    distance = a.square().sum(1)[:, None] + squared_b[None] - 2 * inner
    spread = 2 * (squared_b.mean() - b.mean(0).square().sum())  # mean squared distance between rows of b
    return torch.exp(-distance / (2 * config.bandwidth**2 * spread.clamp_min(EPS)))


def own_kernel(spec: str, a: Tensor, b: Tensor) -> Tensor:
    """Return K(a, b) from the user's function. A scale that depends on the data must be computed from `b` only."""
    k = find(spec, "alignment.kernel")(a, b)
    if not isinstance(k, Tensor) or k.shape != (len(a), len(b)):
        got = f"a tensor of shape {tuple(k.shape)}" if isinstance(k, Tensor) else f"a {type(k).__name__}"
        raise ConfigError(
            f"alignment.kernel = '{spec}' returned {got} for {len(a)} and {len(b)} rows, "
            f"expected ({len(a)}, {len(b)}). Return the kernel between all rows of the first and second argument."
        )
    return k


def centre(k: Tensor) -> Tensor:
    """Return H K H with H = I - 11^T/n: the kernel of features with their mean subtracted."""
    return k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()


def cka(k: Tensor, other: Tensor) -> Tensor:
    """Return the CKA of two kernels (not centred here); 1 if they are proportional."""
    return (k * other).sum() / (k.norm() * other.norm()).clamp_min(EPS)


def hsic_debiased(k: Tensor, other: Tensor) -> Tensor:
    """Return the unbiased HSIC of Song et al.: 0 on average for unrelated features of any width."""
    n = len(k)
    k, other = (m - torch.diag(m.diag()) for m in (k, other))
    cross = (k * other).sum() + k.sum() * other.sum() / ((n - 1) * (n - 2))
    return (cross - 2 / (n - 2) * k.sum(0) @ other.sum(0)) / (n * (n - 3))


def cka_debiased(k: Tensor, other: Tensor) -> Tensor:
    """Return the CKA from unbiased HSIC; the estimator includes centring."""
    return cosine(hsic_debiased, k, other)


def cosine(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Return <a, b> / sqrt(<a, a> <b, b>) for an inner product of kernels."""
    scale = (product(a, a) * product(b, b)).clamp_min(EPS**2).sqrt()
    return product(a, b) / scale


# --- factors ---------------------------------------------------------------------------------------


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return <A A^T, B B^T> = ||A^T B||^2, computed in the cheaper way."""
    if len(a) * (a.shape[1] + b.shape[1]) < a.shape[1] * b.shape[1]:  # few rows, wide features
        return ((a @ a.T) * (b @ b.T)).sum()
    return (a.T @ b).square().sum()


def factor_cka(a: Tensor, b: Tensor, center: bool = True, debiased: bool = False) -> Tensor:
    """Return the CKA of the kernels A A^T and B B^T from their factors."""
    a, b = at_least_float32(a), at_least_float32(b)
    if center or debiased:  # the debiased estimator ignores the mean, but float32 does not: it cancels large terms
        a, b = a - a.mean(0), b - b.mean(0)
    return cosine(factor_hsic_debiased if debiased else inner_product, a, b)


def factor_hsic_debiased(a: Tensor, b: Tensor) -> Tensor:
    n = len(a)
    diag_a, diag_b = a.square().sum(1), b.square().sum(1)
    sums_a, sums_b = a @ a.sum(0) - diag_a, b @ b.sum(0) - diag_b
    trace = inner_product(a, b) - diag_a @ diag_b
    cross = trace + sums_a.sum() * sums_b.sum() / ((n - 1) * (n - 2))
    return (cross - 2 / (n - 2) * sums_a @ sums_b) / (n * (n - 3))


def hsic_products(factors: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return the unbiased HSIC of each factor with each of the first `count`, and the norm of each.

    One product of matrices per client: with all factors that come after it among the first, side by side.
    """
    factors = [a - a.mean(0) for a in map(at_least_float32, factors)]
    n, wide = len(factors[0]), torch.cat(factors[:count], 1)
    edges = torch.tensor([0, *[a.shape[1] for a in factors[:count]]]).cumsum(0).tolist()
    traces, own = torch.zeros(len(factors), count, dtype=torch.float64), torch.zeros(len(factors), dtype=torch.float64)
    for i, a in enumerate(factors):
        first = i if i < count else 0
        squares = (a.T @ wide[:, edges[first] :]).square().sum(0).double()
        traces[i, first:] = torch.stack(
            [part.sum() for part in squares.split([a.shape[1] for a in factors[first:count]])]
        )
        own[i] = traces[i, i] if i < count else (a.T @ a).square().sum()
    traces[:count] += traces[:count].triu(1).T
    diag, sums = _diagonals_and_sums(factors)
    whole = sums.sum(1)

    def unbiased(trace: Tensor, diagonals: Tensor, totals: Tensor, rows: Tensor) -> Tensor:
        return (trace - diagonals + totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * rows) / (n * (n - 3))

    products = unbiased(traces, diag @ diag[:count].T, whole[:, None] * whole[:count], sums @ sums[:count].T)
    squares = unbiased(own, diag.square().sum(1), whole.square(), sums.square().sum(1))
    return products, squares.clamp_min(EPS**2).sqrt()


def _diagonals_and_sums(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the diagonals of the kernels, and the sums of their rows without the diagonal."""
    diagonals = torch.stack([a.square().sum(1) for a in factors]).double()
    return diagonals, torch.stack([a @ a.sum(0) for a in factors]).double() - diagonals


def mutual_cka(factors: Sequence[Tensor]) -> Tensor:
    """Return the debiased linear CKA between every two clients' features of the same images (0 if unrelated)."""
    products, norms = hsic_products([a.double() for a in factors], len(factors))
    return (products / norms / norms[:, None]).fill_diagonal_(1).float()
