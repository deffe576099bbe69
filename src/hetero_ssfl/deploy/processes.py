"""Start, watch and restart programs, and end them together with all their child processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PAUSES = (2.0, 5.0, 10.0)  # seconds before the first, the second and every later restart in a row
STEADY = 60.0  # seconds after which a start counts as successful
GRACE = 10.0  # seconds for an orderly shutdown


class Watchdog:
    """A small process that kills the programs we started if we are killed ourselves."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("watchdog.py")
        self.child = subprocess.Popen(
            [sys.executable, "-I", script], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def guard(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        self.child.communicate()

    def _tell(self, line: str) -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed; work continues without it
            self.child.stdin.write(line)
            self.child.stdin.flush()


class Process:
    """One program in its own process group, with its output in a log file."""

    def __init__(
        self, command: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str], watchdog: Watchdog
    ) -> None:
        self.command, self.log, self.cwd, self.environment, self.watchdog = command, log, cwd, environment, watchdog
        self.name = log.stem
        self.child: subprocess.Popen[bytes] | None = None
        self.wanted, self.swept = False, True
        self.falls, self.began, self.log_from = 0, 0.0, 0
        self.again: float | None = None

    def start(self) -> None:
        self._sweep()
        with self.log.open("ab") as log:
            self.log_from = log.tell()
            self.child = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # the SuperLink's database contains a token, and private results may follow
            )
        self.watchdog.guard(self.child.pid)
        self.wanted, self.swept = True, False
        self.began, self.again = time.monotonic(), None

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def _child(self) -> "subprocess.Popen[bytes]":
        assert self.child is not None, f"{self.name} was never started"
        return self.child

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def revive(self) -> str | None:
        """Restart the program after a pause if it ended by itself. Return a message when there is news."""
        if not self.wanted or self.alive:
            return None
        now = time.monotonic()
        if self.again is None:
            self._sweep()
            self.falls = 1 if now - self.began > STEADY else self.falls + 1
            pause = PAUSES[min(self.falls, len(PAUSES)) - 1]
            self.again = now + pause
            if self.falls <= len(PAUSES):
                return f"{self.name} ended ({self.last_words()}) and restarts in {pause:g} s, see {self.log}"
        elif now >= self.again:
            self.start()
        return None

    def ask_to_stop(self) -> None:
        """Send SIGTERM once, since a second signal would interrupt the shutdown. The program is not restarted."""
        if self.wanted and self.alive:
            self._signal(signal.SIGTERM)
        self.wanted = False

    def stop(self) -> None:
        """Ask the program to end, wait, and kill what is left of it."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(GRACE)
        self._sweep()

    def kill(self) -> None:
        """Kill the program and its children at once, like a crash of its machine."""
        if self.alive:
            self._signal(signal.SIGKILL)
            self._child.wait()

    def _sweep(self) -> None:
        """Kill the rest of the process group before a new start. Only once, since process ids are reused."""
        if not self.swept:
            self._signal(signal.SIGKILL)
            self._child.wait()
            self.watchdog.release(self.pid)
            self.swept = True

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def last_words(self) -> str:
        """Return why the program ended, according to its log: Flower's programs write the reason below an exit code."""
        if self._child.returncode is not None and self._child.returncode < 0:
            return f"signal {-self._child.returncode}"
        with self.log.open("rb") as log:
            log.seek(self.log_from)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        for number, line in enumerate(lines):
            if "Exit Code:" in line:
                return " ".join(lines[number + 1 : number + 3])
        return lines[-1] if lines else "its log is empty"
