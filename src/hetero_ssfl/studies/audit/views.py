"""What the attacker sees of a client: the contribution as sent, a sketch of a smaller rank, the mean over several
clients (all that a secure sum shows), or the kernel with Gaussian noise.

Every view is a factor A (RAD images x columns) of the best kernel A A^T that the attacker can recover from it.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from ...kernels.mean import SINGLE, combine, combine_sketches, sketch, sketching_matrix
from ...seeding import rng_for

RANKS = (8, 32, 128)  # of sketches
GROUPS = (3, 5, 10)  # clients in a secure sum
NOISE = (0.3, 1.0, 3.0)  # norm of the noise / norm of the kernel


class View(NamedTuple):
    """What the attacker sees of one client."""

    kind: Literal["sent", "sketch", "sum", "noise"]
    amount: float = 0.0  # rank of the sketch, number of clients in the sum, norm of the noise / norm of the kernel

    def __str__(self) -> str:
        words = {"sent": "as sent", "sketch": "sketch of rank {:g}", "sum": "sum of {:g}", "noise": "noise {:g}"}
        return words[self.kind].format(self.amount)


def views(clients: int, rows: int) -> list[View]:
    """Return the views that a run with so many clients and RAD images allows."""
    return [
        View("sent"),
        *(View("sketch", rank) for rank in RANKS if rank < rows),
        *(View("sum", group) for group in GROUPS if group <= clients),
        *(View("noise", ratio) for ratio in NOISE),
    ]


def seen(view: View, factors: Sequence[Tensor], weights: Sequence[float], client: int, seed: int) -> Tensor:
    """Return the factor that the attacker recovers of one of the clients' kernels.

    A sum is over the client and those that follow it, the first ones after the last.
    """
    own = factors[client].double()
    if view.kind == "sketch":
        omega = sketching_matrix(len(own), int(view.amount), seed)
        return combine_sketches(sketch(own, omega), 0.0, omega, SINGLE).factor
    if view.kind == "sum":
        group = [(client + k) % len(factors) for k in range(int(view.amount))]
        return combine([factors[k] for k in group], [weights[k] for k in group]).factor
    if view.kind == "noise":
        return noisy(own, view.amount, rng_for(seed, "audit", "noise", client)).float()
    return own.float()


def noisy(factor: Tensor, ratio: float, rng: Generator) -> Tensor:
    """Return what can be recovered of K + E, where E has independent Gaussian entries and norm ratio * ||K||.

    The attacker knows the size of the noise. It keeps the directions that stand out from the spectrum of random
    symmetric matrices, and shrinks their eigenvalues to undo what noise adds to them on average.
    """
    k = factor.double() @ factor.double().T
    sigma = ratio * float(k.norm()) / len(k)
    noise = sigma * torch.randn(k.shape, dtype=torch.float64, generator=rng)
    values, vectors = torch.linalg.eigh(k + (noise + noise.T) / 2)  # in ascending order
    edge = sigma * math.sqrt(2 * len(k))  # the largest eigenvalue of the noise alone
    kept = max(1, int((values > edge).sum()))
    values, vectors = values[-kept:].clamp_min(0), vectors[:, -kept:]
    shrunk = (values + (values.square() - edge**2).clamp_min(0).sqrt()) / 2
    return vectors * shrunk.sqrt()
