"""Where workers come from: one process imports torch and the ClientApp once, every worker is forked from it.

It only imports: it computes nothing, opens no device and starts no thread of its own, so that forking it is safe
whatever the parent does. It ends with its parent. A new worker takes milliseconds, and all share what was imported.
"""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def open_fork_server() -> ForkServerContext:
    """Start it if need be, without waiting: the sooner, the more of its imports are done while others are busy."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preloaded"])
    with interrupts_ignored():
        forkserver.ensure_running()
    return context


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """A child inherits this while it imports, before it can say so itself. Only the main thread may change signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
