"""Weights that are learned: how much a client's kernel agrees with a robust consensus of those of the *others*.

1. Kernels are compared by their debiased CKA, an inner product of unit vectors: 0 for unrelated features of any width.
   It is computed from products of factors, on at most ROWS images, against a panel of at most PANEL clients.
2. The consensus of the others is their geometric median: unlike a mean, a minority cannot move it far. It is a weighted
   sum of kernels, so inner products are all that its iterations (Weiszfeld) need.
3. A client's agreement is its CKA with that median, as a fraction of the median client's. It is smoothed over rounds:
   an outlier once is noise, an outlier always is a liar.
4. Up to the fraction LOW a client counts nothing, from HIGH on it counts as much as all others do.

Honest clients with other encoders and other classes stay above HIGH or near it, so that without attackers the weights
are uniform. A liar that knows all this gets a client's weight for a kernel that agrees with the others.

The images and the panel of step 1 follow from what the clients of the round reported, so that no client knows them in
time to agree on those images only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..seeding import rng_for
from .cka import hsic_products

ROWS, PANEL = 256, 40
LOW, HIGH = 0.4, 0.8
MEMORY = 0.5  # the part of a client's last value that stays
MIN_AGREEMENT = 0.05  # of the median client: below it there is no consensus to agree with
MIN_CLIENTS = 3
STEPS = 30  # of Weiszfeld's iteration: more do not change the first four digits


def drawn(names: Sequence[str], rows: int, seed: int, *scope: str | int) -> tuple[list[str], Tensor]:
    """Return the clients of the panel, and the images on which kernels are compared."""
    rng = rng_for(seed, "agreement", *scope)
    members = torch.randperm(len(names), generator=rng)[:PANEL].sort().values.tolist()
    return [names[k] for k in members], torch.randperm(rows, generator=rng)[:ROWS].sort().values


def agreements(panel: Sequence[Tensor], others: Sequence[Tensor] = ()) -> list[float]:
    """Return the CKA of each client, first those of the panel, with the geometric median of the panel without it."""
    count = len(panel)
    products, norms = hsic_products([*panel, *others], count)
    cka = products / (norms[:, None] * norms[None, :count])
    allowed = torch.ones_like(cka)
    allowed[range(count), range(count)] = 0
    parts = geometric_medians(cka[:count], allowed)
    size = ((parts @ cka[:count]) * parts).sum(1).clamp_min(1e-12).sqrt()
    return ((parts * cka).sum(1) / size).tolist()


def geometric_medians(gram: Tensor, weights: Tensor) -> Tensor:
    """Return the geometric median of vectors with these inner products for each row of weights, as parts of them."""
    parts = weights / weights.sum(1, keepdim=True)
    for _ in range(STEPS):
        squared = gram.diagonal() - 2 * parts @ gram + ((parts @ gram) * parts).sum(1, keepdim=True)
        parts = weights / squared.clamp_min(1e-6).sqrt()
        parts = parts / parts.sum(1, keepdim=True)
    return parts


def relative(values: Sequence[float]) -> list[float]:
    """Return agreements as fractions of the median one, from 0 to 1."""
    usual = float(torch.tensor(values, dtype=torch.float64).median())
    return [1.0 if usual < MIN_AGREEMENT else min(max(value / usual, 0.0), 1.0) for value in values]


def smoothed(last: float | None, value: float) -> float:
    return value if last is None else MEMORY * last + (1 - MEMORY) * value


def weight_of(value: float) -> float:
    """Return a client's weight from its smoothed fraction."""
    return min(max((value - LOW) / (HIGH - LOW), 0.0), 1.0)
