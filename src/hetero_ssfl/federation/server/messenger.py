"""Send messages to connected nodes by name, and wait for replies, always with a deadline."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ...config import Config, TrackingConfig, WatchConfig
from ...errors import FaultError, LostStateError, ProtocolError, RunError
from ...methods import ClientId
from ...runs.events import Answered, Joined, Listener, Warned
from ...runs.files import append_line
from ...runs.folder import FAULTS, RunFolder, resume_command
from ..wire import DIVERGED, LOST_STATE, Header, Scalar, check_header, check_size, fields_of, pack

Key = TypeVar("Key", ClientId, int)
Contents = Mapping[ClientId, RecordDict]
Take = Callable[[ClientId, Message], None]
Read = Callable[[ClientId, RecordDict], None]
"""Reads the content of a client's reply. Raises ProtocolError, or anything else, if the reply cannot be used."""

MIN_PAUSE, MAX_PAUSE = 0.02, 0.5  # seconds between two polls for replies, if polling is not free


@dataclass
class Answers:
    """What became of the messages of one exchange, by client."""

    sent: dict[ClientId, int]  # bytes of the messages
    received: dict[ClientId, int] = field(default_factory=dict)  # bytes of the usable replies
    excluded: dict[ClientId, str] = field(default_factory=dict)  # why the other replies could not be used
    worked: set[ClientId] = field(default_factory=set)  # did what they were asked for, whatever their replies are worth
    diverged: list[str] = field(default_factory=list)  # the reasons of clients whose loss diverged


class Messenger:
    def __init__(self, grid: Grid, folder: RunFolder, config: Config, listen: Listener) -> None:
        self.grid, self.folder, self.config, self.listen = grid, folder, config, listen
        facts = folder.read_facts()
        self.federation, self.may_be_away = facts.federation, facts.site == "nodes"  # owners may switch them off
        # Nodes need not know who else is registered.
        clients = config.clients.model_copy(update={"seats": ()})
        hidden = {"clients": clients, "tracking": TrackingConfig(), "watch": WatchConfig()}
        self.config_toml = config.model_copy(update=hidden).to_toml()
        self.rad, self.rad_digest = folder.rad()
        self.rad_record = pack({"pixels": self.rad})["arrays"]  # one copy for all messages
        self.number = 0  # the current round
        self.ids: dict[ClientId, int] = {}  # Flower's node id of each connected client
        self.about: dict[ClientId, Joined] = {}  # what each client said of itself
        self.trained: dict[ClientId, int] = {}  # the last round in which each client trained and saved its state
        self.without_rad: set[ClientId] = set()
        self.patience = min(config.engine.join_timeout, config.engine.round_timeout)  # for replies without any work
        self.shown: set[str] = set()  # places where the user's code failed

    def warn(self, text: str | None) -> None:
        if text:
            self.listen(Warned(self.number, text))

    def header(self, number: int) -> Header:
        return Header(self.federation, number, self.rad_digest)

    def content(self, number: int, name: ClientId | None = None, **more: Scalar) -> RecordDict:
        """Return a message without arrays. A client of this machine is told which of its states it must start from."""
        starts = {"starts_after": self.trained[name]} if name in self.trained and not self.may_be_away else {}
        return pack(header=self.header(number), fields={"config": self.config_toml, **starts, **more})

    def ask(self, kind: str, number: int, contents: Contents, read: Read, may_fail: bool = False) -> Answers:
        """Send each client its content and pass the content of each reply to `read` as it arrives.

        A client without a usable reply is excluded, with a warning. On one machine a missing reply stops the run,
        unless it `may_fail`.
        """
        answers, missing = Answers(dict.fromkeys(contents, 0)), dict[ClientId, Message | None]()
        must_answer = not self.may_be_away and not may_fail

        def take(name: ClientId, reply: Message | None) -> None:
            if must_answer and (reply is None or error_code(reply) not in (None, DIVERGED)):
                missing[name] = reply
                return
            try:
                answers.received[name] = self.read(name, reply, number, read, answers)
            except ProtocolError as error:
                answers.excluded[name] = str(error)
                answers.diverged += [str(error)] if error_code(reply) == DIVERGED else []
                self.warn(f"{error}{' It is left out of this evaluation.' * (kind == 'evaluate')}")

        for name in self.exchange(kind, number, contents, take, answers):
            take(name, None)
        if missing:
            self.stop(missing, f"in {'the evaluation after ' * (kind == 'evaluate')}round {number}")
        if kind == "train" and number > 0:
            self.trained |= dict.fromkeys(answers.worked, number)
        return answers

    def read(self, name: ClientId, reply: Message | None, number: int, read: Read, answers: Answers) -> int:
        """Read a reply and return its size in bytes. Raise ProtocolError if it cannot be used."""
        if reply is None:
            raise ProtocolError(f"{name} did not reply in time.")
        if reply.has_error():
            raise ProtocolError(f"{name} failed: {error_text(reply)}.")
        answers.worked.add(name)
        size = check_size(reply, self.config.engine.message_mb, name)
        try:
            check_header(reply.content, self.header(number), name)
            read(name, reply.content)
        except (ProtocolError, RunError):  # RunError: the server itself has failed
            raise
        except Exception as error:  # whatever a reply breaks is the fault of its sender
            raise ProtocolError(f"{name} sent a reply that cannot be used: {str(error)[:200]}.") from None
        return size

    def stop(self, missing: Mapping[ClientId, Message | None], when: str) -> NoReturn:
        """Raise LostStateError if a client has lost its state, otherwise FaultError, which names all of them."""
        for reply in missing.values():
            if reply is not None and error_code(reply) == LOST_STATE:
                raise LostStateError(error_text(reply))
        who, *others = (f"{name} (encoder {self.about[name].encoder})" for name in sorted(missing))
        reply = missing[min(missing)]
        fault = f"{who} did not reply {when} within engine.round_timeout = {self.config.engine.round_timeout:g} s."
        if reply is not None:
            twice = "twice " if may_pass(reply) and not self.config.privacy.secure else ""
            fault = f"{who} failed {twice}{when}: {error_text(reply)}."
        also = f" So did {', '.join(others[:5])}{' and more' * (len(others) > 5)}." if others else ""
        raise FaultError(f"{fault}{also} Fix the cause and continue with: {resume_command(self.folder.path)}")

    def exchange(self, kind: str, number: int, contents: Contents, take: Take, answers: Answers) -> list[ClientId]:
        """Send each client its content and pass each reply to `take` as it arrives. Return who did not reply.

        Replies are not kept, so that the memory of a round does not depend on the number of clients. The RAD is
        attached once for each client that does not have it. If a node reports that it lost the RAD, its message is sent
        again with the RAD. A client of this machine that fails is asked a second time: it starts again from its saved
        state, so that a fault that passes does not change the results.
        """
        works = kind in ("train", "evaluate")  # other messages are answered at once
        deadline = time.monotonic() + (self.config.engine.round_timeout if works else self.patience)
        waiting, failed, again = set(contents), set[ClientId](), list[ClientId]()
        # A message of a secure sum must not be answered twice.
        may_repeat = not self.may_be_away and (kind == "evaluate" or not self.config.privacy.secure)

        def arrived(name: ClientId, reply: Message) -> None:
            if works:
                self.listen(Answered(self.number, name))
            needs_rad = not reply.has_error() and fields_of(reply.content).get("need") == "rad"
            if needs_rad and name not in self.without_rad:
                self.without_rad.add(name)
                again.append(name)
            elif may_repeat and may_pass(reply) and name not in failed:
                failed.add(name)
                again.append(name)
                self.warn(f"{name} failed: {error_text(reply)}. It starts again from its saved state.")
            else:
                if not reply.has_error() and not needs_rad:
                    self.without_rad.discard(name)
                waiting.discard(name)
                take(name, reply)

        asked = list(contents)
        while asked:
            messages = {}
            for name in asked:
                rad = {"rad": self.rad_record} if name in self.without_rad else {}
                content = RecordDict({**contents[name], **rad})
                messages[name] = Message(content, self.ids[name], kind, group_id=str(number))
                answers.sent[name] += check_size(messages[name], self.config.engine.message_mb, "the server")
            self.send(messages, deadline, arrived)
            asked, again = again, []
            if not failed.isdisjoint(asked):
                deadline = time.monotonic() + self.config.engine.round_timeout
        return sorted(waiting)

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
            append_line(self.folder.path / FAULTS, text := "\n".join(["your code failed:", *lines]))
            self.warn(text)


def error_code(reply: Message | None) -> int | None:
    """Return the code of a reply that reports an error; None for others."""
    return reply.error.code if reply is not None and reply.has_error() else None


def may_pass(reply: Message) -> bool:
    """Tell whether a client failed for a reason that may pass.

    UNKNOWN is a dead actor of Ray: Flower drops the next message to such an actor, so trying again would wait in vain.
    """
    return error_code(reply) not in (None, DIVERGED, LOST_STATE, ErrorCode.UNKNOWN)


def error_text(reply: Message) -> str:
    """Return the client's error message as one printable line of bounded length, for logs and terminals."""
    lines = (reply.error.reason or "").strip().splitlines()
    reason = "".join(c for c in lines[-1] if c.isprintable())[:400] if lines else "no reason given"
    return f"{reason} (Flower error {reply.error.code})"
