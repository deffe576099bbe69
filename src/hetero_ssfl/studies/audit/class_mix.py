"""Guess the classes that a client holds from its kernel on labeled RAD images."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ...kernels.factor import effective_rank

RIDGE = 1.0  # regularises the attacker's classifier
TRIALS = 2000  # random guesses that give the range of chance


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
        count = int(own.sum())
        if count < 2:  # nothing can be said
            continue
        block = cosine[own][:, own]
        rest = cosine[own][:, ~own]
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
    """Return the `count` most likely classes."""
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
