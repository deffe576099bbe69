"""Starting, watching, restarting and ending programs, without Flower."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.waiting import runs, until
from hetero_ssfl.deploy import processes
from hetero_ssfl.deploy.processes import Process, Watchdog
from hetero_ssfl.deploy.watch import RunWatch
from hetero_ssfl.runs.events import Event, Started, Warned
from hetero_ssfl.runs.files import write_json

CHILDREN = "sleep 300 & echo $!; wait"  # a program with a child, whose id it prints


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    it = Watchdog()
    yield it
    it.close()


def process(folder: Path, watchdog: Watchdog, script: str) -> Process:
    return Process(["sh", "-c", script], folder / "it.log", folder, os.environ, watchdog)


def test_children_end_with_their_program(tmp_path: Path, watchdog: Watchdog) -> None:
    it = process(tmp_path, watchdog, CHILDREN)
    it.start()
    until(lambda: it.log.read_text())
    grandchild = int(it.log.read_text())
    assert runs(grandchild)
    it.stop()
    assert not it.alive
    until(lambda: not runs(grandchild))
    assert it.revive() is None, "what was told to stop is not started again"


def test_a_program_that_ignores_sigterm_is_killed(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.2)
    it = process(tmp_path, watchdog, "trap '' TERM; echo ready; while true; do sleep 1; done")
    it.start()
    until(lambda: it.log.read_text())
    it.stop()
    assert not it.alive


def test_a_program_that_ends_is_restarted_after_a_pause(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PAUSES", (0.0, 0.0))
    it = process(tmp_path, watchdog, "echo 'ERROR : Exit Code: 305'; echo no; echo connection; exit 1")
    it.start()
    notes = []
    for _ in range(3):
        until(lambda: not it.alive)
        notes.append(it.revive())  # detects the end
        it.revive()  # restarts
    until(lambda: not it.alive)
    it.stop()
    assert it.log.read_text().count("Exit Code") == 4
    assert notes[0] is not None
    assert "it ended (no connection) and restarts in 0 s" in notes[0]
    assert notes[2] is None, "the same news is not told for ever"


def test_a_crash_is_detected_and_cleaned_up(tmp_path: Path, watchdog: Watchdog) -> None:
    it = process(tmp_path, watchdog, CHILDREN)
    it.start()
    until(lambda: it.log.read_text())
    os.kill(it.pid, signal.SIGKILL)  # the program alone, not its child
    until(lambda: not it.alive)
    note = it.revive()
    assert note is not None
    assert "signal 9" in note
    until(lambda: not runs(int(it.log.read_text())))
    it.stop()


def test_everything_ends_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, time; from pathlib import Path; from hetero_ssfl.deploy.processes import Process, Watchdog\n"
        f"it = Process(['sh', '-c', {CHILDREN!r}], Path('it.log'), Path('.'), os.environ, Watchdog())\n"
        "it.start(); print(it.pid, flush=True); time.sleep(300)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    child = int(supervisor.stdout.readline())
    until(lambda: (tmp_path / "it.log").read_text())
    grandchild = int((tmp_path / "it.log").read_text())
    assert runs(child)
    assert runs(grandchild)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not runs(child) and not runs(grandchild))


class Heard(list[Event]):
    """Replaces a view."""

    rounds = None

    def __call__(self, event: Event) -> None:
        self.append(event)


def test_new_events_of_a_run_folder_are_shown(tmp_path: Path) -> None:
    events, view = tmp_path / "events.jsonl", Heard()
    events.write_text('{"event": "round", "round": 1}\n')
    watch = RunWatch(tmp_path, view)  # type: ignore[arg-type]
    watch.look()
    assert (watch.round, view) == (1, []), "what was there before is not news"
    with events.open("a") as file:
        file.write(
            '{"event": "client", "client": "node-1", "round": 2, "excluded": "node-1 is late"}\n{"event": "round", "ro'
        )
    watch.look()
    assert view == [Warned(2, "node-1 is late")]
    events.write_text('{"event": "round", "round": 1}\n{"event": "round", "round": 2}\n')  # a server continued
    watch.look()
    assert (watch.round, watch.finished) == (2, False)
    write_json(tmp_path / "status.json", {"phase": "training", "round": 3, "rounds": 9})
    (tmp_path / "results.json").write_text("{}")
    watch.look()
    assert view[-1] == Started(2, 9)
    assert watch.finished
