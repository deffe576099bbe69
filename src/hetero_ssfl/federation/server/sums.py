"""A round as a secure sum, on the server: four exchanges instead of one. The protocol itself is in `secure/`.

A client that fails in one phase takes no part in the next ones. If too few remain, the round is given up: nothing is
unmasked, the state stays as it is, and the next round begins. After a crash a round begins again with new keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flwr.app import Message, RecordDict

from ...errors import ProtocolError
from ...methods import ClientId, ServerState
from ...methods.capabilities import SecureSums
from ...privacy.sums import MaskedSum, Rules, SumFailedError
from ...runs.events import ClientTrained, Event
from ..wire import blobs_of, check_header, check_size, fields_of, header_of, pack, with_lists
from ..wire_sums import named_of, new_session, roster_of, vector_of, with_named, with_roster
from .outcome import Outcome
from .roster import Roster

Read = Callable[[ClientId, RecordDict], None]


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
        answered: set[ClientId] = set()
        missing: dict[ClientId, Message | None] = {}

        def take(name: ClientId, reply: Message) -> None:
            answered.add(name)
            if self.roster.is_missing(reply):
                missing[name] = reply
                return
            try:
                self.accept(name, reply, read)
            except ProtocolError as error:
                self.exclude(name, str(error))

        patience = None if kind == "train" else self.roster.config.engine.join_timeout  # only training may take long
        for name, size in self.roster.exchange(kind, self.number, contents, take, patience).items():
            self.down[name] += size
        missing |= {name: None for name in contents if name not in answered and self.roster.is_missing(None)}
        if missing:
            self.roster.stop(missing, f"in round {self.number}")
        for name in contents:
            if name not in answered:
                self.exclude(name, f"{name} did not reply in time ({kind}).")

    def accept(self, name: ClientId, reply: Message, read: Read) -> None:
        if reply.has_error():
            raise ProtocolError(f"{name} failed: {self.roster.reason(name, reply)}.")
        self.up[name] += check_size(reply, self.roster.config.engine.message_mb, name)
        try:
            check_header(header_of(fields_of(reply.content)), self.roster.header(self.number), name)
            read(name, reply.content)
        except ProtocolError:
            raise
        except Exception as error:  # whatever a reply breaks is the fault of its sender
            raise ProtocolError(f"{name} sent a reply that cannot be used: {str(error)[:200]}.") from None

    def exclude(self, name: ClientId, reason: str) -> None:
        """Note why a client takes no further part. A vector that is in the sum stays there."""
        self.roster.warn(reason)
        if name not in self.sum.survivors:
            self.excluded[name] = reason

    # --- what each phase brings ---

    def read_keys(self, name: ClientId, content: RecordDict) -> None:
        (keys,) = roster_of(content)
        self.sum.add_keys(replace(keys, name=name))

    def read_shares(self, name: ClientId, content: RecordDict) -> None:
        (committed,) = blobs_of(content, "commitments")
        self.sum.add_shares(name, committed, named_of(content))

    def read_vector(self, name: ClientId, content: RecordDict) -> None:
        self.trained.add(name)
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
