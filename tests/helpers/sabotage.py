"""Kill programs of a real federation while it trains.

As a program, run by soak/test_sabotage.py: in every round one program is killed or the network is cut.

Usage: sabotage.py FOLDER [cut]    `cut` needs its own network namespace with only a loopback interface
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from helpers.deployments import deployed, kill_program, to_the_end
from helpers.federations import ENCODERS
from helpers.saved import lines
from hetero_ssfl.deploy.local import LocalDeployment
from hetero_ssfl.report.status import read_status

CUT = 15.0  # seconds without a network


def pids_of(program: str, root: Path) -> list[int]:
    """Return the processes of a Flower program that belong to this test, found by the folder in their environment."""
    found = []
    for line in subprocess.run(["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True).stdout.splitlines():
        pid, _, arguments = line.strip().partition(" ")
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if program in arguments and str(root).encode() in environment:
            found.append(int(pid))
    return found


class Saboteur(threading.Thread):
    """Performs each action once, in its round, while nodes are training."""

    def __init__(self, run_dir: Path, deeds: dict[int, Callable[[], None]]) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.deeds, self.done = run_dir, dict(deeds), list[int]()

    def run(self) -> None:
        while self.deeds:
            time.sleep(0.05)
            try:
                now = json.loads((self.run_dir / "status.json").read_text())
            except (OSError, ValueError):
                continue
            if now["phase"] == "training" and now["round"] in self.deeds:
                self.deeds.pop(now["round"])()
                self.done.append(now["round"])


def kill_server(root: Path) -> None:
    for pid in pids_of("flwr-serverapp", root):
        os.kill(pid, signal.SIGKILL)


def cut() -> None:
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    time.sleep(CUT)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def main(root: Path, with_cut: bool) -> None:
    patience = ["engine.round_timeout=90", "engine.join_timeout=90"]
    rounds = 3 if with_cut else 2
    it = deployed(root, f"rounds={rounds}", *patience, encoders=ENCODERS[:2])
    with LocalDeployment(it) as running:

        def kill(name: str) -> Callable[[], None]:
            return lambda: kill_program(running, name)

        def kill_node_and_server() -> None:
            kill("node-1")()
            kill_server(root)

        deeds = {1: kill_node_and_server, 2: kill("superlink"), **({3: cut} if with_cut else {})}
        saboteur = Saboteur(running.run_dir, deeds)
        saboteur.start()
        folder = to_the_end(running, seconds=400)
    assert saboteur.done == list(deeds), saboteur.done
    events = lines(folder)
    assert [e["round"] for e in events if e["event"] == "round"] == list(range(rounds + 1))
    for number in range(1, rounds + 1):  # every client of every round replied, was excluded, or was absent
        (summary,) = [e for e in events if e["event"] == "round" and e["round"] == number]
        named = {e["client"] for e in events if e["event"] == "client" and e["round"] == number}
        assert named | set(summary.get("away", [])) == set(it.nodes), (number, named)
    assert not list(root.rglob(".*.safetensors.*")), "half-written files"
    assert read_status(folder)["phase"] == "finished"


if __name__ == "__main__":
    main(Path(sys.argv[1]), "cut" in sys.argv[2:])
