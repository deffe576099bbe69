"""Test a deployment on one machine (`deploy local`): start its scripts as child processes, wait for the run, end them.

Keys, settings and images are those of the deployment. FOLDER/local has links to them, and scripts with ports of this
machine; logs, databases and the run folder of the test are there, too. Where nginx is not installed, nodes connect to
the SuperLink directly. The scripts restart programs that end, as they do in a deployment; nothing here does.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..report.progress import RunView
from ..runs.events import ClientTrained, RoundDone, Started, Warned, from_lines
from ..runs.files import locked
from ..runs.folder import RunFolder
from . import nginx
from .check_machine import is_free
from .layout import FORWARDER_PORT, Deployment
from .write import Writer, write_files

TICK = 0.5  # seconds between two checks
START_TIMEOUT = 120.0  # seconds for a program to start, on a slow machine
GRACE = 10.0  # seconds for an orderly shutdown
RUNTIME = {"flower-home", "nginx-temp", "__pycache__", "proxy.pid", "forwarder.pid", "refused.log"}
"""Written while a deployment runs, as the SuperLink's database is. A test has its own."""
GUARD = 'while read -r group; do groups="$groups -$group"; done; kill -KILL $groups 2>/dev/null'
"""Kills process groups when its standard input closes, also because this process was killed."""


class RunWatch:
    """Passes the new events of a run folder, which another process writes, to a view."""

    def __init__(self, run_dir: Path, view: RunView) -> None:
        self.run_dir, self.view = run_dir, view
        self.seen = self._lines()
        self.status: dict[str, Any] = {}
        self.round = max((event.round for event in from_lines(self.seen) if isinstance(event, RoundDone)), default=0)

    @property
    def finished(self) -> bool:
        return (self.run_dir / "results.json").exists()

    def look(self) -> None:
        self._show_status()
        lines = self._lines()
        # A server that continues drops the events of an unfinished round, so lines that we have seen may disappear.
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.seen, lines, strict=False)))
        for event in from_lines(lines[same:]):
            if isinstance(event, RoundDone):
                self.round = max(self.round, event.round)
            if isinstance(event, ClientTrained) and event.excluded:
                event = Warned(event.round, event.excluded)
            self.view(event)
        self.seen = lines

    def _show_status(self) -> None:
        """Show what the server is doing: a bar and a note on a terminal, nothing in a log file."""
        now = RunFolder(self.run_dir).read_status()
        if now == self.status:
            return
        self.status = now
        if self.view.rounds is None and "rounds" in now:
            self.view(Started(self.round, now["rounds"]))
        if self.view.rounds is not None:
            waiting = ", ".join(now.get("waiting_for", []))
            note = f"{now['phase']}, waiting for {waiting}" if waiting else now["phase"]
            self.view.bar.update(self.view.rounds, note=note)

    def _lines(self) -> list[str]:
        path = self.run_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete


class LocalDeployment:
    """The running scripts of a deployment: "superlink", "proxy", "superexec", each node, and "run".

    Use it as a context manager; all programs end when it exits. `proxy = False` leaves out the proxy and the
    forwarders, as on a machine without nginx.
    """

    def __init__(self, deployment: Deployment, port: int | None = None, proxy: bool = True) -> None:
        self.source = deployment
        folder, host = deployment.folder / "local", deployment.loopback
        self.deployment = replace(deployment, folder=folder, host=host, port=port or deployment.port)
        self.proxied = proxy and self.without_proxy() is None
        self.logs, self.run_dir = folder / "logs", folder / "run"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def without_proxy(self) -> str | None:
        """Return why the proxy is left out, and the remedy."""
        if not self.deployment.secure:
            return "this deployment was made with --insecure"
        return None if nginx.program() else f"nginx is not installed ({nginx.INSTALL})"

    def __enter__(self) -> "LocalDeployment":
        for path in (self.deployment.folder, self.logs):
            path.mkdir(mode=0o700, exist_ok=True)
        busy = RunError(f"another process is testing '{self.source.folder}'. Wait for it or stop it.")
        self.lock = contextlib.ExitStack()
        self.lock.enter_context(locked(self.deployment.folder / ".lock", busy))
        self.write()
        self.guard = subprocess.Popen(["sh", "-c", GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        server = ["superexec", "proxy", "superlink"]
        _end(process for name, process in self.processes.items() if name not in server)  # so that nodes can sign off
        for name in server:
            _end([self.processes[name]] if name in self.processes else [])
        self.guard.communicate()  # it kills what is left of their process groups
        self.lock.close()

    def write(self) -> None:
        """Write scripts and configurations for ports of this machine, and link all other files of the deployment."""
        it = self.deployment
        parts = ["server", *(f"nodes/{name}" for name in it.nodes)]
        for part in parts:
            (it.folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (it.folder / part).iterdir():
                if path.is_symlink() or path.name.startswith("superlink.db"):
                    path.unlink()  # runs and nodes of an earlier SuperLink no longer exist
        self.superlink_port = free_port() if self.proxied else it.port
        writer = Writer(it, self.superlink_port, self.proxied)
        writer.add_server_scripts()
        for name in it.nodes:
            writer.add_node_scripts(name, free_port() if self.proxied else FORWARDER_PORT)
        for name in writer.files:  # those of an earlier test
            (it.folder / name).unlink(missing_ok=True)
        write_files(it.folder, writer.files)
        for part in parts:
            for path in (self.source.folder / part).iterdir():
                link = it.folder / part / path.name
                if not (link.exists() or path.name in RUNTIME or path.name.startswith("superlink.db")):
                    link.symlink_to(path)

    def forget(self) -> None:
        """Delete the run folder of an earlier test."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # --- the programs ---

    def start_all(self) -> None:
        self.start_superlink()
        if self.proxied:
            self.start("proxy", "server/start-proxy.sh", self.deployment.port)
        self.start("superexec", "server/start-superexec.sh")
        self.register_nodes()
        for name in self.deployment.nodes:
            self.start_node(name)

    def start_superlink(self) -> None:
        self.start("superlink", "server/start-superlink.sh", self.superlink_port)

    def start_node(self, name: str) -> None:
        self.start(name, f"nodes/{name}/start.sh")

    def start(self, name: str, script: str, port: int | None = None) -> None:
        """Start a script. Return when its program listens, if it has a port."""
        host, log = self.deployment.loopback, self.logs / f"{name}.log"
        if port is not None and not is_free(host, port):
            raise RunError(f"port {port} is in use by another program. Stop it, or choose a free --port.")
        with log.open("ab") as output:
            process = subprocess.Popen(
                [self.deployment.folder / script],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        assert self.guard.stdin is not None
        print(process.pid, file=self.guard.stdin, flush=True)
        deadline = time.monotonic() + START_TIMEOUT
        while port is not None and is_free(host, port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"{name} did not start: {_last_line(log)}. Its log is '{log}'.")
            time.sleep(0.1)

    def environment(self) -> dict[str, str]:
        own = {"RUN_DIR": str(self.run_dir), "NODE_PORT": str(free_port()), "PAUSE": "2", "ALLOW_ROOT": "yes"}
        return {**os.environ, "FLOWER_BIN": os.path.dirname(sys.executable), **own}

    def register_nodes(self) -> None:
        """Register the nodes' public keys. Keys that are already registered are accepted."""
        script = self.deployment.server / "register-nodes.sh"
        done = subprocess.run([script], env=self.environment(), capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"the SuperLink does not accept the nodes' keys: {' '.join(done.stderr.split())}")

    # --- the run ---

    def run(self, watch: RunWatch) -> None:
        """Start or continue the run, and wait until it ends."""
        self.start("run", "server/run.sh")
        while self.processes["run"].poll() is None:
            time.sleep(TICK)
            watch.look()
        watch.look()
        if not watch.finished:
            log = self.logs / "run.log"
            raise RunError(f"the run ended early: {_last_line(log)}. Its log is '{log}'. Start it again to continue.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    """Ask scripts to end, all at once, and wait for them."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))


def _last_line(log: Path) -> str:
    """Return the last line of a log, before the general remarks that Flower's programs write below an exit code."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ends = [number for number, line in enumerate(lines) if "Exit Code:" in line]
    last = (lines[: ends[-1]] if ends else lines)[-1:]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(last[0])["text"])  # of our own programs
    return last[0] if last else "its log is empty"
