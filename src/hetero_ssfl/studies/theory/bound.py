"""The paper's convergence theorem as pure functions: the bound, the step sizes it allows, and its constants.

One round of a client takes E gradient steps and then gets a new mean kernel. The theorem bounds the change of its loss:

    L_E' - L_0  <=  -(eta - L1 eta^2 / 2) sum_i ||grad_i||^2  +  L1 E eta^2 sigma^2 / 2  +  2 mu eta L2 P R^3 L^2
                    descent (Lemma 1)                            noise (Lemma 1)            kernel (Lemma 2)

Its proof takes one gradient step per local epoch, so E counts steps here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ...config import Config

# --- the bound -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The constants of the paper's assumptions, and the two sizes in its theorem."""

    l1: float = 0.0
    """Smoothness of the local loss: ||grad(a) - grad(b)|| <= L1 ||a - b||."""
    l2: float = 0.0
    """Lipschitz constant of the representation of any instance: ||Phi(x; a) - Phi(x; b)|| <= L2 ||a - b||."""
    p: float = 0.0
    """Limit of the mean norm of the stochastic gradient."""
    r: float = 0.0
    """Limit of the norm of a representation."""
    sigma: float = 0.0
    """Root of the limit of the stochastic gradient's variance, E ||g - grad||^2."""
    rows: int = 0
    """L, the number of RAD images."""
    steps: int = 0
    """E, the number of gradient steps of a round."""

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


def loss_change_bound(constants: Constants, eta: float, mu: float, squared_gradient_norms: Sequence[float]) -> float:
    """Return the theorem's upper bound on the change of the loss in one round, as printed."""
    return bound_terms(constants, eta, mu, squared_gradient_norms).total


def bound_for_every_step(constants: Constants, eta: float, mu: float, squared_gradient_norms: Sequence[float]) -> float:
    """Return the bound with the kernel term multiplied by E.

    The proof of Lemma 2 lets the weights move by one gradient step between two mean kernels. They move by E steps, at
    most E eta P on average, so the printed bound is proved for E = 1 only.
    """
    terms = bound_terms(constants, eta, mu, squared_gradient_norms)
    return terms.local + constants.steps * terms.kernel


def largest_eta(constants: Constants, mu: float, squared_gradient_norms: Sequence[float]) -> float:
    """Return the learning rate below which the theorem promises a decrease.

    0 means that no learning rate is allowed, because mu is too large. inf means that every one is (L1 = 0).
    """
    total = _total(constants, squared_gradient_norms)
    gain = total - mu * constants.kernel
    if gain <= 0:
        return 0.0
    curvature = constants.l1 * (total + constants.steps * constants.sigma**2)
    return 2 * gain / curvature if curvature else math.inf


def largest_mu(constants: Constants, squared_gradient_norms: Sequence[float]) -> float:
    """Return the mu below which the theorem allows a learning rate.

    0 means that no mu is allowed, because the gradient is zero. inf means that every one is (L2, P or R is 0).
    """
    total = _total(constants, squared_gradient_norms)
    if total <= 0:
        return 0.0
    return total / constants.kernel if constants.kernel else math.inf


def _total(constants: Constants, squared_gradient_norms: Sequence[float]) -> float:
    if len(squared_gradient_norms) != constants.steps:
        raise ValueError(f"got {len(squared_gradient_norms)} gradient norms, expected one for each of E steps.")
    return max(0.0, math.fsum(squared_gradient_norms))  # the estimate of a norm near 0 can be negative


# --- the constants, estimated along a sequence of steps --------------------------------------------


@dataclass(frozen=True)
class Point:
    """What was measured at one point of the weights, always on the same data."""

    weights: Tensor
    gradient: Tensor
    """The gradient of the loss: the mean over all minibatches."""
    mean_norm: float
    """The mean norm of a minibatch's gradient."""
    variance: float
    """The mean of ||g - grad||^2 over the minibatches."""
    squared_gradient_norm: float
    representations: Tensor
    """Phi of each instance, one per row."""


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


def estimate(points: Iterable[Point], rows: int, steps: int) -> Constants:
    """Return the largest values along the points. They are lower limits of the constants over all weights."""
    found, earlier = Constants(rows=rows, steps=steps), list[Point]()
    for each in points:
        found = widened(found, each, earlier)
        earlier = [*earlier[:1], each]
    return found


def widened(constants: Constants, new: Point, earlier: Iterable[Point]) -> Constants:
    """Return constants that also hold at a new point, and between it and earlier points."""
    pairs = [(new, old, float((new.weights.double() - old.weights.double()).norm())) for old in earlier]
    moved = [(a, b, distance) for a, b, distance in pairs if distance > 0]
    slopes = (float((a.gradient - b.gradient).norm()) / d for a, b, d in moved)
    changes = (float((a.representations - b.representations).double().norm(dim=1).max()) / d for a, b, d in moved)
    return replace(
        constants,
        l1=max(chain([constants.l1], slopes)),
        l2=max(chain([constants.l2], changes)),
        p=max(constants.p, new.mean_norm),
        r=max(constants.r, float(new.representations.double().norm(dim=1).max())),
        sigma=max(constants.sigma, math.sqrt(new.variance)),
    )


def for_all_clients(own: Constants, everyone: Iterable[Constants]) -> Constants:
    """Return a client's constants with the largest L2, P and R of all clients.

    Lemma 1 is about one client. Lemma 2 is about the mean kernel, which every client moves.
    """
    group = list(everyone)
    return replace(own, l2=max(c.l2 for c in group), p=max(c.p for c in group), r=max(c.r for c in group))


# --- where a run differs from the assumptions ------------------------------------------------------

DISTANCES = {
    "cka": "mu (1 - CKA) with CKA at most 1",
    "literal-cka": "mu CKA with CKA at most 1",
    "relational-kl": "mu times a KL divergence",
}


def changed_assumptions(config: Config) -> list[str]:
    """Return one sentence for each point where training with this config differs from the theorem."""
    return [sentence for applies, sentence in (*_steps(config), *_loss(config), *_alignment(config)) if applies]


def _steps(config: Config) -> Iterator[tuple[object, str]]:
    optim = config.optim
    yield True, "The proof takes one gradient step per epoch; the run takes one per minibatch, so E counts steps."
    yield optim.kind != "sgd", f"The theorem is about plain SGD; the run uses the optimiser {optim.kind}."
    heavy = optim.momentum if optim.kind in ("sgd", "lars") else 0
    yield heavy, f"Momentum {heavy:g}: steps are up to {_times(heavy)} times eta times the gradient."
    yield optim.weight_decay, f"Weight decay {optim.weight_decay:g} adds a term to each step that is not in the loss."
    yield optim.clip_norm, f"Gradients are clipped to norm {optim.clip_norm}, which makes them biased."
    yield (
        optim.schedule != "constant" or optim.warmup,
        f"The learning rate is not constant (schedule {optim.schedule}, warm-up of {optim.warmup:g} rounds); the bound "
        "is computed with the largest one of the measured steps.",
    )


def _loss(config: Config) -> Iterator[tuple[object, str]]:
    yield (
        True,
        "BatchNorm is in training mode, so the loss of an image depends on its minibatch; its running statistics also "
        "move Phi, and L2 includes that.",
    )
    yield (
        True,
        "Each step draws new random views, so the run has no fixed loss; the loss is measured on fixed minibatches and "
        "views.",
    )
    yield (
        config.ssl.kind == "byol",
        f"The target network moves at each step (ema {config.ssl.ema:g}), so the loss itself changes; the measurement "
        "keeps the target of the start of the round.",
    )
    yield (
        config.ssl.kind == "simsiam",
        "Gradients stop at the prediction target, so a step follows only a part of the gradient of the loss.",
    )


def _alignment(config: Config) -> Iterator[tuple[object, str]]:
    alignment, clients = config.alignment, config.clients
    if alignment.mu:
        yield (
            True,
            f"The alignment term is {DISTANCES[alignment.distance]}; the proof bounds mu trace(K K_mean), which is not "
            "normalised.",
        )
        kernel, rare = _kernel_changes(config), _rare(config)
        yield kernel, f"Kernels are not plain inner products of Phi: {kernel}."
        yield (
            rare,
            f"The alignment term is not in every step (alignment.{rare}); the measured loss contains it with "
            "weight mu.",
        )
        yield (
            alignment.trained_layer != alignment.layer,
            f"The term is computed from the {alignment.trained_layer}, and the kernels that are exchanged from the "
            f"{alignment.layer}; L2 and R are those of the {alignment.layer}.",
        )
        yield alignment.ramp_rounds, f"mu grows over the first {alignment.ramp_rounds} rounds."
    yield (
        clients.selected_per_round() < clients.count,
        "Only some clients take part in a round; in the measured round all do.",
    )


def _times(momentum: float) -> str:
    return f"{1 / (1 - momentum):.3g}" if momentum < 1 else "infinitely many"


def _rare(config: Config) -> str:
    alignment = config.alignment
    if alignment.when == "epoch":
        return 'when = "epoch"'
    return f"every = {alignment.every}" if alignment.every > 1 else ""


def _kernel_changes(config: Config) -> str:
    a = config.alignment
    settings = [
        (a.kernel != "linear", f'kernel = "{a.kernel}"'),
        (a.row_normalize, "row_normalize = true"),
        (a.center, "center = true"),
        (a.power != 1, f"power = {a.power:g}"),
        (a.normalize, "normalize = true"),
    ]
    return ", ".join(text for applies, text in settings if applies)
