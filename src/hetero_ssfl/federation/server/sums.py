"""A round as a secure sum, on the server: four exchanges instead of one. The protocol itself is in `privacy/sums/`.

A client that fails in one phase takes no part in the next ones. If too few remain, the round is given up: nothing is
unmasked, the state stays as it is, and the next round begins. After a crash a round begins again with new keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import RecordDict

from ...errors import ProtocolError
from ...methods import ClientId, ServerState
from ...methods.capabilities import SecureSums
from ...privacy.sums import MaskedSum, Rules, SumFailedError
from ...runs.events import ClientTrained, Event
from ..wire import blobs_of, check_header, fields_of, header_of, pack, with_lists
from ..wire_sums import named_of, new_session, roster_of, vector_of, with_named, with_roster
from .messenger import Read
from .roster import Roster


@dataclass(frozen=True)
class Outcome:
    """What a round gives the server, in the plain form and as a secure sum."""

    state: ServerState
    events: list[Event]
    """One per selected client."""
    replies: int
    """Number of clients whose replies were used."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Means of the clients' metrics."""


class SecureRound:
    def __init__(self, roster: Roster, method: SecureSums, number: int, selected: Sequence[ClientId]) -> None:
        self.roster, self.method, self.number, self.selected = roster, method, number, selected
        self.session = new_session(roster.header(number))
        self.sum = MaskedSum(self.session, Rules(roster.config.privacy.threshold))
        self.down: dict[ClientId, int] = dict.fromkeys(selected, 0)
        self.up: dict[ClientId, int] = dict.fromkeys(selected, 0)
        self.excluded: dict[ClientId, str] = {}
        self.trained: set[ClientId] = set()
        """Clients that trained in this round and saved their states."""

    def play(self, state: ServerState, broadcasts: Mapping[ClientId, RecordDict]) -> Outcome:
        """Run the four phases. `broadcasts` are the messages of a plain round."""
        try:
            state, figures = self.phases(state, broadcasts)
        except ProtocolError as error:
            reason = next(iter(self.excluded.values()), "")
            self.roster.warn(f"{error}{f' First reason: {reason}' if reason else ''}")
            return Outcome(replace(state, round=self.number), self.events(), 0)
        return Outcome(state, self.events(), len(self.sum.survivors), figures)

    def phases(
        self, state: ServerState, broadcasts: Mapping[ClientId, RecordDict]
    ) -> tuple[ServerState, dict[str, float]]:
        self.ask("query.keys", dict.fromkeys(self.selected, self.message()), self.read_keys)
        roster = self.sum.roster()
        content = with_roster(self.message(), roster)
        self.ask("query.shares", {keys.name: content for keys in roster}, self.read_shares)
        senders = self.sum.senders()
        training = {n: with_lists(self.message(broadcasts[n]), {"senders": senders}) for n in senders}
        self.ask("train", training, self.read_vector)
        dropped, survivors = self.sum.dropped(), self.sum.survivors
        unmasking = {
            n: with_named(self.message(), self.sum.sealed_for(n), survivors=survivors, dropped=dropped)
            for n in survivors
        }
        self.ask("query.unmask", unmasking, self.read_revealed)
        total = self.sum.total()
        try:
            return self.method.aggregate_sum(state, total, len(roster), len(survivors))
        except ProtocolError as error:
            raise SumFailedError(f"round {self.number} is given up: {error}") from None

    # --- messages ---

    def message(self, broadcast: RecordDict | None = None) -> RecordDict:
        """Return the content of a message with the round, the attempt and perhaps a broadcast."""
        own = fields_of(broadcast) if broadcast is not None else self.roster.fields(self.number)
        fields = pack(fields={**own, "attempt": self.session.attempt})
        return RecordDict({**fields, "arrays": (broadcast or fields)["arrays"]})

    def ask(self, kind: str, contents: Mapping[ClientId, RecordDict], read: Read) -> None:
        """Send the messages of one phase, and read each reply as it arrives."""

        def read_checked(name: ClientId, content: RecordDict) -> None:
            check_header(header_of(fields_of(content)), self.roster.header(self.number), name)
            read(name, content)

        patience = None if kind == "train" else self.roster.config.engine.join_timeout  # only training may take long
        answers = self.roster.ask(kind, self.number, contents, read_checked, patience)
        for name, size in answers.sent.items():
            self.down[name] += size
        for name, size in answers.received.items():
            self.up[name] += size
        if kind == "train":
            self.trained = answers.worked
        for name, reason in answers.excluded.items():
            if name not in self.sum.survivors:  # a vector that is in the sum stays there
                self.excluded[name] = reason

    # --- what each phase brings ---

    def read_keys(self, name: ClientId, content: RecordDict) -> None:
        (keys,) = roster_of(content)
        self.sum.add_keys(replace(keys, name=name))

    def read_shares(self, name: ClientId, content: RecordDict) -> None:
        (committed,) = blobs_of(content, "commitments")
        self.sum.add_shares(name, committed, named_of(content))

    def read_vector(self, name: ClientId, content: RecordDict) -> None:
        layout = self.method.layout()
        self.sum.add_masked(name, vector_of(content, layout, name), layout)

    def read_revealed(self, name: ClientId, content: RecordDict) -> None:
        self.sum.add_revealed(name, named_of(content))

    def events(self) -> list[Event]:
        """Return one event per selected client. The server knows no figures of a single client."""
        return [
            ClientTrained(
                self.number,
                name,
                self.down[name],
                None if name in self.excluded else self.up[name],
                excluded=self.excluded.get(name),
            )
            for name in self.selected
        ]
