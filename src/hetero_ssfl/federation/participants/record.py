"""What a participant must not forget, whatever a federation is called: one file in the home of its node.

A server chooses the id of a federation. If budgets and revealed sums were counted per id, a new id would reset them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ...errors import ProtocolError
from ...runs.files import locked, read_json, write_json

MAX_SEEN = 10_000  # fingerprints of keys

Allowed = Literal["first", "any"] | tuple[str, ...]


@dataclass
class Record:
    federations: list[str] = field(default_factory=list)
    """Those that got something which counts here, the first one first."""
    squared_mu: float = 0.0
    """What all contributions with noise have cost (privacy/accountant.py)."""
    releases: int = 0
    """The number of contributions with noise."""
    seen: list[str] = field(default_factory=list)
    """Fingerprints of keys from earlier sums: a server could know the secrets of old ones."""
    revealed: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each round and federation, a hash of the participants whose sum was revealed."""


@dataclass(frozen=True)
class RecordFile:
    path: Path
    federation: str = ""  # that asks now
    allowed: Allowed = "any"  # `limits.federations`

    def read(self) -> Record:
        return Record(**read_json(self.path)) if self.path.exists() else Record()

    def check(self, record: Record) -> None:
        """Raise ProtocolError unless the owner allows secure sums and noise in this federation."""
        first = record.federations[:1] or [self.federation]
        allowed = first if self.allowed == "first" else self.allowed
        if allowed != "any" and self.federation not in allowed:
            named = str([*allowed, self.federation]).replace("'", '"')
            raise ProtocolError(
                f"federation {self.federation} is new: contributions to it and to earlier ones could be compared. "
                f"To allow it, set limits.federations = {named} in the node settings."
            )

    @contextmanager
    def change(self) -> Iterator[Record]:
        """Yield the record, and save it if nothing is raised."""
        busy = ProtocolError("this node is busy with a message of another federation. Ask again next round.")
        with locked(self.path.with_suffix(".lock"), busy):
            record = self.read()
            self.check(record)
            yield record
            record.federations += [] if self.federation in record.federations else [self.federation]
            record.seen = record.seen[-MAX_SEEN:]
            write_json(self.path, asdict(record))

    def reveal(self, record: Record, number: int, participants: str) -> None:
        """Note for whom the sum of a round is revealed. Raise ProtocolError if it was revealed for others.

        Training is deterministic, so a round that is asked for again has the same vectors. From two sums over different
        participants a server could compute the vectors of those that are only in one. An owner who names federations
        tells them apart; with "any", all of them are one.
        """
        earlier = record.revealed.setdefault(str(number), {})
        compared = earlier if self.allowed == "any" else {self.federation: earlier.get(self.federation, participants)}
        if set(compared.values()) - {participants}:
            raise ProtocolError(
                f"this node has revealed the sum of round {number} for other participants; two sums would show single "
                "contributions. Go on with the next round."
            )
        earlier[self.federation] = participants
