"""Workers are forked from the fork server: no process outlives the run, and the environment is current."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from helpers.commands import PROGRAM
from helpers.federations import write_images
from helpers.whole_runs import tiny
from hetero_ssfl.federation.engines.workers import WorkerGrid
from hetero_ssfl.federation.participants import Setup
from hetero_ssfl.federation.wire import pack
from hetero_ssfl.runs.folder import RunFolder


def family(pid: int) -> set[int]:
    """Return all living descendants of `pid`."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(entry)] = int(parent)
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


def assert_all_end(processes: set[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path("/proc", str(pid)).exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in processes if Path("/proc", str(pid)).exists()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130)])  # test_cli.py has SIGINT
def test_stopping_a_run_ends_all_its_processes(tmp_path: Path, number: signal.Signals, code: int) -> None:
    config, path = tmp_path / "long.toml", tmp_path / "run"
    config.write_text(tiny("rounds=1000", "evaluation.every=0").to_toml())
    command = [*PROGRAM, "run", str(config), "--run-dir", str(path)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "round 1/" in line:
            break
    descendants = family(child.pid)
    assert len(descendants) >= 3  # the fork server and two workers at least
    child.send_signal(number)
    assert child.wait(60) == code
    assert "Traceback" not in child.stderr.read()
    assert_all_end(descendants)


def test_killing_a_table_ends_the_runs_of_its_jobs(tmp_path: Path) -> None:
    table = ["paper", "table1", "--scale", "smoke", "--jobs", "2", "--root", str(tmp_path), "--set", "rounds=1000"]
    command = [*PROGRAM, *table]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.rglob("events.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    descendants = family(child.pid)
    assert len(descendants) >= 4  # two jobs with workers of their own
    child.kill()
    child.wait(60)
    assert_all_end(descendants)


@pytest.mark.parametrize("from_standard_input", [False, True])
def test_a_script_needs_no_main_guard_and_no_file(tmp_path: Path, from_standard_input: bool) -> None:
    script, config = tmp_path / "script.py", tmp_path / "tiny.toml"
    config.write_text(tiny("rounds=1", "evaluation.every=0").to_toml())
    script.write_text(
        "from pathlib import Path\nfrom hetero_ssfl import load_config, start\n"
        f"folder = start(load_config({str(config)!r}), Path({str(tmp_path / 'run')!r}), lambda _: None)\n"
        "print('finished:', folder.finished)\n"
    )
    command = [sys.executable, "-" if from_standard_input else str(script)]
    done = subprocess.run(command, input=script.read_text(), capture_output=True, text=True, timeout=120)
    assert done.stdout == "finished: True\n", done.stderr


def test_workers_get_the_current_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server may have been started long before, by another run."""
    config = tiny("data.source=cifar10", "data.side=8", "data.channels=1")
    fields: dict[str, int | str] = {"federation": "0" * 32, "round": 0, "rad": "0" * 64, "config": config.to_toml()}
    fields |= {"channels": 1, "side": 8}
    answered = []
    for images in (3, 5):
        write_images(tmp_path / str(images) / "cifar10", np.zeros((images, 8, 8), np.uint8), None)
        monkeypatch.setenv("HETERO_SSFL_DATA", str(tmp_path / str(images)))
        folder = RunFolder(tmp_path / f"run-{images}")
        fourth_image = {"client-000": torch.tensor([3])}
        Setup(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), {}, {"split": fourth_image}).write(folder, "simulated")
        folder.write_config(config)
        with WorkerGrid([{"number": 0, "run-dir": str(folder.path)}], workers=1, threads=1) as grid:
            message = grid.create_message(pack(fields=fields), "query", 2, "0")
            (reply,) = grid.send_and_receive([message], timeout=120)
        answered.append("out of" in cast(str, reply.error.reason) if reply.has_error() else "ok")
    assert answered == [True, "ok"]
