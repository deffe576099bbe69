"""A rehearsal: every program of a deployment on this machine, with its real keys and certificates.

1. start the SuperLink, which carries all messages, the proxy in front of it, and the SuperExec, which starts the server
   app;
2. register the nodes' public keys, and start every node: its forwarder and its SuperNode;
3. start the run with `flwr run`, and follow its folder until it contains results.json;
4. restart programs that end too early; stop all programs at the end, also after an error.

The rehearsal has its own SuperLink database and run folder, in FOLDER/rehearsal. Where nginx is not installed, nodes
connect to the SuperLink directly.
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
from . import flower, nginx, pki
from .check_files import is_free
from .layout import Deployment, address
from .processes import Process, Watchdog
from .watch import RunWatch

TICK = 0.5  # seconds between two checks
PAUSE = 5.0  # seconds before a retry
START_TIMEOUT = 120.0  # seconds for a program to start, on a slow machine
END_TIMEOUT = 30.0  # seconds for the server app to end after it has written its results
ATTEMPTS = 3  # failures of the server app in a row, without a finished round in between


class Rehearsal:
    """The programs of a deployment by name: "superlink", "proxy", "superexec", each node and its "NAME.forwarder", and
    "run", which follows the log.

    Use it as a context manager; all programs end when it exits. The methods can also be called one by one, in order.
    `proxy = False` leaves out the proxy and the forwarders, as on a machine without nginx.
    """

    def __init__(self, deployment: Deployment, port: int | None = None, proxy: bool = True) -> None:
        self.deployment, self.port = deployment, port or deployment.port
        self.proxied = proxy and self.without_proxy() is None
        self.superlink_port = free_port() if self.proxied else self.port
        self.superlink = address(deployment.loopback, self.superlink_port)
        self.entrance = address(deployment.loopback, self.port)
        self.place, self.logs = deployment.folder / "rehearsal", deployment.folder / "logs"
        self.run_dir = self.place / "run"
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> "Rehearsal":
        for folder in (self.place, self.logs, self.home("run")):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = (self.place / ".lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise RunError(
                f"another process is already rehearsing '{self.deployment.folder}'. Wait for it or stop it."
            ) from None
        for stale in self.place.glob("superlink.db*"):
            stale.unlink()  # runs and nodes of an earlier SuperLink no longer exist
        connection = flower.connection(self.superlink, f"{self.deployment.server}/ca.crt", self.deployment.secure)
        (self.home("run") / "config.toml").write_text(connection)
        self.watchdog = Watchdog()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.processes.keys() & {*self.deployment.nodes, "run"}:
            self.processes[name].ask_to_stop()  # all at once, while the SuperLink is up so that they can sign off
        for process in reversed(self.processes.values()):
            process.stop()
        self.watchdog.close()
        self.lock.close()

    def forget(self) -> None:
        """Delete the run folder of an earlier rehearsal."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # --- the programs ---

    def without_proxy(self) -> str | None:
        """Return why the proxy is left out, and the remedy."""
        if not self.deployment.secure:
            return "this deployment was made with --insecure"
        if nginx.program() is None:
            return f"nginx is not installed ({nginx.INSTALL})"
        if not (self.deployment.server / "client-ca.crt").exists():
            return "this folder has no client certificates (create a new one with deploy init)"
        return None

    def start_superlink(self) -> None:
        """Start the SuperLink, and return when it accepts connections."""
        it = self.deployment
        database, port = str(self.place / "superlink.db"), str(self.superlink_port)
        command = flower.superlink(str(it.server), it.loopback, port, database, it.secure)
        self.start_listener("superlink", command, it.server, it.loopback, self.superlink_port)

    def start_proxy(self) -> None:
        """Start nginx in front of the SuperLink, if this rehearsal has a proxy."""
        if self.proxied:
            config = nginx.proxy(self.deployment, self.entrance, self.superlink, "../../server/")
            self.start_nginx("proxy", config, self.deployment.loopback, self.port)

    def start_nginx(self, name: str, config: str, host: str, port: int) -> None:
        folder = self.place / name
        folder.mkdir(exist_ok=True)
        (folder / "nginx.conf").write_text(config)
        self.start_listener(name, nginx.command(str(folder), f"{folder}/nginx.conf"), folder, host, port)

    def start_listener(self, name: str, command: list[str], cwd: Path, host: str, port: int) -> None:
        """Start a program, and return when it accepts connections."""
        if name in self.processes:
            self.processes[name].stop()
        if not is_free(host, port):
            raise RunError(f"port {port} is in use by another program. Stop it, or choose a free --port.")
        process = self.start(name, command, cwd)
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(host, port):
            if not process.alive or time.monotonic() > deadline:
                raise RunError(f"{name} did not start: {process.last_words()}. Its log is '{process.log}'.")
            time.sleep(0.1)

    def start_superexec(self) -> None:
        it = self.deployment
        self.start("superexec", flower.superexec(str(it.server), self.superlink, it.secure), it.server)

    def register_nodes(self) -> None:
        """Register the nodes' public keys. Keys that are already registered are accepted."""
        if not self.deployment.secure:
            return
        for name in self.deployment.nodes:
            key = self.deployment.server / "node-keys" / f"{name}.pub"
            answer = self.flwr(*flower.register(str(key), name))
            if not answer["success"] and "already" not in answer["error-message"]:
                raise RunError(f"'{key}' cannot be registered: {_sentence(answer['error-message'])}")

    def start_node(self, name: str) -> None:
        folder = self.deployment.node(name)
        superlink, authority = self.superlink, "ca.crt" if self.deployment.secure else None
        if self.proxied:
            superlink, authority = self.start_forwarder(name), "local.crt"
        port = str(free_port())  # for its own client processes; on separate machines all nodes use the same port
        self.start(name, flower.supernode(str(folder), superlink, port, authority), folder, modules=folder)

    def start_forwarder(self, name: str) -> str:
        """Start the nginx that presents the node's certificate to the proxy. Return its address."""
        port = free_port()
        listen = address("127.0.0.1", port)
        config = nginx.forwarder(self.deployment, listen, self.entrance, f"../../nodes/{name}/")
        self.start_nginx(f"{name}.forwarder", config, "127.0.0.1", port)
        return listen

    def start_all(self) -> None:
        if self.deployment.secure:
            self.check_certificates()
        self.start_superlink()
        self.start_proxy()
        self.start_superexec()
        self.register_nodes()
        for name in self.deployment.nodes:
            self.start_node(name)

    def check_certificates(self) -> None:
        """Raise ConfigError if a certificate has expired: the nodes' own error would be hard to read."""
        it = self.deployment
        owners = {it.server / "server.crt": ("the server", "")}
        if self.proxied:
            owners |= {it.node(name) / "client.crt": (name, f" --node {name}") for name in it.nodes}
        for path, (owner, option) in owners.items():
            end = pki.valid_until(path.read_bytes())
            if end < datetime.now(UTC):
                raise ConfigError(
                    f"the certificate of {owner} expired on {end:%Y-%m-%d}. "
                    f"Create a new one with: hetero-ssfl deploy renew {it.folder}{option}"
                )

    def start(self, name: str, command: list[str], cwd: Path, modules: Path | None = None) -> Process:
        """Start a program. `modules` is a folder in which it also finds Python modules, as start.sh does."""
        if name in self.processes:
            self.processes[name].stop()
        program = [_executable(command[0]), *command[1:]]
        environment = self.environment(name)
        if modules is not None:
            known = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
            environment["PYTHONPATH"] = os.pathsep.join([*known, str(modules)])
        process = Process(program, self.logs / f"{name}.log", cwd, environment, self.watchdog)
        self.processes[name] = process
        process.start()
        return process

    def home(self, name: str) -> Path:
        """Return the FLWR_HOME of one program: Flower unpacks apps there, and `flwr` reads the SuperLink's address."""
        return self.place / "flower-homes" / name

    def environment(self, name: str) -> dict[str, str]:
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        return {**os.environ, **flower.ENVIRONMENT, "FLWR_HOME": str(self.home(name)), "PATH": path}

    def revive(self) -> list[str]:
        """Restart programs that ended, after a pause. Return messages about them."""
        notes = [process.revive() for name, process in self.processes.items() if name != "run"]
        return [note for note in notes if note]

    # --- the run ---

    def start_run(self) -> str:
        """Start or continue the run. Return its Flower run id."""
        server = self.deployment.server
        command = flower.run(str(server / "app"), str(server / "federation.toml"), str(self.run_dir))
        answer = self.flwr(*command, "--format", "json")
        if not answer["success"]:
            raise RunError(f"the run did not start: {_sentence(answer['error-message'])}")
        self.follow_log(answer["run-id"])
        return str(answer["run-id"])

    def follow_log(self, run_id: str) -> None:
        """Start `flwr log`, which fetches the server's log from Flower and ends when the run ends."""
        self.start("run", ["flwr", "log", run_id, flower.CONNECTION], self.place)

    def run_status(self, run_id: str) -> tuple[str, str]:
        """Return Flower's status of the run, such as "running" or "finished:failed", and the reason."""
        answer = self.flwr("list", flower.CONNECTION, "--run-id", run_id, "--format", "json")
        if not answer["success"]:
            return "unknown", _sentence(answer["error-message"])
        return answer["runs"][0]["status"], answer["runs"][0]["status-details"]

    def online(self) -> int:
        """Return the number of nodes that the SuperLink lists as online."""
        answer = self.flwr("supernode", "list", flower.CONNECTION, "--format", "json")
        return sum(node["status"] == "online" for node in answer.get("nodes", []))

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run Flower's command `flwr` and return its JSON output."""
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
        """Start all programs and run to the end. Does nothing if the run is finished."""
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
                raise RunError(f"the server app failed {failures} times in a row: {reason}. Its log is '{log}'.")
            watch.warn(f"the server app failed ({reason}) and will be restarted, see {log}")
            self.attend(watch, PAUSE)

    def run_once(self, watch: RunWatch) -> str:
        """Run `flwr run` and wait until the run ends. Return why it ended."""
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
            if log_ended:  # because the run or the SuperLink ended
                status, reason = self.run_status(run_id)
                if status.startswith("finished"):
                    return reason or status
                self.attend(watch, PAUSE)
                self.follow_log(run_id)

    def attend(self, watch: RunWatch, seconds: float = TICK) -> None:
        """For some seconds, show new events and restart programs that ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for note in self.revive():
                watch.warn(note)
            watch.look()
            time.sleep(TICK)

    def await_end(self) -> None:
        """Wait for the server app, which still signs off from Flower after it has written its results."""
        deadline = time.monotonic() + END_TIMEOUT
        while self.processes["run"].alive and time.monotonic() < deadline:
            time.sleep(TICK)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _executable(name: str) -> str:
    """Find nginx, or one of Flower's programs, which are installed beside the Python executable."""
    found = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if name == "nginx":
        found = nginx.program()
    if found is None:
        raise RunError(f"there is no program '{name}' beside '{sys.executable}'. Install flwr in this environment.")
    return found


def _sentence(text: str) -> str:
    """Return the error in the output of `flwr`, without its progress messages."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Using SuperLink", "Listing"))).rstrip(".")
