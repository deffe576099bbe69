"""Gaussian noise with a privacy budget.

A release with noise of standard deviation z times the largest influence of one client is mu-GDP with mu = 1/z. Releases
compose by adding mu^2 (Dong et al. 2019), and mu-GDP is (epsilon, delta)-DP with (Balle and Wang 2018)

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

Both are exact for Gaussian noise. No client is hidden by sampling: the server, which must not learn, knows who was
selected.
"""

import math
import secrets
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

LARGEST_MU = 1e3
STEPS = 70  # of a bisection: more than the digits of a float
TAIL = 9.0  # deviations: the probability of more is 2e-19
FLOAT32_BITS = 23


def delta_of(mu: float, epsilon: float) -> float:
    """Return the smallest delta for which mu-GDP is (epsilon, delta)-DP."""
    return math.exp(_log_phi(mu / 2 - epsilon / mu)) - math.exp(epsilon + _log_phi(-mu / 2 - epsilon / mu))


def _log_phi(x: float) -> float:
    """Return the logarithm of the normal distribution function, also where the function itself is too small."""
    if x > -30:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    return -(x**2) / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / x**2 + 3 / x**4)


def epsilon_of(squared_mu: float, delta: float) -> float:
    """Return the epsilon that releases with these mu^2 in total have cost; 0 for none."""
    mu = math.sqrt(squared_mu)
    if mu == 0 or delta_of(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, mu**2 / 2 + mu * 40  # delta is below e^-800 there
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(mu, middle) > delta else (low, middle)
    return high


@lru_cache(maxsize=16)
def noise_multiplier(epsilon: float, delta: float, releases: int) -> float:
    """Return the smallest z with which this many releases cost at most epsilon."""
    low, high = 0.0, LARGEST_MU  # of mu, over all releases
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle**2, delta) <= epsilon else (low, middle)
    return math.sqrt(releases) / low


def gaussian(size: int, deviation: float) -> NDArray[np.float64]:
    """Draw normal numbers from a cryptographic generator, which nobody can predict from other draws (Box-Muller)."""
    half = -(-size // 2)
    stream = bytearray(16 * half)
    Cipher(ChaCha20(secrets.token_bytes(32), bytes(16)), None).encryptor().update_into(bytes(len(stream)), stream)
    bits = np.frombuffer(stream, "<u8") >> np.uint64(11)
    first, second = ((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(2, half)
    radius = deviation * np.sqrt(-2 * np.log(first))
    return np.concatenate([radius * np.cos(2 * np.pi * second), radius * np.sin(2 * np.pi * second)])[:size]


@dataclass(frozen=True)
class Noise:
    """What makes the release of a vector private: a bound on its norm, and noise."""

    clip: float
    """The largest norm of one client's vector."""
    deviation: float
    """The standard deviation of the noise in each entry of what others see, a sum of vectors or a single one."""

    def clipped(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        return vector * min(1.0, self.clip / max(float(np.linalg.norm(vector)), 1e-300))

    def alone(self, vector: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the clipped vector with the whole noise, for a server that sees this vector.

        Values are rounded to multiples of one power of two, all of which float32 can hold: the low bits of
        floating-point noise would tell which sums are possible (Mironov 2012).
        """
        step = 2.0 ** (math.ceil(math.log2(self.clip + TAIL * self.deviation)) - FLOAT32_BITS)
        noisy = self.clipped(vector) + gaussian(vector.size, self.deviation).reshape(vector.shape)
        return (step * np.round(noisy / step)).astype(np.float32)
