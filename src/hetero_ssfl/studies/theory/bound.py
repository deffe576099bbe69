"""The paper's convergence theorem as pure functions: the bound, the step sizes it allows, and its constants.

One round of a client takes E gradient steps and then gets a new mean kernel. The theorem bounds the change of its loss:

    L_E' - L_0  <=  -(eta - L1 eta^2 / 2) sum_i ||grad_i||^2  +  L1 E eta^2 sigma^2 / 2  +  2 mu eta L2 P R^3 L^2
                    descent (Lemma 1)                            noise (Lemma 1)            kernel (Lemma 2)

Its proof takes one gradient step per local epoch, so E counts steps here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Constants:
    """The constants of the paper's assumptions, and the two sizes in its theorem."""

    l1: float = 0.0  # smoothness of the local loss: ||grad(a) - grad(b)|| <= L1 ||a - b||
    l2: float = 0.0  # Lipschitz constant of any representation: ||Phi(x; a) - Phi(x; b)|| <= L2 ||a - b||
    p: float = 0.0  # limit of the mean norm of the stochastic gradient
    r: float = 0.0  # limit of the norm of a representation
    sigma: float = 0.0  # root of the limit of the stochastic gradient's variance, E ||g - grad||^2
    rows: int = 0  # L, the number of RAD images
    steps: int = 0  # E, the number of gradient steps of a round

    @property
    def kernel(self) -> float:
        """2 L2 P R^3 L^2, the factor of mu eta in the kernel term."""
        return 2 * self.l2 * self.p * self.r**3 * self.rows**2


@dataclass(frozen=True)
class Bound:
    """The three terms of the bound on the change of the loss."""

    descent: float
    noise: float
    kernel: float

    @property
    def local(self) -> float:
        """The bound of Lemma 1: the change in the local steps, before the mean kernel is replaced."""
        return self.descent + self.noise

    @property
    def total(self) -> float:
        return self.local + self.kernel


def bound_terms(constants: Constants, eta: float, mu: float, squared_gradient_norms: Sequence[float]) -> Bound:
    """Return the terms of the bound; `squared_gradient_norms` are ||grad_i||^2 before each of the E steps."""
    total = _total(constants, squared_gradient_norms)
    descent = -(eta - constants.l1 * eta**2 / 2) * total
    noise = constants.l1 * constants.steps * eta**2 * constants.sigma**2 / 2
    return Bound(descent, noise, mu * eta * constants.kernel)


def bound_for_every_step(constants: Constants, eta: float, mu: float, squared_gradient_norms: Sequence[float]) -> float:
    """Return the bound with the kernel term multiplied by E.

    The proof of Lemma 2 lets the weights move by one gradient step between two mean kernels. They move by E steps, at
    most E eta P on average, so the printed bound is proved for E = 1 only.
    """
    terms = bound_terms(constants, eta, mu, squared_gradient_norms)
    return terms.local + constants.steps * terms.kernel


def largest_eta(constants: Constants, mu: float, squared_gradient_norms: Sequence[float]) -> float:
    """Return the learning rate below which the theorem promises a decrease: 0 if mu is too large, inf if L1 is 0."""
    total = _total(constants, squared_gradient_norms)
    gain = total - mu * constants.kernel
    if gain <= 0:
        return 0.0
    curvature = constants.l1 * (total + constants.steps * constants.sigma**2)
    return 2 * gain / curvature if curvature else math.inf


def largest_mu(constants: Constants, squared_gradient_norms: Sequence[float]) -> float:
    """Return the mu below which the theorem allows a learning rate: 0 without a gradient, inf if L2, P or R is 0."""
    total = _total(constants, squared_gradient_norms)
    if total <= 0:
        return 0.0
    return total / constants.kernel if constants.kernel else math.inf


def _total(constants: Constants, squared_gradient_norms: Sequence[float]) -> float:
    if len(squared_gradient_norms) != constants.steps:
        raise ValueError(f"got {len(squared_gradient_norms)} gradient norms, expected one for each of E steps.")
    return max(0.0, math.fsum(squared_gradient_norms))  # the estimate of a norm near 0 can be negative


class Point(NamedTuple):
    """What was measured at one point of the weights, always on the same data."""

    weights: Tensor
    gradient: Tensor  # of the loss: the mean over all minibatches
    mean_norm: float  # of a minibatch's gradient
    variance: float  # the mean of ||g - grad||^2 over the minibatches
    squared_gradient_norm: float
    representations: Tensor  # Phi of each instance, one per row


def point(
    weights: Tensor, minibatch_gradients: Iterable[Tensor], representations: Tensor, sampled: bool = False
) -> Point:
    """Summarise the minibatches' gradients, which are read one at a time because they are as large as the networks.

    If the minibatches are only a sample of those that training draws, their mean gradient is too long by chance: its
    squared norm exceeds that of the true gradient by variance / n. `sampled` corrects norm and variance for this.
    """
    total = torch.zeros_like(weights, dtype=torch.float64)
    norms: list[float] = []
    for gradient in minibatch_gradients:
        total += gradient
        norms.append(float(gradient.double().norm()))
    n, mean = len(norms), total / len(norms)
    squared = float(mean.square().sum())
    variance = max(0.0, math.fsum(norm**2 for norm in norms) / n - squared)
    if sampled:
        variance *= n / (n - 1)
        squared -= variance / n
    return Point(weights, mean, math.fsum(norms) / n, variance, squared, representations)


class ConstantsAlong:
    """The largest values along a sequence of points. They are lower limits of the constants over all weights.

    A point is compared with the first and with the last one: points are as large as the networks, so not all are kept.
    """

    def __init__(self) -> None:
        self.constants, self._points = Constants(), list[Point]()

    def add(self, new: Point) -> None:
        c, slopes, changes = self.constants, [0.0], [0.0]
        for old in self._points:
            distance = float((new.weights.double() - old.weights.double()).norm())
            if distance > 0:
                slopes.append(float((new.gradient - old.gradient).norm()) / distance)
                moved = (new.representations - old.representations).double().norm(dim=1)
                changes.append(float(moved.max()) / distance)
        self._points = [*self._points[:1], new]
        self.constants = replace(
            c,
            l1=max(c.l1, *slopes),
            l2=max(c.l2, *changes),
            p=max(c.p, new.mean_norm),
            r=max(c.r, float(new.representations.double().norm(dim=1).max())),
            sigma=max(c.sigma, math.sqrt(new.variance)),
        )


def for_all_clients(own: Constants, everyone: Iterable[Constants]) -> Constants:
    """Return a client's constants with the largest L2, P and R of all clients.

    Lemma 1 is about one client. Lemma 2 is about the mean kernel, which every client moves.
    """
    group = list(everyone)
    return replace(own, l2=max(c.l2 for c in group), p=max(c.p for c in group), r=max(c.r for c in group))
