"""What a sum is called, and the numbers of participants that it needs."""

import math
from dataclasses import dataclass

from ...errors import ProtocolError

MIN_PARTICIPANTS = 3  # with two, each can compute the other's vector from the sum


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
    """More than this fraction of the participants must reveal their shares.

    Then a server that tells participants different things needs the help of a third of them."""
    fewest: int = MIN_PARTICIPANTS
    """The smallest number of summands."""
    complete: int = 30
    """Up to this many participants, everyone is everyone's neighbour."""

    def shares_needed(self, holders: int) -> int:
        return min(holders, math.floor(self.threshold * holders + 1e-9) + 1)

    def survivors_needed(self, participants: int) -> int:
        return max(self.fewest, self.shares_needed(participants))
