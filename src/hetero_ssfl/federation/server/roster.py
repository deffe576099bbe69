"""The connected nodes by name; sends them messages and waits for replies, always with a deadline."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import NoReturn, TypeVar

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ...config import Config
from ...errors import FaultError, LostStateError, ProtocolError, RunError
from ...methods import ClientId, ServerState
from ...privacy.sums import MIN_PARTICIPANTS
from ...runs.events import Answered, Joined, Left, Listener, Warned
from ...runs.files import append_line
from ...runs.folder import FAULTS, RunFolder, resume_command
from ..wire import (
    DIVERGED,
    LOST_STATE,
    NAME,
    Header,
    Scalar,
    check_header,
    check_size,
    fields_of,
    header_of,
    pack,
    pack_rad,
    with_rad,
)
from .seats import NoSeatError, Seats

Key = TypeVar("Key", ClientId, int)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5  # seconds between two polls for replies, if polling is not free


class Roster:
    def __init__(
        self, grid: Grid, folder: RunFolder, config: Config, listen: Listener, may_be_away: bool = False
    ) -> None:
        self.grid, self.folder, self.config, self.listen, self.may_be_away = grid, folder, config, listen, may_be_away
        # Nodes need not know who else is registered.
        clients = config.clients.model_copy(update={"seats": ()})
        self.config_toml = config.model_copy(update={"clients": clients}).to_toml()
        self.seats = Seats(config.clients) if may_be_away else None
        self.federation = str(folder.read_json("facts.json").get("federation"))
        self.rad, self.rad_digest = folder.rad()
        self.rad_record = pack_rad(self.rad)  # one copy for all messages
        self.number = 0  # the current round
        self.ids: dict[ClientId, int] = {}
        """Flower's node id of each connected client."""
        self.models: dict[ClientId, dict[str, Scalar]] = {}
        """The encoder and parameter count that each client reported."""
        self.examples: dict[ClientId, int] = {}
        """The number of images that each client reported."""
        self.seen: dict[ClientId, int] = {}
        """The last round in which each client was connected."""
        self.refused: dict[int, str] = {}  # connected nodes that cannot take part, and why
        self.without_rad: set[ClientId] = set()
        self.shown: set[str] = set()  # places where the user's code failed
        self.ask_again: dict[int, float] = {}  # when to ask nodes again that did not introduce themselves correctly

    def warn(self, text: str) -> None:
        self.listen(Warned(self.number, text))

    # --- connected nodes ---

    def gather(self, state: ServerState | None) -> None:
        """Wait until all clients of the config are connected. A resumed run continues without missing ones."""
        patience = self.config.engine.round_timeout if state is None else self.config.engine.join_timeout
        deadline = time.monotonic() + patience
        expected = self.config.clients.count if state is None else len(state.roster)
        if self.seats and state is not None:
            self.seats.restore(state.roster, state.seats)
        while True:
            self.hello()
            if len(self.ids) >= expected:
                return
            may_continue_without = state is not None and self.may_be_away
            if len(self.ids) + len(self.refused) >= expected and not may_continue_without:
                raise RunError(f"{next(iter(self.refused.values()))} Fix this and try again.")
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if state is None or len(self.ids) < self.config.engine.min_replies:
            raise RunError(f"only {len(self.ids)} of {expected} clients connected in time. Start the others.")
        missing = sorted(set(state.roster) - set(self.ids))
        self.warn(f"{', '.join(missing)} did not reconnect; the run continues without them.")

    def welcome(self, state: ServerState) -> ServerState:
        """Before a round, add new nodes to the roster and wait until enough nodes are connected."""
        deadline = time.monotonic() + self.config.engine.round_timeout
        self.hello()
        needed = max(self.config.engine.min_replies, MIN_PARTICIPANTS if self.config.privacy.secure else 1)
        while len(self.ids) < needed:
            if time.monotonic() > deadline:
                raise RunError(
                    f"only {len(self.ids)} nodes are connected, expected at least {needed}. "
                    f"Start the others and continue with: {resume_command(self.folder.path)}"
                )
            time.sleep(1.0)
            self.hello()
        newcomers = tuple(sorted(set(self.ids) - set(state.roster)))
        # Newcomers are appended, so that known clients keep their positions.
        return replace(state, roster=(*state.roster, *newcomers), seats=self.held())

    def held(self) -> dict[ClientId, int]:
        """Return the node that holds each name, as far as known."""
        holders = self.seats.holders if self.seats else {}
        return {name: node for name, node in holders.items() if node is not None}

    def gone(self, state: ServerState) -> list[ClientId]:
        """Return the clients that have been disconnected for `clients.absent_rounds` rounds, or since a restart."""
        most = self.config.clients.absent_rounds
        for name in state.roster:
            if name in self.ids or name not in self.seen:
                self.seen[name] = state.round
        return [name for name in state.roster if self.seats and most and state.round - self.seen[name] >= most]

    def hello(self) -> None:
        """Ask every new node for its name, and remove nodes that disconnected."""
        connected = set(self.grid.get_node_ids())
        if self.seats and self.seats.reopen(connected):
            self.warn("every node has a new id, as after a loss of the SuperLink's database: names are given anew.")
        for name in [name for name, node in self.ids.items() if node not in connected]:
            del self.ids[name]
            self.listen(Left(self.number, name))
        self.refused = {node: reason for node, reason in self.refused.items() if node in connected}
        now = time.monotonic()
        waiting = {node for node, until in self.ask_again.items() if until > now}
        unknown = connected - set(self.ids.values()) - waiting
        if not unknown:
            return
        channels, side = self.rad.shape[1], self.rad.shape[-1]
        content = pack(fields={**self.fields(0), "channels": channels, "side": side})
        messages = {node: Message(content, node, "query") for node in sorted(unknown)}
        patience = min(self.config.engine.join_timeout, self.config.engine.round_timeout)
        replies: dict[int, Message] = {}
        self.send(messages, now + patience, replies.__setitem__)
        newcomers: list[Joined] = []
        for node in sorted(unknown):
            try:
                about, has_rad = self.introduced(replies.get(node))
                if self.seats:
                    self.seats.take(about.name, node)
            except ProtocolError as error:
                self.ask_again[node] = time.monotonic() + patience
                if node in replies and not isinstance(error, NoSeatError):  # the run does not wait for strangers
                    self.refused[node] = str(error)
                self.warn(str(error))
                continue
            self.ids[about.name] = node
            self.models[about.name] = {"encoder": about.encoder, "parameters": about.parameters}
            self.examples[about.name] = about.examples
            self.refused.pop(node, None)
            (self.without_rad.discard if has_rad else self.without_rad.add)(about.name)
            newcomers.append(about)
        for about in sorted(newcomers, key=lambda newcomer: newcomer.name):
            self.listen(about)

    def introduced(self, reply: Message | None) -> tuple[Joined, bool]:
        """Read a node's introduction. Return it, and whether the node has the RAD."""
        if reply is None:
            raise ProtocolError("a node did not report its name in time; it will be asked again later.")
        if reply.has_error():
            raise ProtocolError(f"a node cannot take part: {error_text(reply)}.")
        check_size(reply, self.config.engine.message_mb, "a new node")
        fields = fields_of(reply.content)
        check_header(header_of(fields), self.header(0), "a new node")
        name = str(fields.get("name"))
        if not NAME.fullmatch(name):
            raise ProtocolError(f"a node has the name {name[:64]!r}, expected letters, digits, '-', '_' or '.'.")
        if name in self.ids:
            raise ProtocolError(f"a second node has the name '{name}'. Give each node a unique name.")
        parameters, examples = (int(fields[k]) if type(fields.get(k)) is int else 0 for k in ("parameters", "examples"))
        return Joined(name, str(fields.get("encoder"))[:200], parameters, examples), fields.get("has_rad") is True

    # --- messages ---

    def header(self, number: int) -> Header:
        return Header(self.federation, number, self.rad_digest)

    def fields(self, number: int) -> dict[str, Scalar]:
        """Return the fields that every message of a round has."""
        return {**asdict(self.header(number)), "config": self.config_toml}

    def reason(self, name: ClientId, reply: Message) -> str:
        """Return why a client failed. If its process died, name its encoder too, which may be the cause."""
        if reply.error.code == ErrorCode.CLIENT_APP_CRASHED and name in self.models:
            return f"{error_text(reply)}, encoder {self.models[name]['encoder']}"
        return error_text(reply)

    def is_missing(self, reply: Message | None) -> bool:
        """Tell whether a client of this machine failed. Only a real federation goes on without clients."""
        if self.may_be_away:
            return False
        return reply is None or (reply.has_error() and not has_diverged(reply))

    def stop(self, missing: Mapping[ClientId, Message | None], when: str) -> NoReturn:
        """Raise LostStateError if a client has lost its state, otherwise FaultError, which names all of them."""
        for reply in missing.values():
            if reply is not None and reply.error.code == LOST_STATE:
                raise LostStateError(error_text(reply))
        who, *others = (f"{name} (encoder {self.models[name]['encoder']})" for name in sorted(missing))
        reply = missing[min(missing)]
        if reply is None:
            fault = f"{who} did not reply {when} within engine.round_timeout = {self.config.engine.round_timeout:g} s."
        else:
            twice = "twice " if may_pass(reply) and not self.config.privacy.secure else ""
            fault = f"{who} failed {twice}{when}: {error_text(reply)}."
        if others:
            fault += f" So did {', '.join(others[:5])}{f' and {len(others) - 5} more' if len(others) > 5 else ''}."
        raise FaultError(
            f"{fault} Earlier rounds are kept. Fix the cause and continue with: {resume_command(self.folder.path)}"
        )

    def exchange(
        self,
        kind: str,
        number: int,
        contents: Mapping[ClientId, RecordDict],
        take: Callable[[ClientId, Message], None],
        patience: float | None = None,
    ) -> dict[ClientId, int]:
        """Send each client its content and pass each reply to `take` as it arrives. Return the bytes sent.

        Replies are not kept, so that the memory of a round does not depend on the number of clients. The RAD is
        attached once for each client that does not have it. If a node reports that it lost the RAD, its message is sent
        again with the RAD. A client of this machine that fails is asked a second time: it starts again from its saved
        state, so that a fault that passes does not change the results.
        """
        deadline = time.monotonic() + min(patience or math.inf, self.config.engine.round_timeout)
        sent: dict[ClientId, int] = dict.fromkeys(contents, 0)
        lost: list[ClientId] = []
        failed: list[ClientId] = []
        tried_again: set[ClientId] = set()
        # A message of a secure sum must not be answered twice.
        may_repeat = not self.may_be_away and (kind == "evaluate" or not self.config.privacy.secure)

        def arrived(name: ClientId, reply: Message) -> None:
            if kind in ("train", "evaluate"):
                self.listen(Answered(self.number, name))
            if _needs_rad(reply) and name not in self.without_rad:
                lost.append(name)
                return
            if not reply.has_error() and not _needs_rad(reply):
                self.without_rad.discard(name)
            if may_repeat and may_pass(reply) and name not in tried_again:
                failed.append(name)
                self.warn(f"{name} failed: {self.reason(name, reply)}. It starts again from its saved state.")
                return
            take(name, reply)

        asked = list(contents)
        while asked:
            messages = {}
            for name in asked:
                content = with_rad(contents[name], self.rad_record) if name in self.without_rad else contents[name]
                messages[name] = Message(content, self.ids[name], kind, group_id=str(number))
                sent[name] += check_size(messages[name], self.config.engine.message_mb, "the server")
            self.send(messages, deadline, arrived)
            asked = [*lost, *failed]
            self.without_rad |= set(lost)
            tried_again |= set(failed)
            if failed:
                deadline = time.monotonic() + self.config.engine.round_timeout
            lost.clear()
            failed.clear()
        return sent

    def send(self, messages: Mapping[Key, Message], deadline: float, arrived: Callable[[Key, Message], None]) -> None:
        """Send messages and pass each reply to `arrived`, with the key of its message.

        A reply is matched by the id of the message that it answers, because the sender it names can be wrong.
        """
        waiting = dict(zip(self.grid.push_messages(messages.values()), messages, strict=True))
        in_time, pause = True, SHORTEST_PAUSE
        while waiting and in_time:
            in_time = time.monotonic() < deadline  # checked before polling, so that replies that have arrived count
            replies = deque(self.grid.pull_messages(list(waiting)))
            if not replies and not hasattr(self.grid, "cancel"):  # our own grids wait in pull_messages
                time.sleep(pause)
            pause = SHORTEST_PAUSE if replies else min(pause * 1.5, LONGEST_PAUSE)
            while replies:
                reply = replies.popleft()  # the only reference, so that a reply is freed before the next
                key = waiting.pop(reply.metadata.reply_to_message_id, None)
                if key is not None:
                    self.show_frames(reply)
                    arrived(key, reply)
        if waiting and hasattr(self.grid, "cancel"):  # too late: our own engine can also stop the work
            self.grid.cancel(set(waiting))

    def show_frames(self, reply: Message) -> None:
        """Show where a user's own code failed on this machine, once for each place, and keep it in the run folder."""
        lines = (reply.error.reason or "").splitlines() if reply.has_error() and not self.may_be_away else []
        place = "\n".join(lines[:-1])
        if place and place not in self.shown:
            self.shown.add(place)
            text = "\n".join(["your code failed:", *lines])
            append_line(self.folder.path / FAULTS, text)
            self.warn(text)


def has_diverged(reply: Message | None) -> bool:
    """Tell whether a client reports that its loss is not finite."""
    return reply is not None and reply.has_error() and reply.error.code == DIVERGED


def may_pass(reply: Message) -> bool:
    """Tell whether a client failed for a reason that may pass.

    UNKNOWN is a dead actor of Ray: Flower drops the next message to such an actor, so trying again would wait in vain.
    """
    return reply.has_error() and reply.error.code not in (DIVERGED, LOST_STATE, ErrorCode.UNKNOWN)


def _needs_rad(reply: Message) -> bool:
    return not reply.has_error() and fields_of(reply.content).get("need") == "rad"


def error_text(reply: Message) -> str:
    """Return the client's error message as one printable line of bounded length, for logs and terminals."""
    lines = (reply.error.reason or "").strip().splitlines()
    reason = "".join(c for c in lines[-1] if c.isprintable())[:400] if lines else "no reason given"
    return f"{reason} (Flower error {reply.error.code})"
