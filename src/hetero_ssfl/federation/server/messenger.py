"""Send messages to connected nodes by name, and wait for replies, always with a deadline."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import NoReturn, TypeVar

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ...config import Config
from ...errors import FaultError, LostStateError, ProtocolError, RunError
from ...methods import ClientId
from ...runs.events import Answered, Listener, Warned
from ...runs.files import append_line
from ...runs.folder import FAULTS, RunFolder, resume_command
from ..wire import DIVERGED, LOST_STATE, Header, Scalar, check_size, fields_of, pack_rad, with_rad

Key = TypeVar("Key", ClientId, int)
Read = Callable[[ClientId, RecordDict], None]
"""Reads the content of a client's reply. Raises ProtocolError, or anything else, if the reply cannot be used."""

MIN_PAUSE, MAX_PAUSE = 0.02, 0.5  # seconds between two polls for replies, if polling is not free


@dataclass
class Answers:
    """What became of the messages of one exchange, by client."""

    sent: dict[ClientId, int] = field(default_factory=dict)
    """Bytes of the messages."""
    received: dict[ClientId, int] = field(default_factory=dict)
    """Bytes of the usable replies."""
    excluded: dict[ClientId, str] = field(default_factory=dict)
    """Why the other replies could not be used."""
    worked: set[ClientId] = field(default_factory=set)
    """Clients that did what they were asked for, whatever their replies are worth."""
    diverged: list[str] = field(default_factory=list)
    """The reasons of clients whose loss diverged."""


class Messenger:
    def __init__(self, grid: Grid, folder: RunFolder, config: Config, listen: Listener) -> None:
        self.grid, self.folder, self.config, self.listen = grid, folder, config, listen
        self.may_be_away = folder.read_facts().site == "nodes"  # their owners may switch them off
        # Nodes need not know who else is registered.
        clients = config.clients.model_copy(update={"seats": ()})
        self.config_toml = config.model_copy(update={"clients": clients}).to_toml()
        self.federation = str(folder.read_json("facts.json").get("federation"))
        self.rad, self.rad_digest = folder.rad()
        self.rad_record = pack_rad(self.rad)  # one copy for all messages
        self.number = 0  # the current round
        self.ids: dict[ClientId, int] = {}
        """Flower's node id of each connected client."""
        self.models: dict[ClientId, dict[str, Scalar]] = {}
        """The encoder and parameter count that each client reported."""
        self.trained: dict[ClientId, int] = {}
        """The last round in which each client trained and saved its state."""
        self.without_rad: set[ClientId] = set()
        self.shown: set[str] = set()  # places where the user's code failed

    def warn(self, text: str) -> None:
        self.listen(Warned(self.number, text))

    def header(self, number: int) -> Header:
        return Header(self.federation, number, self.rad_digest)

    def fields(self, number: int, name: ClientId | None = None) -> dict[str, Scalar]:
        """Return the fields of a message. A client of this machine is told which of its states it must start from."""
        known = name in self.trained and not self.may_be_away
        starts: dict[str, Scalar] = {"starts_after": self.trained[name]} if name and known else {}
        return {**asdict(self.header(number)), "config": self.config_toml, **starts}

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

    def ask(
        self,
        kind: str,
        number: int,
        contents: Mapping[ClientId, RecordDict],
        read: Read,
        patience: float | None = None,
        may_fail: bool = False,
    ) -> Answers:
        """Send each client its content and pass the content of each reply to `read` as it arrives.

        A client without a usable reply is excluded, with a warning. On one machine a missing reply stops the run,
        unless it `may_fail`.
        """
        answers, missing, waiting = Answers(), dict[ClientId, Message | None](), set(contents)

        def take(name: ClientId, reply: Message | None) -> None:
            waiting.discard(name)
            if self.is_missing(reply) and not may_fail:
                missing[name] = reply
                return
            try:
                answers.received[name] = self.read(name, reply, read, answers)
            except ProtocolError as error:
                answers.excluded[name] = str(error)
                answers.diverged += [str(error)] if has_diverged(reply) else []
                self.warn(f"{error}{' It is left out of this evaluation.' * (kind == 'evaluate')}")

        answers.sent = self.exchange(kind, number, contents, take, patience)
        for name in sorted(waiting):
            take(name, None)
        if missing:
            self.stop(missing, f"in {'the evaluation after ' * (kind == 'evaluate')}round {number}")
        return answers

    def read(self, name: ClientId, reply: Message | None, read: Read, answers: Answers) -> int:
        """Read a reply and return its size in bytes. Raise ProtocolError if it cannot be used."""
        if reply is None:
            raise ProtocolError(f"{name} did not reply in time.")
        if reply.has_error():
            raise ProtocolError(f"{name} failed: {self.reason(name, reply)}.")
        answers.worked.add(name)
        size = check_size(reply, self.config.engine.message_mb, name)
        try:
            read(name, reply.content)
        except (ProtocolError, RunError):  # RunError: the server itself has failed
            raise
        except Exception as error:  # whatever a reply breaks is the fault of its sender
            raise ProtocolError(f"{name} sent a reply that cannot be used: {str(error)[:200]}.") from None
        return size

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
        again: list[ClientId] = []
        failed: set[ClientId] = set()
        # A message of a secure sum must not be answered twice.
        may_repeat = not self.may_be_away and (kind == "evaluate" or not self.config.privacy.secure)

        def arrived(name: ClientId, reply: Message) -> None:
            if kind in ("train", "evaluate"):
                self.listen(Answered(self.number, name))
            if _needs_rad(reply) and name not in self.without_rad:
                self.without_rad.add(name)
                again.append(name)
                return
            if not reply.has_error() and not _needs_rad(reply):
                self.without_rad.discard(name)
            if may_repeat and may_pass(reply) and name not in failed:
                failed.add(name)
                again.append(name)
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
            asked = list(again)
            again.clear()
            if not failed.isdisjoint(asked):
                deadline = time.monotonic() + self.config.engine.round_timeout
        return sent

    def send(self, messages: Mapping[Key, Message], deadline: float, arrived: Callable[[Key, Message], None]) -> None:
        """Send messages and pass each reply to `arrived`, with the key of its message.

        A reply is matched by the id of the message that it answers, because the sender it names can be wrong.
        """
        waiting = dict(zip(self.grid.push_messages(messages.values()), messages, strict=True))
        in_time, pause = True, MIN_PAUSE
        while waiting and in_time:
            in_time = time.monotonic() < deadline  # checked before polling, so that replies that have arrived count
            replies = deque(self.grid.pull_messages(list(waiting)))
            if not replies and not hasattr(self.grid, "cancel"):  # our own grids wait in pull_messages
                time.sleep(pause)
            pause = MIN_PAUSE if replies else min(pause * 1.5, MAX_PAUSE)
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
