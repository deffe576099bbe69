"""Flower's Grid on worker processes of this machine: no network, no Ray, no second code path.

Each worker holds one ClientApp and one torch thread (by default). A client returns to the worker that has it in memory;
an idle worker takes over waiting ones, reading their state from disk. Where a client runs never changes its numbers.
"""

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ..records import decode, encode
from .forkserver import interrupts_ignored, open_fork_server

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

    from ..sites import Site

SERVER_NODE = 1
RUN_ID = 1

ProgressListener = Callable[[str, float, float], None]


def set_identity(node_id: int) -> None:
    """`Message(...)` reads these from the process it is made in; the one private thing of Flower used here."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # older releases do not need it
        return
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, RUN_ID, node_id


# --- the worker's side ------------------------------------------------------------------------------


def work(
    connection: Connection,
    threads: int,
    environment: dict[str, str],
    inherited: Sequence[Connection],
    site: "Site | None",
) -> None:
    """Answer messages until the parent closes the pipe or dies. A `site` reaches forked workers only."""
    for other in inherited:
        other.close()  # the parent's ends: a pipe that its own worker holds open never ends
    os.environ.clear()
    os.environ.update(environment)  # the parent's as it is now; what came before is from the fork server's start
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.getLogger("hetero_ssfl").addHandler(logging.NullHandler())  # the parent reports; nodes keep no log here
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
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

    app = client_app(ClientProcess(site=site, report=report))
    while True:
        try:
            node_config = json.loads(connection.recv_bytes())
            message = decode(connection.recv_bytes())
        except EOFError:
            return
        limit_gpu_memory(node_config.get("gpu-fraction"))
        connection.send_bytes(b"R" + encode(answer(app, message, node_config)))


def answer(app: "ClientApp", message: Message, node_config: dict[str, Any]) -> Message:
    """The ClientApp's reply, in this process."""
    node = message.metadata.dst_node_id
    set_identity(node)
    try:
        return app(message, Context(RUN_ID, node, node_config, RecordDict(), {}))
    except Exception as error:  # whatever one client does, the federation goes on
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def keep_freed_memory(most: int = 2**28) -> None:
    """Let glibc hand the memory of one step to the next instead of returning it: a tenth of the time went into that."""
    library = ctypes.CDLL(None)
    for setting in (-1, -3) if hasattr(library, "mallopt") else ():  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc
        library.mallopt(setting, most)


def limit_gpu_memory(fraction: float | None) -> None:
    """Fail with an out-of-memory error of this client's own instead of one of its neighbours on the same GPU."""
    import torch

    if fraction and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction)


def _die_with(parent_sentinel: int) -> None:
    wait([parent_sentinel])
    os._exit(1)


# --- the server's side ------------------------------------------------------------------------------


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    busy: Message | None = None
    since: float = 0.0


@dataclass
class _Node:
    settings: dict[str, Any]
    home: int | None = None
    seconds: float = field(default=float("inf"))  # of the last message; unknown ones go first


class LocalGrid(Grid):
    """What both grids have in common: nodes by number, messages that wait, replies that nobody fetched yet."""

    def __init__(self, nodes: list[dict[str, Any]], on_progress: ProgressListener | None = None) -> None:
        self._nodes = {number + 2: _Node(settings) for number, settings in enumerate(nodes)}
        self._on_progress = on_progress
        self._pending: list[Message] = []
        self._replies: dict[str, Message] = {}
        self._run: Any = None
        set_identity(SERVER_NODE)

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            self._pending.append(message)
            ids.append(message.metadata.message_id)
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that are there, after waiting a moment for the next one."""
        wanted = list(message_ids)
        if not any(i in self._replies for i in wanted):
            self._receive(timeout=0.01)  # short: a deadline is not looked at meanwhile
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
        """Forget messages whose answers nobody waits for any more."""
        self._pending = [m for m in self._pending if m.metadata.message_id not in message_ids]
        for message_id in message_ids:
            self._replies.pop(message_id, None)

    def _dispatch(self) -> None:
        """Hand out what waits, to whoever is idle."""

    @abstractmethod
    def _receive(self, timeout: float) -> None:
        """Wait so long for replies, and keep those that come."""


class InlineGrid(LocalGrid):
    """One client after another in this process: where it cannot be forked safely. Use as a context manager."""

    def __init__(self, nodes: list[dict[str, Any]], site: "Site", on_progress: ProgressListener | None = None) -> None:
        super().__init__(nodes, on_progress)
        from ..client.app import ClientProcess, client_app

        self._app = client_app(ClientProcess(site=site, report=on_progress or (lambda *_: None)))

    def __enter__(self) -> "InlineGrid":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _receive(self, timeout: float) -> None:
        if self._pending:
            message = self._pending.pop(0)
            reply = decode(encode(answer(self._app, message, self._nodes[message.metadata.dst_node_id].settings)))
            set_identity(SERVER_NODE)
            self._replies[reply.metadata.reply_to_message_id] = reply


def cause_of_death(exit_code: int | None) -> str:
    """Name the signal that ended a worker process, and what the user can try."""
    if exit_code is None or exit_code >= 0:
        return f"its process ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return "its process was killed (SIGKILL). If the system ran out of memory, lower engine.workers or optim.batch"
    return (
        f"its process died of {name}. Try hetero-ssfl doctor, engine.threads = 1, or older processor instructions: "
        "ONEDNN_MAX_CPU_ISA=AVX in the environment"
    )


class InProcessGrid(LocalGrid):
    """Messages to simulated nodes, answered by worker processes. Use as a context manager.

    Workers come from the fork server, or are forked from this process if only it has their `site`.
    """

    def __init__(
        self,
        nodes: list[dict[str, Any]],
        workers: int,
        threads: int,
        on_progress: ProgressListener | None = None,
        site: "Site | None" = None,
    ) -> None:
        super().__init__(nodes, on_progress)
        self._context: BaseContext = multiprocessing.get_context("fork") if site else open_fork_server()
        self._threads, self._site = threads, site
        self._workers: list[_Worker] = []
        for _ in range(min(workers, len(nodes))):
            self._workers.append(self._start())

    def __enter__(self) -> "InProcessGrid":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.connection.close()  # an idle worker ends by itself
            if worker.busy is not None:
                worker.process.kill()  # every finished round is on disk; nothing is lost
        for worker in self._workers:
            worker.process.join()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        inherited = [ours, *(worker.connection for worker in self._workers)] if self._site else []
        args = (theirs, self._threads, dict(os.environ), inherited, self._site)
        process = self._context.Process(target=work, args=args, daemon=True)  # type: ignore[attr-defined]
        with interrupts_ignored(), warnings.catch_warnings():
            # A fork with one torch thread is as safe as that of a DataLoader's workers; newer Pythons warn of any.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def cancel(self, message_ids: set[str]) -> None:
        """Stop work as well: a busy worker is replaced."""
        for number, worker in enumerate(self._workers):
            if worker.busy is not None and worker.busy.metadata.message_id in message_ids:
                worker.process.kill()
                self._replace(number)
        super().cancel(message_ids)  # after that: the one who was replaced has left an error

    # --- scheduling ---

    def _dispatch(self) -> None:
        for number, worker in enumerate(self._workers):
            message = self._next_for(number) if worker.busy is None else None
            if message is not None:
                self._pending.remove(message)
                node = self._nodes[message.metadata.dst_node_id]
                node.home, worker.busy, worker.since = number, message, time.monotonic()
                try:
                    worker.connection.send_bytes(json.dumps(node.settings).encode())
                    worker.connection.send_bytes(encode(message))
                except OSError:
                    self._replace(number)

    def _next_for(self, worker: int) -> Message | None:
        """The longest job among this worker's own clients; failing that, the longest of all. Clients whose parts of
        the GPU would not fit beside those at work have to wait."""

        def node(message: Message) -> _Node:
            return self._nodes[message.metadata.dst_node_id]

        def fraction(message: Message) -> float:
            return float(node(message).settings.get("gpu-fraction", 0.0))

        taken = sum(fraction(other.busy) for other in self._workers if other.busy is not None)
        fitting = [m for m in self._pending if taken + fraction(m) <= 1 + 1e-9]  # 10 x 0.1 is more than 1 in floats
        own = [m for m in fitting if node(m).home == worker]
        return max(own or fitting, key=lambda m: node(m).seconds, default=None)

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
                if self._on_progress:
                    self._on_progress(*json.loads(data[1:]))
                continue
            reply = decode(data[1:])
            assert worker.busy is not None
            self._nodes[worker.busy.metadata.dst_node_id].seconds = time.monotonic() - worker.since
            worker.busy = None
            self._replies[reply.metadata.reply_to_message_id] = reply
        self._dispatch()

    def _replace(self, number: int) -> None:
        """A worker died: its message fails as Flower's would (error 8), and a new worker takes its place."""
        worker = self._workers[number]
        worker.connection.close()
        worker.process.join()
        if worker.busy is not None:
            error = Error(ErrorCode.CLIENT_APP_CRASHED, cause_of_death(worker.process.exitcode))
            self._replies[worker.busy.metadata.message_id] = Message(error, reply_to=worker.busy)
        self._workers[number] = self._start()
