"""A participant's side of a secure sum, as answers to Flower messages.

Secrets are kept in Flower's Context, which a SuperNode keeps in its memory: a node that is killed has nothing left of
them. What the participant must not forget is on its disk, and is not secret (participants/record.py): the keys that
others used before, and for which participants it revealed a round's sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from ...errors import ProtocolError
from ...methods import Update
from ...methods.capabilities import SecureSums
from ...privacy.sums.client import ClientState, advertise, check_senders, confirm, mask, reveal, share
from ...privacy.sums.keys import fingerprint
from ...privacy.sums.rules import Rules, Session
from ...privacy.sums.vectors import Vector
from ..participants.participant import Participant
from ..wire import named_of, roster_of, texts_of, with_named, with_roster

STATE_KEY = "secure-sum"


@dataclass(frozen=True)
class Summing:
    """One participant in one attempt, between a message and its reply."""

    participant: Participant
    session: Session
    context: Context

    @property
    def rules(self) -> Rules:
        return Rules(self.participant.config.privacy.threshold, self.participant.identity.fewest)

    def keys(self, reply: RecordDict) -> RecordDict:
        """Make new keys. Those of an earlier attempt are forgotten, so its sum can no longer be unmasked with us."""
        state, keys = advertise(self.session, self.participant.name, self.participant.identity.sign)
        self.keep(state)
        return with_roster(reply, [keys])

    def shares(self, asked: RecordDict, reply: RecordDict) -> RecordDict:
        roster, verify = roster_of(asked), self.participant.identity.verify
        with self.participant.record.change() as record:
            state, committed, sealed = share(self.state, self.session, roster, self.rules, verify, record.seen)
            record.seen += map(fingerprint, roster)
        self.keep(state)
        return with_named(reply, sealed, commitments=[committed])

    def check(self, asked: RecordDict) -> None:
        """Raise ProtocolError, before any training, for a message whose reply could not be masked."""
        self.state.after(self.session, "shares")
        check_senders(self.state, texts_of(asked, "senders"), self.rules)

    def masked(self, asked: RecordDict, method: SecureSums, update: Update) -> Vector:
        senders, before = texts_of(asked, "senders"), self.state
        vector = method.summand(update, len(before.participants))
        state, masked = mask(before, self.session, senders, self.rules, vector)
        self.keep(state)
        return masked

    def confirm(self, asked: RecordDict, reply: RecordDict) -> RecordDict:
        survivors, dropped = texts_of(asked, "survivors"), texts_of(asked, "dropped")
        state, tags = confirm(self.state, self.session, survivors, dropped, self.rules)
        self.keep(state)
        return with_named(reply, tags)

    def unmask(self, asked: RecordDict, reply: RecordDict) -> RecordDict:
        """Reveal shares, unless those of the same round were revealed for other participants."""
        state, tags = self.state, named_of(asked, "confirmed", "tags")
        shares = reveal(state, self.session, tags, named_of(asked), self.rules)
        self.context.state.pop(STATE_KEY, None)
        participants = sha256("\0".join(state.survivors).encode()).hexdigest()[:32]
        file = self.participant.record
        with file.change() as record:
            file.reveal(record, self.session.round, participants)
        return with_named(reply, shares)

    @property
    def state(self) -> ClientState:
        record: Mapping[str, Any] = self.context.state.config_records.get(STATE_KEY, {})
        if "state" not in record:
            why = "it was restarted, or has already revealed its shares. Start the round again with new keys."
            raise ProtocolError(f"{self.participant.name} has no keys for this sum: {why}")
        return ClientState.from_json(str(record["state"]))

    def keep(self, state: ClientState) -> None:
        self.context.state[STATE_KEY] = ConfigRecord({"state": state.to_json()})
