"""The privacy budget of Gaussian noise.

A release with noise of standard deviation z times the largest influence of one client is mu-GDP with mu = 1/z. Releases
compose by adding mu^2 (Dong et al. 2019), and mu-GDP is (epsilon, delta)-DP with (Balle and Wang 2018)

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

Both are exact for Gaussian noise. No client is hidden by sampling: the server, which must not learn, knows who was
selected.
"""

import math
from functools import lru_cache

MAX_MU = 1e3

STEPS = 70  # of a bisection: more than the digits of a float


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
    low, high = 0.0, MAX_MU  # of mu, over all releases
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle**2, delta) <= epsilon else (low, middle)
    return math.sqrt(releases) / low
