"""A participant's side of a secure sum, as answers to Flower messages.

Secrets are kept in Flower's Context, which a SuperNode keeps in its memory: a node that is killed has nothing left of
them. What the participant must not forget is on its disk, and is not secret: the keys that others used before, and
for which participants it revealed a round's sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from ...errors import ProtocolError
from ...methods import Update
from ...methods.capabilities import SecureSums
from ...privacy.sums import (
    ClientState,
    Rules,
    Session,
    Vector,
    advertise,
    check_senders,
    fingerprint,
    mask,
    reveal,
    share,
)
from ...runs.files import read_json, write_json
from ..participants.participant import Participant
from ..wire import texts_of
from ..wire_sums import named_of, roster_of, with_named, with_roster

STATE_KEY = "secure-sum"
MAX_SEEN = 10_000  # fingerprints of keys


@dataclass(frozen=True)
class Summing:
    """One participant in one attempt, between a message and its reply."""

    participant: Participant
    session: Session
    context: Context

    @property
    def rules(self) -> Rules:
        return Rules(self.participant.config.privacy.threshold, self.participant.identity.fewest)

    # --- the four phases ---

    def keys(self, reply: RecordDict) -> RecordDict:
        """Make new keys. Those of an earlier attempt are forgotten, so its sum can no longer be unmasked with us."""
        state, keys = advertise(self.session, self.participant.name, self.participant.identity.sign)
        self.keep(state)
        return with_roster(reply, [keys])

    def shares(self, asked: RecordDict, reply: RecordDict) -> RecordDict:
        roster, memory = roster_of(asked), self.memory
        state, committed, sealed = share(
            self.state, self.session, roster, self.rules, self.participant.identity.verify, memory.seen
        )
        memory.see([fingerprint(keys) for keys in roster])
        self.keep(state)
        return with_named(reply, sealed, commitments=[committed])

    def check(self, asked: RecordDict) -> None:
        """Raise ProtocolError, before any training, for a message whose reply could not be masked."""
        self.state.after(self.session, "shares")
        check_senders(self.state, texts_of(asked, "senders"), self.rules)

    def masked(self, asked: RecordDict, method: SecureSums, update: Update) -> Vector:
        """Return the reply to a round with all masks on it."""
        senders, before = texts_of(asked, "senders"), self.state
        vector = method.summand(update, len(before.participants))
        state, masked = mask(before, self.session, senders, self.rules, vector)
        self.keep(state)
        return masked

    def unmask(self, asked: RecordDict, reply: RecordDict) -> RecordDict:
        survivors, dropped, state = texts_of(asked, "survivors"), texts_of(asked, "dropped"), self.state
        shares = reveal(state, self.session, survivors, dropped, named_of(asked), self.rules)
        self.context.state.pop(STATE_KEY, None)
        self.memory.reveal(self.participant.name, self.session.round, survivors)
        return with_named(reply, shares)

    # --- what is kept between them ---

    @property
    def state(self) -> ClientState:
        record: Mapping[str, Any] = self.context.state.config_records.get(STATE_KEY, {})
        if "state" not in record:
            raise ProtocolError(
                f"{self.participant.name} has no keys for this sum: it was restarted, or has already revealed its "
                "shares. Start the round again with new keys."
            )
        return ClientState.from_json(str(record["state"]))

    def keep(self, state: ClientState) -> None:
        self.context.state[STATE_KEY] = ConfigRecord({"state": state.to_json()})

    @property
    def memory(self) -> "Memory":
        return Memory(self.participant.states.path / "secure-sums.json")


class Memory:
    """What a participant remembers of earlier sums, on its disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_json(path) if path.exists() else {}
        self.seen: list[str] = content.get("seen", [])
        """Fingerprints of keys: a server could know the secrets of old ones."""
        self.revealed: dict[str, str] = content.get("revealed", {})
        """For each round, a hash of the participants whose sum was revealed."""

    def see(self, fingerprints: list[str]) -> None:
        self.seen = [*self.seen, *fingerprints][-MAX_SEEN:]
        self._save()

    def reveal(self, name: str, round_number: int, survivors: list[str]) -> None:
        """Note that a sum is revealed. Raise ProtocolError if that of the same round with others was revealed before.

        After a crash the server repeats a round, with the same vectors. From two sums over different participants it
        could compute the vectors of those that are only in one.
        """
        participants = sha256("\0".join(sorted(survivors)).encode()).hexdigest()[:32]
        if self.revealed.setdefault(str(round_number), participants) != participants:
            raise ProtocolError(
                f"{name} has revealed the sum of round {round_number} for other participants. The difference of both "
                "sums would show single contributions: go on with the next round."
            )
        self._save()

    def _save(self) -> None:
        write_json(self.path, {"seen": self.seen, "revealed": self.revealed})
