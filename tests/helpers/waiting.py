"""For tests with real processes: wait for a condition instead of a fixed time."""

import subprocess
import time
from collections.abc import Callable


def until(happened: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")  # a zombie has ended, but its parent has not reaped it


def group_runs(group: int) -> bool:
    lines = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True).stdout.splitlines()
    return any(int(pgid) == group and not state.startswith("Z") for pgid, state in map(str.split, lines))
