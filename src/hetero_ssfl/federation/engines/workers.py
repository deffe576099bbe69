"""Flower's Grid on worker processes of this machine, without a network or Ray.

Each worker has one ClientApp and, by default, one torch thread. A client is sent to the worker that has it in memory;
an idle worker takes over waiting clients and reads their state from disk. Results do not depend on the worker.
"""

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import time
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Self

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from ..wire import decode, decode_state, encode, encode_state
from .forkserver import cause_of_death, end_with_parent, interrupts_ignored, open_fork_server, script_hidden

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

    from ..client.app import Report
    from ..participants import Site

SERVER_NODE = 1
RUN_ID = 1


def set_identity(node_id: int) -> None:
    """Set the ids that `Message(...)` reads from its process. These and a message's id are private parts of Flower."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, RUN_ID, node_id


# --- the worker's side ------------------------------------------------------------------------------


def work(
    connection: Connection, threads: int, environment: dict[str, str], inherited: list[Connection], site: "Site | None"
) -> None:
    """Answer messages until the parent closes the pipe or dies. Only forked workers get a `site`."""
    for other in inherited:
        other.close()  # the parent's ends: a pipe reports its end only after all copies are closed
    os.environ.clear()
    os.environ.update(environment)  # the parent's current environment; the fork server's copy may be older
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.getLogger("hetero_ssfl").addHandler(logging.NullHandler())  # the parent reports warnings
    end_with_parent()
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()
    from ..client.app import ClientProcess, client_app

    last = 0.0

    def report(name: str, done: float, loss: float) -> None:
        nonlocal last
        if time.monotonic() - last > 0.2:
            last = time.monotonic()
            connection.send_bytes(b"P" + json.dumps([name, done, loss]).encode())

    app = client_app(ClientProcess(site, report=report) if site else ClientProcess(report=report))
    while True:
        try:
            node_config = json.loads(connection.recv_bytes())
            state = decode_state(connection.recv_bytes())
            message = decode(connection.recv_bytes())
        except EOFError:
            return
        limit_gpu_memory(node_config.get("gpu-fraction"))
        reply = answer(app, message, node_config, state)
        connection.send_bytes(b"S" + encode_state(state))
        connection.send_bytes(b"R" + encode(reply))


def answer(app: "ClientApp", message: Message, node_config: dict[str, Any], state: RecordDict) -> Message:
    """Return the ClientApp's reply, computed in this process. `state` is what the node keeps between messages."""
    node = message.metadata.dst_node_id
    set_identity(node)
    try:
        return app(message, Context(RUN_ID, node, node_config, state, {}))
    except Exception as error:  # an error of one client must not stop the federation
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the system, which took a tenth of the time."""
    library = ctypes.CDLL(None)
    for setting in (-1, -3) if hasattr(library, "mallopt") else ():  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc
        library.mallopt(setting, 2**28)


def limit_gpu_memory(fraction: float | None) -> None:
    """Limit this process's GPU memory, so that a client that needs too much fails itself and not its neighbours."""
    import torch

    if fraction and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction)


# --- the server's side ------------------------------------------------------------------------------


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    busy: Message | None = None
    since: float = 0.0


@dataclass
class _Node:
    config: dict[str, Any]
    state: RecordDict = field(default_factory=RecordDict)  # of Flower's Context: any worker may need it next
    home: int | None = None  # the worker that has it in memory
    seconds: float = field(default=float("inf"))  # duration of the last message; unknown durations go first


class LocalGrid(Grid):
    """Nodes by number, pending messages, and replies that have not been pulled yet. Use as a context manager."""

    run: Any = None
    report: "Report" = staticmethod(lambda *_: None)  # the server sets it to hear how far clients are

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = {number + 2: _Node(config) for number, config in enumerate(nodes)}
        self._pending: list[Message] = []
        self._replies: dict[str, Message] = {}
        set_identity(SERVER_NODE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_run(self, run: Any) -> None:
        self.run = run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        for message in pushed:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        self._pending += pushed
        self._dispatch()
        return [message.metadata.message_id for message in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, after a short wait if there are none."""
        wanted = list(message_ids)
        if not any(i in self._replies for i in wanted):
            self._receive(timeout=0.01)  # short, because deadlines are not checked meanwhile
        return [self._replies.pop(i) for i in wanted if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        missing, replies = set(self.push_messages(messages)), []
        deadline = time.monotonic() + timeout if timeout else float("inf")
        while missing and time.monotonic() < deadline:
            for reply in self.pull_messages(missing):
                missing.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies

    def cancel(self, message_ids: set[str]) -> None:
        """Drop messages whose replies are no longer needed."""
        self._pending = [m for m in self._pending if m.metadata.message_id not in message_ids]
        for message_id in message_ids:
            self._replies.pop(message_id, None)

    def _node_of(self, message: Message) -> _Node:
        return self._nodes[message.metadata.dst_node_id]

    def _dispatch(self) -> None:
        """Send pending messages to idle workers."""

    @abstractmethod
    def _receive(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for replies, and store them."""


class InlineGrid(LocalGrid):
    """Runs one client after another in this process, where it cannot be forked safely."""

    def __init__(self, nodes: list[dict[str, Any]], site: "Site") -> None:
        super().__init__(nodes)
        from ..client.app import ClientProcess, client_app

        self._app = client_app(ClientProcess(site, report=lambda *progress: self.report(*progress)))

    def _receive(self, timeout: float) -> None:
        if self._pending:
            message = self._pending.pop(0)
            node = self._node_of(message)
            reply = decode(encode(answer(self._app, message, node.config, node.state)))
            set_identity(SERVER_NODE)
            self._replies[reply.metadata.reply_to_message_id] = reply


class WorkerGrid(LocalGrid):
    """Sends messages to worker processes, which the fork server starts; or forks them itself if a `site` is given."""

    def __init__(self, nodes: list[dict[str, Any]], workers: int, threads: int, site: "Site | None" = None) -> None:
        super().__init__(nodes)
        self._context: BaseContext = multiprocessing.get_context("fork") if site else open_fork_server()
        self._threads, self._site = threads, site
        self._workers: list[_Worker] = []
        for _ in range(min(workers, len(nodes))):
            self._workers.append(self._start())

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.connection.close()  # ends an idle worker
            if worker.busy is not None:
                worker.process.kill()  # every finished round is on disk, so nothing is lost
        for worker in self._workers:
            worker.process.join()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        inherited = [ours, *(worker.connection for worker in self._workers)] if self._site else []
        args = (theirs, self._threads, dict(os.environ), inherited, self._site)
        process = self._context.Process(target=work, args=args, daemon=True)  # type: ignore[attr-defined]
        script = nullcontext() if self._site else script_hidden()  # a forked worker imports nothing
        with interrupts_ignored(), script, warnings.catch_warnings():
            # With one torch thread, forking is as safe as for a DataLoader's workers; newer Pythons always warn.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def cancel(self, message_ids: set[str]) -> None:
        """Drop messages and stop the work on them: busy workers are replaced."""
        for number, worker in enumerate(self._workers):
            if worker.busy is not None and worker.busy.metadata.message_id in message_ids:
                worker.process.kill()
                self._replace(number)
        super().cancel(message_ids)  # last, because replacing a worker adds an error reply

    # --- scheduling ---

    def _dispatch(self) -> None:
        for number, worker in enumerate(self._workers):
            message = self._next_for(number) if worker.busy is None else None
            if message is not None:
                self._pending.remove(message)
                node = self._node_of(message)
                node.home, worker.busy, worker.since = number, message, time.monotonic()
                try:
                    worker.connection.send_bytes(json.dumps(node.config).encode())
                    worker.connection.send_bytes(encode_state(node.state))
                    worker.connection.send_bytes(encode(message))
                except OSError:
                    self._replace(number)

    def _next_for(self, worker: int) -> Message | None:
        """Return the longest job among this worker's own clients, or else among all that fit on the GPU now."""

        def fraction(message: Message) -> float:
            return float(self._node_of(message).config.get("gpu-fraction", 0.0))

        taken = sum(fraction(other.busy) for other in self._workers if other.busy is not None)
        fitting = [m for m in self._pending if taken + fraction(m) <= 1 + 1e-9]  # 10 x 0.1 is more than 1 in floats
        own = [m for m in fitting if self._node_of(m).home == worker]
        return max(own or fitting, key=lambda m: self._node_of(m).seconds, default=None)

    def _receive(self, timeout: float) -> None:
        connections = [worker.connection for worker in self._workers]
        for ready in wait(connections, timeout):
            number = connections.index(ready)  # type: ignore[arg-type]
            worker = self._workers[number]
            try:
                data = worker.connection.recv_bytes()
            except (EOFError, OSError):
                self._replace(number)
                continue
            if data[:1] == b"P":
                self.report(*json.loads(data[1:]))
                continue
            assert worker.busy is not None
            node = self._node_of(worker.busy)
            if data[:1] == b"S":
                node.state = decode_state(data[1:])
                continue
            reply = decode(data[1:])
            node.seconds, worker.busy = time.monotonic() - worker.since, None
            self._replies[reply.metadata.reply_to_message_id] = reply
        self._dispatch()

    def _replace(self, number: int) -> None:
        """Replace a dead worker. Its message gets the same error reply as from Flower (error 8)."""
        worker = self._workers[number]
        worker.connection.close()
        worker.process.join()
        if worker.busy is not None:
            error = Error(ErrorCode.CLIENT_APP_CRASHED, cause_of_death(worker.process.exitcode))
            self._replies[worker.busy.metadata.message_id] = Message(error, reply_to=worker.busy)
        self._workers[number] = self._start()
