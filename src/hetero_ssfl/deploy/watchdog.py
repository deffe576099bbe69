"""Kills the programs of a supervisor when the supervisor itself is killed. Runs as a separate process.

The supervisor writes lines `+GROUP` and `-GROUP` (process groups that started and ended) to its standard input.
The pipe closes when the supervisor ends for any reason; the remaining groups are then killed.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        if line[0] == "+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
