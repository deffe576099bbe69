"""Workers are forked from one process that imports for all of them: nobody outlives the run, and nothing is stale."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run import tiny

from hetero_ssfl.federation.inprocess import InProcessGrid
from hetero_ssfl.federation.records import pack

COMMAND = "from hetero_ssfl.cli import main; main()"


def family(pid: int) -> set[int]:
    """All living processes that come from `pid`."""
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_when_a_run_is_stopped_nobody_is_left(tmp_path: Path, number: signal.Signals, code: int) -> None:
    config, path = tmp_path / "long.toml", tmp_path / "run"
    config.write_text(tiny("rounds=1000", "evaluation.every=0").to_toml())
    command = [sys.executable, "-c", COMMAND, "run", str(config), "--run-dir", str(path)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "round 1/" in line:
            break
    descendants = family(child.pid)
    assert len(descendants) >= 3  # the nursery and two workers at least
    child.send_signal(number)
    assert child.wait(60) == code
    assert "Traceback" not in child.stderr.read()
    deadline = time.monotonic() + 60
    while any(Path("/proc", str(pid)).exists() for pid in descendants) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in descendants if Path("/proc", str(pid)).exists()]


def test_workers_see_the_environment_as_it_is_when_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nursery may have been opened long before, by another run."""
    for place in ("/nowhere/first", "/nowhere/second"):
        monkeypatch.setenv("HETERO_SSFL_RUN_DIR", place)
        with InProcessGrid([{"partition-id": 0}], workers=1, threads=1) as grid:
            settings = {"federation": "0" * 32, "round": 0, "rad": "0" * 64, "config": tiny().to_toml()}
            message = grid.create_message(pack(settings=settings), "query", 2, "0")
            (reply,) = grid.send_and_receive([message], timeout=120)
        assert place in reply.error.reason
