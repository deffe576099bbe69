"""A round as a secure sum, on the server: five exchanges instead of one. The protocol itself is in `privacy/sums/`.

A client that fails in one phase takes no part in the next ones. If too few remain, the round is given up: nothing is
unmasked, the state stays as it is, and the next round begins. After a crash a round begins again with new keys.
"""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import RecordDict

from ...errors import ProtocolError
from ...methods import ClientId, ServerState
from ...methods.capabilities import SecureSums
from ...privacy.sums.rules import Rules, Session, SumFailedError
from ...privacy.sums.server import MaskedSum
from ...runs.events import ClientTrained, Event
from .. import wire
from .messenger import Contents, Read
from .roster import Roster


@dataclass(frozen=True)
class Outcome:
    """What a round gives the server, in the plain form and as a secure sum."""

    state: ServerState
    events: list[Event]  # one per selected client
    replies: int  # number of clients whose replies were used
    figures: Mapping[str, float] = field(default_factory=dict)  # means of the clients' metrics


class SecureRound:
    def __init__(self, roster: Roster, method: SecureSums, number: int, selected: Sequence[ClientId]) -> None:
        self.roster, self.method, self.number, self.selected = roster, method, number, selected
        self.session = Session(roster.federation, number, secrets.token_hex(16))
        self.sum = MaskedSum(self.session, Rules(roster.config.privacy.threshold))
        self.down, self.up = Counter[ClientId](), Counter[ClientId]()  # bytes sent to and received from each client
        self.excluded: dict[ClientId, str] = {}

    def play(self, state: ServerState, broadcasts: Contents) -> Outcome:
        """Run the five phases. `broadcasts` are the messages of a plain round."""
        try:
            state, figures = self.phases(state, broadcasts)
        except ProtocolError as error:
            reason = next(iter(self.excluded.values()), "")
            self.roster.warn(f"{error}{f' First reason: {reason}' if reason else ''}")
            return Outcome(replace(state, round=self.number), self.events(), 0)
        return Outcome(state, self.events(), len(self.sum.survivors), figures)

    def phases(self, state: ServerState, broadcasts: Contents) -> tuple[ServerState, dict[str, float]]:
        self.ask("query.keys", dict.fromkeys(self.selected, self.message()), self.read_keys)
        roster = self.sum.roster()
        content = wire.with_roster(self.message(), roster)
        self.ask("query.shares", {keys.name: content for keys in roster}, self.read_shares)
        senders = self.sum.senders()
        training = {n: RecordDict({**self.message(n), "arrays": broadcasts[n]["arrays"]}) for n in senders}
        training = {n: wire.with_lists(content, {"senders": senders}) for n, content in training.items()}
        self.ask("train", training, self.read_vector)
        dropped, survivors = self.sum.dropped(), self.sum.survivors
        content = wire.with_lists(self.message(), {"survivors": survivors, "dropped": dropped})
        confirming = dict.fromkeys(survivors, content)
        self.ask("query.confirm", confirming, lambda name, content: self.sum.add_tags(name, wire.named_of(content)))
        unmasking = {name: self.unmasking(name) for name in self.sum.confirmed()}
        self.ask("query.unmask", unmasking, lambda name, content: self.sum.add_revealed(name, wire.named_of(content)))
        total = self.sum.total()
        try:
            return self.method.aggregate_sum(state, total, len(roster), len(survivors))
        except ProtocolError as error:
            raise SumFailedError(f"round {self.number} is given up: {error}") from None

    def message(self, name: ClientId | None = None) -> RecordDict:
        """Return a message of this attempt without arrays."""
        return self.roster.content(self.number, name, attempt=self.session.attempt)

    def unmasking(self, name: ClientId) -> RecordDict:
        tags = self.sum.tags_for(name)
        sealed = self.sum.sealed_for(name)
        return wire.with_named(self.message(), sealed, confirmed=list(tags), tags=list(tags.values()))

    def ask(self, kind: str, contents: Contents, read: Read) -> None:
        """Send the messages of one phase, and read each reply as it arrives."""
        answers = self.roster.ask(kind, self.number, contents, read)
        self.down.update(answers.sent)
        self.up.update(answers.received)
        for name, reason in answers.excluded.items():
            if name not in self.sum.survivors:  # a vector that is in the sum stays there
                self.excluded[name] = reason

    def read_keys(self, name: ClientId, content: RecordDict) -> None:
        (keys,) = wire.roster_of(content)
        self.sum.add_keys(replace(keys, name=name))

    def read_shares(self, name: ClientId, content: RecordDict) -> None:
        (committed,) = wire.blobs_of(content, "commitments")
        self.sum.add_shares(name, committed, wire.named_of(content))

    def read_vector(self, name: ClientId, content: RecordDict) -> None:
        layout = self.method.layout()
        self.sum.add_masked(name, wire.vector_of(content, layout, name), layout)

    def events(self) -> list[Event]:
        """Return one event per selected client. The server knows no figures of a single client."""
        received = {name: None if name in self.excluded else self.up[name] for name in self.selected}
        sizes = ((name, self.down[name], received[name]) for name in self.selected)
        return [ClientTrained(self.number, *size, excluded=self.excluded.get(size[0])) for size in sizes]
