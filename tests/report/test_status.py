"""`hetero-ssfl status` tells a run that works from one that is finished, has died, or is silent."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetero_ssfl.cli import app
from hetero_ssfl.config import load_config
from hetero_ssfl.federation.server.status_file import reporting
from hetero_ssfl.report.status import read_status
from hetero_ssfl.runs.events import ClientTrained, RoundBegun, RoundDone, Started
from hetero_ssfl.runs.folder import RunFolder

LIMIT = 900.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of which one round is done, and the second has begun."""
    config = load_config("smoke", ["rounds=4", f"engine.round_timeout={LIMIT}"])
    made = RunFolder.create(tmp_path / "run", config, lambda run: run.write_json("facts.json", {"site": "simulated"}))
    made.append_events([ClientTrained(1, "client-000", 5, 7, 3), RoundDone(1, 1, 2.0)])
    return made


def report(folder: RunFolder, age: float = 0.0) -> None:
    """Write the status as the server does, `age` seconds ago."""
    listen = reporting(folder, lambda _: None)
    listen(Started(1, 4))
    listen(RoundBegun(2, ("client-000",)))
    folder.write_json("status.json", {**folder.read_json("status.json"), "updated": time.time() - age})


def state(found: dict[str, Any]) -> str:
    return str(found["nodes"]["client-000"]["state"])


def test_a_run_that_works_is_waiting_for_its_clients(folder: RunFolder) -> None:
    with folder.lock():
        report(folder)
        found = read_status(folder)
    assert (found["phase"], state(found), found["resume"]) == ("training", "training", None)
    assert found["seconds_left"] == 6.0
    assert "waiting for client-000" in found["summary"]


def test_a_dead_run_is_named_with_its_last_progress_and_how_to_continue(folder: RunFolder) -> None:
    report(folder, age=7200)
    found = read_status(folder)
    assert (found["phase"], state(found), found["seconds_left"]) == ("stopped", "stopped", None)
    assert found["resume"] == f"hetero-ssfl run --resume {folder.path}"
    shown = CliRunner().invoke(app, ["status", str(folder.path)]).stdout.splitlines()[0]
    assert shown.startswith(
        "stopped: 1 of 4 rounds done; no process of this machine works on it. Last progress 2.0 h ago"
    )
    assert shown.endswith(f"UTC). Continue with: hetero-ssfl run --resume {folder.path}")


def test_a_silent_server_is_named_after_the_longest_round(folder: RunFolder) -> None:
    with folder.lock():
        report(folder, age=LIMIT)
        assert read_status(folder)["phase"] == "training", "nodes may take that long"
        report(folder, age=LIMIT + 301)
        found = read_status(folder)
    assert found["phase"] == "stalled"
    assert f"silent for longer than engine.round_timeout = {LIMIT:g} s. Last progress 20 min ago" in found["summary"]


def test_a_finished_run_shows_its_result_whatever_the_last_status_says(folder: RunFolder) -> None:
    report(folder)
    folder.write_json("results.json", {"clients": {}, "mean": {"linear_all": 81.26}, "untrained": {}})
    found = read_status(folder)
    assert (found["phase"], state(found), found["waiting_for"]) == ("finished", "finished", [])
    assert found["summary"] == "finished: 1 of 4 rounds done, linear_all 81.3"


def test_a_run_without_a_server_so_far_is_not_started(folder: RunFolder) -> None:
    assert read_status(folder)["phase"] == "not started"


def test_a_server_that_starts_again_is_not_silent(folder: RunFolder) -> None:
    report(folder, age=1e6)
    with folder.lock():
        assert read_status(folder)["phase"] == "stalled"
        reporting(folder, lambda _: None)
        assert read_status(folder)["phase"] == "starting"


def test_looking_writes_nothing_and_sees_a_lock_of_another_process(folder: RunFolder) -> None:
    assert not folder.is_busy()
    assert not (folder.path / ".lock").exists()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(folder.path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        other.stdout.readline()
        assert folder.is_busy()
        other.kill()
    assert not folder.is_busy(), "the system releases the lock of a process that was killed"


def test_check_tells_a_run_that_works_from_one_that_is_stuck_or_dead(folder: RunFolder) -> None:
    def code(*options: str) -> int:
        return CliRunner().invoke(app, ["status", str(folder.path), *options]).exit_code

    with folder.lock():
        report(folder, age=600)
        assert [code(), code("--check"), code("--check", "--max-silence", "300")] == [0, 0, 1]
        report(folder, age=LIMIT + 301)
        assert code("--check") == 1
    assert [code(), code("--check")] == [0, 1]
    folder.write_json("results.json", {"clients": {}, "mean": {}, "untrained": {}})
    assert code("--check") == 0
