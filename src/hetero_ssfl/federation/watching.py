"""The live page of a run as a process of its own, so that nobody who looks at it can slow down or stop the run.

This side opens the port, so that the address is known, and an error seen, before the run begins.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError
from ..runs.events import Listener, Watched

TOKEN = "HETERO_SSFL_WATCH_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1")
ANY_PORT = "127.0.0.1:0"


def open_page(address: str) -> tuple[socket.socket, str | None, str]:
    """Listen on HOST:PORT. Return the socket, the token that viewers need if it is not a local one, and the URL."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"'{address}' is not an address, expected HOST:PORT such as 127.0.0.1:8765.")
    try:
        family, *_, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on '{address}': {error.strerror}. Choose another address or port.") from None
    token = None if host in LOCAL else os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    place = f"[{host}]" if ":" in host else host
    return listener, token, f"http://{place}:{listener.getsockname()[1]}/{f'?token={token}' if token else ''}"


@contextmanager
def watched(path: Path, address: str | None, listen: Listener) -> Iterator[None]:
    """Show a live page of a run within the block, if there is an address, and tell the listener its URL."""
    if address is None:
        yield
        return
    listener, token, url = open_page(address)
    with listener:
        command = [sys.executable, "-m", "hetero_ssfl.report.serving", str(listener.fileno()), str(path)]
        environment = {**os.environ, TOKEN: token or ""}
        page = subprocess.Popen(
            command, env=environment, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
    listen(Watched(url))
    try:
        yield
    finally:
        page.terminate()
        try:
            page.wait(15)  # it shows its viewers the end
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
