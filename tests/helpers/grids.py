"""Flower's Grid in one thread: with the real ClientApp, encoded messages, and nodes that join and leave."""

import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from hetero_ssfl.federation.client.app import ClientProcess, client_app
from hetero_ssfl.federation.engines.workers import RUN_ID, SERVER_NODE, set_identity
from hetero_ssfl.federation.wire import decode, encode

Tamper = Callable[[Message, Message], Message | None]


class LocalGrid(Grid):
    """`tamper[node](instruction, reply)` can change a node's reply; None means no reply."""

    def __init__(self, nodes: dict[int, Path]) -> None:
        self.nodes = dict(nodes)
        self.tamper: dict[int, Tamper] = {}
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.states: dict[int, RecordDict] = {}
        """What each SuperNode keeps in its memory between two messages."""
        set_identity(SERVER_NODE)

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise AssertionError("the server loop makes its messages itself")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            ids.append(message.metadata.message_id)
            self.sent.append(message)
            reply = self.answer(message)
            if reply is not None:
                self.replies[message.metadata.message_id] = reply
        return ids

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
        set_identity(node)
        app = client_app(ClientProcess())  # a deployed node handles every message in a new process
        state = self.states.setdefault(node, RecordDict())
        context = Context(RUN_ID, node, {"settings": str(self.nodes[node])}, state, {})
        reply: Message | None = decode(encode(app(decode(encode(message)), context)))
        if node in self.tamper:
            assert reply is not None
            reply = self.tamper[node](message, reply)
        set_identity(SERVER_NODE)
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(i) for i in list(message_ids) if i in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("the server loop pushes and pulls, within deadlines of its own")
