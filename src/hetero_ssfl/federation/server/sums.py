"""A round as a secure sum, on the server: five exchanges instead of one. The protocol itself is in `privacy/sums/`.

A client that fails in one phase takes no part in the next ones. If too few remain, the round is given up: nothing is
unmasked, the state stays as it is, and the next round begins. After a crash a round begins again with new keys.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flwr.app import RecordDict

from ...errors import ProtocolError
from ...methods import ClientId, ServerState
from ...methods.capabilities import GroupSums, SecureSums
from ...privacy.sums.rules import Rules, Session, SumFailedError, groups_of
from ...privacy.sums.server import MaskedSum
from ...runs.events import ClientTrained, Event
from .. import wire
from .messenger import Contents, Read
from .roster import Roster

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What a round gives the server, in the plain form and as a secure sum."""

    state: ServerState
    events: list[Event]  # one per selected client
    replies: int  # number of clients whose replies were used
    figures: Mapping[str, float] = field(default_factory=dict)  # means of the clients' metrics


class SecureRound:
    """One sum, or one for each group of clients, whose phases then run together."""

    def __init__(
        self,
        roster: Roster,
        method: SecureSums,
        number: int,
        selected: Sequence[ClientId],
        everyone: Sequence[ClientId],
    ) -> None:
        self.roster, self.method, self.number, self.selected = roster, method, number, selected
        self.session = Session(roster.federation, number, secrets.token_hex(16))
        # Groups of everyone: an absent client must not change the groups of others.
        groups = groups_of(everyone, roster.config.privacy.groups, roster.config.seed)
        rules = Rules(roster.config.privacy.threshold)
        self.sums = [MaskedSum(self.session, rules) for _ in groups]  # those that have not failed
        self.of = {name: group_sum for group, group_sum in zip(groups, self.sums, strict=True) for name in group}
        self.down, self.up = Counter[ClientId](), Counter[ClientId]()  # bytes sent to and received from each client
        self.excluded: dict[ClientId, str] = {}

    @property
    def survivors(self) -> list[ClientId]:
        return [name for each in self.sums for name in each.survivors]

    def play(self, state: ServerState, broadcasts: Contents) -> Outcome:
        """Run the five phases. `broadcasts` are the messages of a plain round."""
        try:
            state, figures = self.phases(state, broadcasts)
        except ProtocolError as error:
            reason = next(iter(self.excluded.values()), "")
            self.roster.warn(f"{error}{f' First reason: {reason}' if reason else ''}")
            return Outcome(replace(state, round=self.number), self.events(), 0)
        return Outcome(state, self.events(), len(self.survivors), figures)

    def phases(self, state: ServerState, broadcasts: Contents) -> tuple[ServerState, dict[str, float]]:
        self.ask("query.keys", dict.fromkeys(self.selected, self.message()), self.read_keys)
        self.ask("query.shares", self.contents(self.sharing), self.read_shares)
        self.ask("train", self.contents(lambda each: self.training(each, broadcasts)), self.read_vector)
        self.ask("query.confirm", self.contents(self.confirming), self.read_tags)
        self.ask("query.unmask", self.contents(self.unmasking), self.read_shares_revealed)
        sizes = {id(each): len(each.keys) for each in self.sums}
        totals = [(total, sizes[id(each)], len(each.survivors)) for each, total in self.each(MaskedSum.total)]
        try:
            if self.roster.config.privacy.groups == 1:
                return self.method.aggregate_sum(state, *totals[0])
            assert isinstance(self.method, GroupSums)  # method_for has checked it
            state, figures, warnings = self.method.aggregate_groups(state, totals)
        except ProtocolError as error:
            raise SumFailedError(f"round {self.number} is given up: {error}") from None
        for text in warnings:
            self.roster.warn(text)
        return state, figures

    def each(self, step: Callable[[MaskedSum], T]) -> list[tuple[MaskedSum, T]]:
        """Take a step in every sum. One that fails is left out, with a warning; if all fail, so does the round."""
        done, failed = list[tuple[MaskedSum, T]](), list[tuple[MaskedSum, SumFailedError]]()
        for each in self.sums:
            try:
                done.append((each, step(each)))
            except SumFailedError as error:
                failed.append((each, error))
        if not done:
            raise failed[0][1]
        for each, why in failed:
            self.roster.warn(f"a group is left out: {why}")
            for name in (name for name, own in self.of.items() if own is each):
                self.excluded.setdefault(name, f"its group is left out: {why}")
        self.sums = [each for each, _ in done]
        return done

    def contents(self, make: Callable[[MaskedSum], Contents]) -> Contents:
        return {name: content for _, contents in self.each(make) for name, content in contents.items()}

    def sharing(self, each: MaskedSum) -> Contents:
        roster = each.roster()
        return dict.fromkeys((keys.name for keys in roster), wire.with_roster(self.message(), roster))

    def training(self, each: MaskedSum, broadcasts: Contents) -> Contents:
        senders = each.senders()
        contents = {n: RecordDict({**self.message(n), "arrays": broadcasts[n]["arrays"]}) for n in senders}
        return {n: wire.with_lists(content, {"senders": senders}) for n, content in contents.items()}

    def confirming(self, each: MaskedSum) -> Contents:
        lists = {"dropped": each.dropped(), "survivors": each.survivors}
        return dict.fromkeys(each.survivors, wire.with_lists(self.message(), lists))

    def unmasking(self, each: MaskedSum) -> Contents:
        contents = {}
        for name in each.confirmed():
            tags, sealed = each.tags_for(name), each.sealed_for(name)
            told = wire.with_named(self.message(), sealed, confirmed=list(tags), tags=list(tags.values()))
            contents[name] = told
        return contents

    def message(self, name: ClientId | None = None) -> RecordDict:
        """Return a message of this attempt without arrays."""
        return self.roster.content(self.number, name, attempt=self.session.attempt)

    def ask(self, kind: str, contents: Contents, read: Read) -> None:
        """Send the messages of one phase, and read each reply as it arrives."""
        answers = self.roster.ask(kind, self.number, contents, read)
        self.down.update(answers.sent)
        self.up.update(answers.received)
        for name, reason in answers.excluded.items():
            if name not in self.of[name].survivors:  # a vector that is in the sum stays there
                self.excluded[name] = reason

    def read_keys(self, name: ClientId, content: RecordDict) -> None:
        (keys,) = wire.roster_of(content)
        self.of[name].add_keys(replace(keys, name=name))

    def read_shares(self, name: ClientId, content: RecordDict) -> None:
        (committed,) = wire.blobs_of(content, "commitments")
        self.of[name].add_shares(name, committed, wire.named_of(content))

    def read_vector(self, name: ClientId, content: RecordDict) -> None:
        layout = self.method.layout()
        self.of[name].add_masked(name, wire.vector_of(content, layout, name), layout)

    def read_tags(self, name: ClientId, content: RecordDict) -> None:
        self.of[name].add_tags(name, wire.named_of(content))

    def read_shares_revealed(self, name: ClientId, content: RecordDict) -> None:
        self.of[name].add_revealed(name, wire.named_of(content))

    def events(self) -> list[Event]:
        """Return one event per selected client. The server knows no figures of a single client."""
        received = {name: None if name in self.excluded else self.up[name] for name in self.selected}
        sizes = ((name, self.down[name], received[name]) for name in self.selected)
        return [ClientTrained(self.number, *size, excluded=self.excluded.get(size[0])) for size in sizes]
