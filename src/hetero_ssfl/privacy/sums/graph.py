"""Who shares a mask with whom.

Up to `Rules.complete` participants everyone shares one with everyone. Beyond that, participants form a ring in an order
that a hash of all their keys determines, and each has the k nearest ones as neighbours (Bell et al. 2020): messages and
time then grow with log n instead of n.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

from .rules import Rules

COLLUDING, DROPPING = 1 / 5, 1 / 10  # fractions of participants that the sparse graph allows for
SECURITY, CORRECTNESS = 40, 20  # bits: a neighbourhood is broken with probability 2^-40, a sum fails with 2^-20


def neighbours(names: Sequence[str], digest: bytes, rules: Rules) -> dict[str, frozenset[str]]:
    """Return the neighbours of each participant. The relation is symmetric."""
    count = len(names)
    if count <= rules.complete:
        everyone = frozenset(names)
        return {name: everyone - {name} for name in names}
    ring = sorted(names, key=lambda name: sha256(digest + name.encode()).digest())
    half = degree(count, rules) // 2
    steps = [step for step in range(-half, half + 1) if step]
    return {name: frozenset(ring[(k + step) % count] for step in steps) - {name} for k, name in enumerate(ring)}


@lru_cache(maxsize=64)
def degree(count: int, rules: Rules) -> int:
    """Return the smallest even number of neighbours that keeps a random ring of `count` secure and correct."""
    bad, gone = math.ceil(COLLUDING * count), math.ceil(DROPPING * count)
    for k in range(2, count - 1, 2):
        needed = rules.shares_needed(k + 1)  # a participant also holds a share of its own secrets
        broken = count * _tail(count - 1, bad, k, needed)
        failed = count * _tail(count - 1, gone, k, k + 2 - needed)
        cut = count * (COLLUDING + DROPPING) ** (k / 2)  # a gap of k/2 in the ring can separate some participants
        if broken + cut <= 2**-SECURITY and failed <= 2**-CORRECTNESS:
            return k
    return 2 * (count // 2)  # everyone


def _tail(count: int, marked: int, drawn: int, least: int) -> float:
    """Return the probability of at least `least` marked ones among `drawn` of `count` (hypergeometric)."""
    most = min(marked, drawn)
    ways = sum(math.comb(marked, k) * math.comb(count - marked, drawn - k) for k in range(least, most + 1))
    return ways / math.comb(count, drawn)
