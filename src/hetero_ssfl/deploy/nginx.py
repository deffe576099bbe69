"""nginx on both sides of a connection: Flower 1.41 has neither client certificates nor accounts for its control routes.

SuperNode -> forwarder (same machine) -> proxy (the server's machine) -> SuperLink (loopback interface only)

- The forwarder adds the node's client certificate. It is needed because a SuperNode cannot present one.
- The proxy refuses everyone without a valid client certificate, and every route that a node does not need.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .check_machine import Part

ROUTES = (  # of Flower's Fleet API, without self-registration, which is off when nodes have registered keys
    *("activate-node", "deactivate-node", "send-node-heartbeat"),
    *("pull-messages", "push-messages", "confirm-message-received", "pull-object", "push-object"),
    *("get-run", "get-fab"),
)
BODY_MB = 64  # the largest request; Flower sends arrays in pieces of 5 MB
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin")  # often not on the PATH of ordinary users
INSTALL = "apt-get install nginx"


def program() -> str | None:
    """Return the path of nginx, or None if it is not installed."""
    return shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS]))


def check_configuration(path: Path, alone: bool) -> Iterator[Part]:
    """Let nginx check its configuration. `alone`: this is the machine that it is for."""
    nginx = program()
    if nginx is None:
        text = f"nginx is not installed ({INSTALL})"
        yield ("stops", f"{text}, so the scripts here cannot start.") if alone else ("warning", text)
        return
    with tempfile.TemporaryDirectory() as scratch:  # nginx creates its folders and logs also for a test
        command = [nginx, "-e", "stderr", "-p", f"{scratch}/", "-c", str(path.resolve()), "-t", "-q"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    errors = [line.partition(": ")[2] for line in done.stderr.splitlines() if "[emerg]" in line]
    error = errors[0] if errors else done.stderr.strip()[-200:]
    if done.returncode == 0:
        yield "ok", f"nginx accepts {path.name}"
    elif "host not found" in error and not alone:  # nginx has no error codes
        reason = error.partition(f" in {path.resolve()}")[0]  # the same for all nodes
        yield "warning", f"this machine does not know the name of the server; the node's machine must ({reason})"
    else:
        yield "stops", f"nginx does not accept {path.name}: {error}"
