"""Guess whether an image was in a client's training data, and measure such guesses.

The score is that of EncoderMI (Liu et al., CCS 2021): an encoder maps random views of its training images to features
that agree more than those of other images.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

FALSE_POSITIVES = 0.01
TRIALS = 2000  # scores without information that give the range of chance


def true_positive_rate(members: Tensor, others: Tensor, false_positives: float = FALSE_POSITIVES) -> float:
    """Return the fraction of members above the lowest threshold that at most a fraction of non-members exceeds."""
    allowed = int(false_positives * len(others))
    threshold = others.sort(descending=True).values[allowed]
    return float((members > threshold).double().mean())


def area_under_curve(members: Tensor, others: Tensor) -> float:
    """Return the probability that a member scores higher than a non-member; ties count half."""
    difference = members[:, None] - others[None]
    return float((difference > 0).double().mean() + (difference == 0).double().mean() / 2)


def true_positive_rate_of_chance(members: int, others: int, rng: Generator) -> float:
    """Return the true-positive rate that scores without any information exceed in 5 % of cases at most."""
    rates = torch.empty(TRIALS, dtype=torch.float64)
    for trial in range(TRIALS):
        scores = torch.rand(members + others, generator=rng, dtype=torch.float64)
        rates[trial] = true_positive_rate(scores[:members], scores[members:])
    return float(rates.quantile(0.95))


def standardised(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the scores of one client's candidates, without using who is a member, so that clients can be pooled."""
    everyone = torch.cat([members, others])
    mean, std = everyone.mean(), everyone.std().clamp_min(1e-12)
    return (members - mean) / std, (others - mean) / std


def agreement(features: Sequence[Tensor]) -> Tensor:
    """Return the mean cosine between the features of every two random views of each image (EncoderMI's score)."""
    units = torch.stack([F.normalize(f.double(), dim=1) for f in features])
    count = len(units)
    return (units.sum(0).square().sum(1) - count) / (count * (count - 1))
