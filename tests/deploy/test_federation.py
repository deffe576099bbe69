"""Real machines' worth of processes on loopback: SuperLink, SuperNodes, TLS, node keys, and whatever kills them."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nodes import ENCODERS, write_federation
from rich.console import Console

from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import Rehearsal, free_port
from hetero_ssfl.deploy.watch import RunWatch
from hetero_ssfl.deploy.writing import initialise
from hetero_ssfl.federation import start
from hetero_ssfl.progress import RunView
from hetero_ssfl.report.status import read_status
from hetero_ssfl.runs import RunFolder, load_tensors


def deployed(root: Path, *overrides: str, encoders: tuple[str, ...] = ENCODERS, images: int = 60) -> Deployment:
    """A deployment as `deploy init` writes it, with real images and settings put in."""
    federation, paths = write_federation(root / "source", encoders, images)
    it = Deployment(root / "fl", tuple(f"node-{k}" for k in range(len(encoders))), port=free_port())
    initialise(it)
    config = load_config(str(federation), overrides)
    (it.server / "federation.toml").write_text(config.to_toml())
    for name, path in zip(it.nodes, paths, strict=True):
        shutil.copytree(path.parent, it.node(name), dirs_exist_ok=True)
    return it


def to_the_end(rehearsal: Rehearsal) -> RunFolder:
    rehearsal.run(RunWatch(rehearsal.run_dir, RunView(Console(quiet=True), "test")))
    return RunFolder.open(rehearsal.run_dir)


def test_three_supernodes_with_tls_and_keys_give_the_same_numbers_as_in_process(tmp_path: Path) -> None:
    it = deployed(tmp_path)
    with Rehearsal(it) as rehearsal:
        there = to_the_end(rehearsal)
    federation, paths = write_federation(tmp_path / "here")
    config = load_config(str(federation), [f"rad.source='{tmp_path / 'source' / 'rad'}'"])
    here = start(config, tmp_path / "run", lambda _: None, paths)
    assert there.read_json("results.json") == here.read_json("results.json")
    states = [load_tensors(folder.path / "server.safetensors")[0] for folder in (here, there)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    events = there.events()
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1, 2]
    assert not [e for e in events if "excluded" in e]


def pids_of(program: str, root: Path) -> list[int]:
    """Processes of a Flower program that belong to this test: their environment names its folder."""
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
    """Does each thing once, in the round it is meant for, while nodes are at work."""

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


def test_a_run_survives_the_death_of_a_node_of_the_server_and_of_the_superlink(tmp_path: Path) -> None:
    it = deployed(
        tmp_path, "rounds=4", "engine.round_timeout=90", "engine.join_timeout=90", "evaluation.untrained=false"
    )
    with Rehearsal(it) as rehearsal:

        def kill(name: str) -> Callable[[], None]:
            return lambda: os.killpg(rehearsal.processes[name].pid, signal.SIGKILL)

        def kill_server() -> None:
            for pid in pids_of("flwr-serverapp", tmp_path):
                os.kill(pid, signal.SIGKILL)

        saboteur = Saboteur(rehearsal.run_dir, {1: kill("node-1"), 2: kill_server, 3: kill("superlink")})
        saboteur.start()
        folder = to_the_end(rehearsal)
    assert saboteur.done == [1, 2, 3]
    events = folder.events()
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1, 2, 3, 4]
    for number in range(1, 5):  # every client of every round is accounted for: it answered, was left out, or was away
        (summary,) = [e for e in events if e["event"] == "round" and e["round"] == number]
        named = {e["client"] for e in events if e["event"] == "client" and e["round"] == number}
        assert named | set(summary.get("away", [])) == set(it.nodes)
    assert not list(tmp_path.rglob(".*.safetensors.*")), "half-written files"
    assert read_status(folder)["phase"] == "finished"
