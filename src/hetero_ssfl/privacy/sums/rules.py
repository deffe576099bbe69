"""What a sum is called, the numbers of participants that it needs, and who shares a mask with whom.

Up to `Rules.complete` participants everyone shares a mask with everyone. Beyond that, participants form a ring in an
order that a hash of all their keys determines, and each has the k nearest ones as neighbours (Bell et al. 2020):
messages and time then grow with log n instead of n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from ...errors import ProtocolError

MIN_PARTICIPANTS = 3  # with two, each can compute the other's vector from the sum
COLLUDING, DROPPING = 1 / 5, 1 / 10  # fractions of participants that the sparse graph allows for
SECURITY, CORRECTNESS = 40, 20  # bits: a neighbourhood is broken with probability 2^-40, a sum fails with 2^-20


class SumFailedError(ProtocolError):
    """The sum of this attempt cannot be computed. Nothing was unmasked."""


@dataclass(frozen=True)
class Session:
    """One attempt to compute one sum. Keys are bound to it."""

    federation: str
    round: int
    attempt: str
    """A random name, so that a repeated round has other keys."""

    def to_bytes(self) -> bytes:
        return "\0".join([self.federation, str(self.round), self.attempt]).encode()


@dataclass(frozen=True)
class Rules:
    threshold: float = 2 / 3
    """More than this fraction of the participants must reveal their shares, so t > threshold * n of n.

    With c colluding participants, 2t > n + c is needed (Bonawitz et al. 2017, section 6.2): any two sets of t
    participants then have an honest one in common. A threshold of (1 + f) / 2 gives that for c <= f * n."""
    fewest: int = MIN_PARTICIPANTS
    """The smallest number of summands."""
    complete: int = 30
    """Up to this many participants, everyone is everyone's neighbour."""

    def shares_needed(self, holders: int) -> int:
        return min(holders, math.floor(self.threshold * holders + 1e-9) + 1)

    def survivors_needed(self, participants: int) -> int:
        return max(self.fewest, self.shares_needed(participants))


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


def groups_of(names: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """Divide clients into `count` groups at random, whose sizes differ by at most one.

    The same clients always get the same groups: sums over other groups in each round would tell single vectors.
    """
    order = sorted(names, key=lambda name: sha256(f"{seed}\0{name}".encode()).digest())
    return [sorted(order[k::count]) for k in range(count)]
