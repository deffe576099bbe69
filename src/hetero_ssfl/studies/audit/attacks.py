"""Three attacks on a client's kernel on the RAD, as functions: class mix, stealing and membership."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ...config import AlignmentConfig, Config
from ...data import random_view, take, to_input
from ...kernels.distance import alignment_distance
from ...kernels.factor import effective_rank, flatten_spectrum
from ...learning.learner import Learner
from ...seeding import global_seed, rng_for

TRIALS = 2000  # guesses without information that give the range of chance
RIDGE = 1.0  # regularises the classifier of class mixes
BATCH = 64  # RAD images per step of stealing
LR = 3e-3
FALSE_POSITIVES = 0.01

# --- class mix ---


def class_features(factor: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return six figures for each class of the RAD images (classes x 6) which change if an encoder trains on a class:
    size and spread of its features, similarity within and to others, similarity and class of the nearest images."""
    a = factor.double() - factor.double().mean(0)
    a = a / a.square().sum(1).mean().sqrt().clamp_min(1e-12)
    cosine = F.normalize(a, dim=1) @ F.normalize(a, dim=1).T
    others = cosine.clone().fill_diagonal_(-2)
    near = others.topk(min(5, len(a) - 1), dim=1)
    figures = torch.zeros(classes, 6, dtype=torch.float64)
    for label in range(classes):
        own = labels == label
        count, block, rest = int(own.sum()), cosine[own][:, own], cosine[own][:, ~own]
        if count < 2:  # nothing can be said
            continue
        figures[label] = torch.tensor(
            [
                float(a[own].square().sum(1).mean()),
                effective_rank(a[own]),
                float((block.sum() - block.trace()) / (count * (count - 1))),
                float(rest.mean()) if rest.numel() else 0.0,
                float(near.values[own].mean()),
                float((labels[near.indices[own]] == label).double().mean()),
            ]
        )
    return figures


def class_scores(shadows: Tensor, held: Tensor, targets: Tensor) -> Tensor:
    """Return how likely each target is to hold each class (targets x classes), larger for more likely.

    `shadows` (clients x classes x figures) are of clients that the attacker trained itself, and `held` (clients x
    classes) says what they hold. One linear classifier serves all classes, so that few shadow clients suffice.
    """
    typical = shadows.mean(0)

    def relative(figures: Tensor) -> Tensor:
        """Compare with the typical client, and then with the other classes of the same client."""
        x = figures - typical
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True).clamp_min(1e-12)

    x = relative(shadows).flatten(0, 1)
    y = (held.double() - held.double().mean()).flatten()
    weights = torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
    return relative(targets) @ weights


def held_classes(counts: Sequence[int]) -> list[int]:
    """Return the classes that a client holds: at least half of what equal classes would have."""
    return [label for label, count in enumerate(counts) if count > 0 and count >= sum(counts) / (2 * len(counts))]


def guessed(scores: Tensor, count: int) -> list[int]:
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def hit_rate(guesses: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> float:
    """Return the fraction of guessed classes that the clients hold."""
    right = sum(len(set(guess) & set(own)) for guess, own in zip(guesses, held, strict=True))
    return right / max(1, sum(map(len, guesses)))


def hit_rate_of_chance(held: Sequence[Sequence[int]], classes: int, rng: Generator) -> tuple[float, float]:
    """Return the mean hit rate of random guesses, and the rate that 5 % of them exceed at most."""
    trials = [
        hit_rate([torch.randperm(classes, generator=rng)[: len(own)].tolist() for own in held], held)
        for _ in range(TRIALS)
    ]
    expected = sum(len(own) ** 2 for own in held) / (classes * max(1, sum(map(len, held))))
    return expected, float(torch.tensor(trials, dtype=torch.float64).quantile(0.95))


# --- stealing ---


def steal(learner: Learner, rad: Tensor, factor: Tensor, config: Config, steps: int, *scope: str) -> None:
    """Train the learner in place to maximise the CKA of its kernel with that of `factor` on the RAD.

    Every other batch consists of random views, because the client's encoder was trained to ignore them.
    """
    alignment = config.alignment.model_copy(update={"distance": "cka", "estimator": "biased"})
    device = next(learner.parameters()).device
    wanted = undone(factor, alignment)
    rng = rng_for(config.seed, "audit", "steal", *scope)
    optimiser = torch.optim.Adam(learner.trainable(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    learner.train()
    with global_seed(config.seed, "audit", "steal", *scope, "global"):
        for step in range(steps):
            rows = torch.randperm(len(rad), generator=rng)[:BATCH]
            pixels = take(rad, rows, device)
            images = random_view(pixels, config.views, rng) if step % 2 else to_input(pixels)
            live = learner.represent(images, alignment.layer)
            loss = alignment_distance(live, take(wanted, rows, device), alignment)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    learner.eval()


def undone(factor: Tensor, alignment: AlignmentConfig) -> Tensor:
    """Return the factor before `alignment.power`: then it is the client's features except for a rotation and a scale.

    For a mean of several kernels, this is only what comes closest.
    """
    if alignment.power == 1 or alignment.kernel != "linear":
        return factor.float()
    return flatten_spectrum(factor.double(), 1 / alignment.power).float()


# --- membership ---


def true_positive_rate(members: Tensor, others: Tensor) -> float:
    """Return the fraction of members above the lowest threshold that at most a fraction of non-members exceeds."""
    threshold = others.sort(descending=True).values[int(FALSE_POSITIVES * len(others))]
    return float((members > threshold).double().mean())


def area_under_curve(members: Tensor, others: Tensor) -> float:
    """Return the probability that a member scores higher than a non-member; ties count half."""
    difference = members[:, None] - others[None]
    return float((difference > 0).double().mean() + (difference == 0).double().mean() / 2)


def true_positive_rate_of_chance(members: int, others: int, rng: Generator) -> float:
    """Return the true-positive rate that scores without any information exceed in 5 % of cases at most."""
    trials = (torch.rand(members + others, generator=rng, dtype=torch.float64) for _ in range(TRIALS))
    rates = [true_positive_rate(scores[:members], scores[members:]) for scores in trials]
    return float(torch.tensor(rates, dtype=torch.float64).quantile(0.95))


def standardised(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the scores of one client's candidates, without using who is a member, so that clients can be pooled."""
    everyone = torch.cat([members, others])
    mean, std = everyone.mean(), everyone.std().clamp_min(1e-12)
    return (members - mean) / std, (others - mean) / std


def agreement(features: Sequence[Tensor]) -> Tensor:
    """Return the mean cosine between the features of every two random views of each image.

    That is the score of EncoderMI (Liu et al., CCS 2021): an encoder maps random views of its training images to
    features that agree more than those of other images.
    """
    units = torch.stack([F.normalize(f.double(), dim=1) for f in features])
    count = len(units)
    return (units.sum(0).square().sum(1) - count) / (count * (count - 1))
