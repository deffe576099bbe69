"""Create a deployment with real images and config, and run it to the end."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from helpers.federations import ENCODERS, write_federation
from helpers.saved import lines, server_tensors
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import LocalDeployment, RunWatch, free_port
from hetero_ssfl.deploy.write import initialise
from hetero_ssfl.errors import RunError
from hetero_ssfl.federation.start import start
from hetero_ssfl.report.progress import RunView
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.terminal import Console

ONE_ROUND = ("rounds=1",)


def deployed(root: Path, *overrides: str, encoders: tuple[str, ...] = ENCODERS, images: int = 60) -> Deployment:
    """Create a deployment with `deploy init`, and add real images and settings."""
    federation, paths = write_federation(root / "source", encoders, images)
    it = Deployment(root / "fl", tuple(f"node-{k}" for k in range(len(encoders))), port=free_port())
    initialise(it)
    config = load_config(str(federation), overrides)
    (it.server / "federation.toml").write_text(config.to_toml())
    for name, path in zip(it.nodes, paths, strict=True):
        shutil.copytree(path.parent, it.node(name), dirs_exist_ok=True)
    return it


def to_the_end(running: LocalDeployment, seconds: float = 0) -> RunFolder:
    """Run to the end. For some seconds, continue a run whose server or SuperLink is killed, as an operator would."""
    running.start_all()
    watch = RunWatch(running.run_dir, RunView(Console(quiet=True), "test"))
    deadline = time.monotonic() + seconds
    while not watch.finished:
        try:
            running.run(watch)
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(5)
    return RunFolder.open(running.run_dir)


def flwr(running: LocalDeployment, *arguments: str) -> dict[str, Any]:
    """Return the answer of Flower's command `flwr`."""
    command = [str(running.deployment.server / "flwr.sh"), *arguments, "--format", "json"]
    done = subprocess.run(command, env=running.environment(), capture_output=True, text=True, timeout=120)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def kill_program(running: LocalDeployment, name: str) -> None:
    """Kill a program and its children, but not the script that starts it again."""
    for line in subprocess.run(
        ["ps", "-ww", "-A", "-o", "pid=,pgid=,args="], capture_output=True, text=True
    ).stdout.splitlines():
        pid, group, arguments = line.split(maxsplit=2)
        if int(group) == running.processes[name].pid and not (".sh" in arguments or "nginx" in arguments):
            os.kill(int(pid), signal.SIGKILL)


def assert_same_as_in_process(there: RunFolder, here: Path, encoders: tuple[str, ...]) -> None:
    """Train the same federation for ONE_ROUND in this process: every figure and tensor must agree bit for bit."""
    federation, paths = write_federation(here, encoders)
    expected = start(load_config(str(federation), ONE_ROUND), here / "run", lambda _: None, paths)
    assert there.read_json("results.json") == expected.read_json("results.json")
    states = [server_tensors(folder.path) for folder in (expected, there)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    events = lines(there)
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1]
    assert not [e for e in events if "excluded" in e]
