"""The fork server: one process imports torch and the ClientApp once, and every worker is forked from it.

It only imports: it computes nothing, opens no device and starts no threads, so that forking it is always safe. It ends
with its parent. Starting a worker takes milliseconds, and all workers share the imported modules.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from types import ModuleType


def open_fork_server() -> ForkServerContext:
    """Start the fork server if it is not running, without waiting. Call this early: imports then run in parallel."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preloaded"])
    with interrupts_ignored():
        forkserver.ensure_running()
    return context


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, also after `kill -9`."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def die_with_it() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_it, daemon=True).start()


def cause_of_death(exit_code: int | None) -> str:
    """Describe the exit code or signal that ended a worker process, and what the user can try."""
    if exit_code is None or exit_code >= 0:
        return f"its process ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return "its process was killed (SIGKILL). If the system ran out of memory, lower engine.workers or optim.batch"
    older = "older processor instructions (ONEDNN_MAX_CPU_ISA=AVX in the environment)"
    return f"its process died of {name}. Try hetero-ssfl check machine, engine.threads = 1, or {older}"


@contextmanager
def script_hidden() -> Iterator[None]:
    """Keep a process that is started in this block from running the user's script, which multiprocessing would import.

    A script without `if __name__ == "__main__"` would start another federation there, and one from standard input
    cannot be imported. Workers need nothing of it.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT within a block, so that a child started in it ignores SIGINT from its first moment."""
    if threading.current_thread() is not threading.main_thread():  # no other thread can change signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
