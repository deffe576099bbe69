"""A rehearsal: every program of a deployment on this machine, with its real keys and certificates.

1. the SuperLink, which nodes and the server's part of a run meet at, and the SuperExec, which starts that part;
2. the nodes' public keys are registered, and every node is started;
3. `flwr run` starts the run; we follow its folder until it holds results.json;
4. whatever ends too early is started again; in the end everything is stopped, however we end.

The rehearsal keeps to itself: a SuperLink database and a run folder of its own, in FOLDER/rehearsal.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunError
from . import flower, pki
from .layout import Deployment, address
from .processes import Process, Watchdog
from .watch import RunWatch

TICK = 0.5  # seconds between two looks at everything
PAUSE = 5.0  # seconds before something is tried once more
START_TIMEOUT = 120.0  # seconds for a program to begin its work, on a slow machine
END_TIMEOUT = 30.0  # seconds for the server's part to end after its results are there
ATTEMPTS = 3  # failures of the server's part in a row, without a finished round in between


class Rehearsal:
    """The programs of a deployment by name: "superlink", "superexec", each node, and "run", which follows the log.

    A context manager: on leaving it every program ends. The methods can be called one by one, in this order.
    """

    def __init__(self, deployment: Deployment, port: int | None = None) -> None:
        self.deployment, self.port = deployment, port or deployment.port
        self.superlink = address(deployment.loopback, self.port)
        self.place, self.logs = deployment.folder / "rehearsal", deployment.folder / "logs"
        self.run_dir = self.place / "run"
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> "Rehearsal":
        for folder in (self.home("run"), self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.place / ".lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise RunError(f"'{self.deployment.folder}' is being rehearsed already. Wait for it or stop it.") from None
        for stale in self.place.glob("superlink.db*"):
            stale.unlink()  # a new SuperLink knows nothing of runs and nodes that died with an earlier one
        connection = flower.connection(self.superlink, f"{self.deployment.server}/ca.crt", self.deployment.secure)
        (self.home("run") / "config.toml").write_text(connection)
        self.watchdog = Watchdog()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.processes.keys() & {*self.deployment.nodes, "run"}:
            self.processes[name].ask_to_stop()  # all at once, and while there is a SuperLink to take leave of
        for process in reversed(self.processes.values()):
            process.stop()
        self.watchdog.close()
        self.lock.close()

    def forget(self) -> None:
        """Begin with nothing, instead of going on with an earlier rehearsal."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # --- the programs ---

    def start_superlink(self) -> None:
        """Returns when it can be reached."""
        it = self.deployment
        if not _is_free(it.loopback, self.port):
            raise RunError(f"port {self.port} is taken by another program. Stop that one, or choose a free --port.")
        database = str(self.place / "superlink.db")
        command = flower.superlink(str(it.server), it.loopback, str(self.port), database, it.secure)
        process = self.start("superlink", command, it.server)
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(it.loopback, self.port):
            if not process.alive or time.monotonic() > deadline:
                raise RunError(f"the SuperLink did not start: {process.last_words()}. Its log is '{process.log}'.")
            time.sleep(0.1)

    def start_superexec(self) -> None:
        it = self.deployment
        self.start("superexec", flower.superexec(str(it.server), self.superlink, it.secure), it.server)

    def register_nodes(self) -> None:
        """Let the nodes in. A key that is registered already stays so."""
        if not self.deployment.secure:
            return
        for name in self.deployment.nodes:
            key = self.deployment.server / "node-keys" / f"{name}.pub"
            answer = self.flwr(*flower.register(str(key), name))
            if not answer["success"] and "already" not in answer["error-message"]:
                raise RunError(f"'{key}' cannot be registered: {_sentence(answer['error-message'])}")

    def start_node(self, name: str) -> None:
        folder = self.deployment.node(name)
        port = str(free_port())  # for its own client processes; on machines of their own all use the same
        self.start(name, flower.supernode(str(folder), self.superlink, port, self.deployment.secure), folder)

    def start_all(self) -> None:
        if self.deployment.secure:
            self.check_certificate()
        self.start_superlink()
        self.start_superexec()
        self.register_nodes()
        for name in self.deployment.nodes:
            self.start_node(name)

    def check_certificate(self) -> None:
        """Nodes refuse a server whose certificate has ended, but what they say about it is hard to read."""
        end = pki.valid_until((self.deployment.server / "server.crt").read_bytes())
        if end < datetime.now(UTC):
            raise ConfigError(
                f"the server's certificate ended on {end:%Y-%m-%d}. "
                f"Make a new one with: hetero-ssfl deploy renew {self.deployment.folder}"
            )

    def start(self, name: str, command: list[str], cwd: Path) -> Process:
        if name in self.processes:
            self.processes[name].stop()
        program = [_executable(command[0]), *command[1:]]
        process = Process(program, self.logs / f"{name}.log", cwd, self.environment(name), self.watchdog)
        self.processes[name] = process
        process.start()
        return process

    def home(self, name: str) -> Path:
        """Where Flower unpacks apps, for each program its own, and where `flwr` finds the SuperLink's address."""
        return self.place / "flower-homes" / name

    def environment(self, name: str) -> dict[str, str]:
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        return {**os.environ, **flower.ENVIRONMENT, "FLWR_HOME": str(self.home(name)), "PATH": path}

    def revive(self) -> list[str]:
        """Start again what ended, after a pause; returns what there is to say about it."""
        notes = [process.revive() for name, process in self.processes.items() if name != "run"]
        return [note for note in notes if note]

    # --- the run ---

    def start_run(self) -> str:
        """Start the run, or go on with it; returns Flower's id of it."""
        server = self.deployment.server
        command = flower.run(str(server / "app"), str(server / "federation.toml"), str(self.run_dir))
        answer = self.flwr(*command, "--format", "json")
        if not answer["success"]:
            raise RunError(f"the run did not start: {_sentence(answer['error-message'])}")
        self.follow_log(answer["run-id"])
        return str(answer["run-id"])

    def follow_log(self, run_id: str) -> None:
        """The server's log goes to Flower, not to a file: this program fetches it, and ends when the run ends."""
        self.start("run", ["flwr", "log", run_id, flower.CONNECTION], self.place)

    def run_status(self, run_id: str) -> tuple[str, str]:
        """Flower's word for it, such as "running" or "finished:failed", and the reason."""
        answer = self.flwr("list", flower.CONNECTION, "--run-id", run_id, "--format", "json")
        if not answer["success"]:
            return "unknown", _sentence(answer["error-message"])
        return answer["runs"][0]["status"], answer["runs"][0]["status-details"]

    def online(self) -> int:
        """How many nodes the SuperLink has heard of lately."""
        answer = self.flwr("supernode", "list", flower.CONNECTION, "--format", "json")
        return sum(node["status"] == "online" for node in answer.get("nodes", []))

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Ask the SuperLink something through Flower's own command, which answers in JSON."""
        command, environment = [_executable("flwr"), *arguments], self.environment("run")
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT)
            answer: dict[str, Any] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return {"success": False, "error-message": "the SuperLink does not answer"}
        except ValueError:
            return {"success": False, "error-message": done.stderr + done.stdout}
        return answer

    def run(self, watch: RunWatch) -> None:
        """Everything, to the end of the run; nothing for a run that is finished."""
        if not watch.finished:
            self.start_all()
        failures, round_before = 0, watch.round
        while not watch.finished:
            reason = self.run_once(watch)
            if watch.finished:
                break
            failures = failures + 1 if watch.round == round_before else 1
            round_before = watch.round
            log = self.logs / "run.log"
            if failures >= ATTEMPTS:
                raise RunError(f"the server's part failed {failures} times in a row: {reason}. Its log is '{log}'.")
            watch.warn(f"the server's part failed ({reason}) and starts again, see {log}")
            self.attend(watch, PAUSE)

    def run_once(self, watch: RunWatch) -> str:
        """From `flwr run` until the run has ended; returns why it ended."""
        try:
            run_id = self.start_run()
        except RunError as error:
            return str(error)
        while True:
            self.attend(watch)
            log_ended = not self.processes["run"].alive
            if watch.finished:
                self.await_end()
                watch.look()
                return "finished"
            if log_ended:  # because the run ended, or the SuperLink
                status, reason = self.run_status(run_id)
                if status.startswith("finished"):
                    return reason or status
                self.attend(watch, PAUSE)
                self.follow_log(run_id)

    def attend(self, watch: RunWatch, seconds: float = TICK) -> None:
        """Show what is new and start again what ended, for so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for note in self.revive():
                watch.warn(note)
            watch.look()
            time.sleep(TICK)

    def await_end(self) -> None:
        """The results are there; the server's part still says goodbye to Flower."""
        deadline = time.monotonic() + END_TIMEOUT
        while self.processes["run"].alive and time.monotonic() < deadline:
            time.sleep(TICK)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a program just left is free
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _executable(name: str) -> str:
    """Flower's programs stand beside the Python that runs us."""
    found = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if found is None:
        raise RunError(f"there is no program '{name}' beside '{sys.executable}'. Install flwr into this environment.")
    return found


def _sentence(text: str) -> str:
    """What Flower's command says went wrong, without what it says it is doing."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Using SuperLink", "Listing"))).rstrip(".")
