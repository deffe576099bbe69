"""`hetero-ssfl watch` as a process of its own, and requests to it."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from hetero_ssfl.cli import main; main()", "watch"]


@contextmanager
def watching(*runs: Path, address: str = "127.0.0.1:0", token: str = "") -> Iterator[str]:
    """Serve the page of some runs within the block; yield its URL."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, runs), "--address", address],
        env={**os.environ, "HETERO_SSFL_WATCH_TOKEN": token},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0].replace("0.0.0.0", "127.0.0.1")
    finally:
        process.terminate()
        process.wait(30)


def status_of(url: str, method: str = "GET", **headers: str) -> int:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def read_raw(url: str, path: str) -> bytes:
    """Request a path exactly as it is written."""
    host, port = re.findall(r"//(.*):(\d+)/", url)[0]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        parts = iter(lambda: connection.recv(65536), b"")
        return b"".join(parts)


def first_news(url: str) -> dict[str, Any]:
    """Return what a new viewer is sent when all sections have been drawn."""
    parts: dict[str, str] = {}
    with urllib.request.urlopen(url.replace("/?", "/events?") if "?" in url else f"{url}events", timeout=120) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                news: dict[str, Any] = json.loads(line[6:])
                parts |= news["parts"]
                if "repeat" in news["order"]:
                    return {**news, "parts": parts}
    raise AssertionError("the page was never drawn")
