"""Kills what a supervisor started when the supervisor itself is killed. Runs as a process of its own.

The supervisor writes lines `+GROUP` and `-GROUP` (process groups that began and ended) into its standard input.
The pipe closes when the supervisor ends, however it ends; whatever groups are left then are killed.
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
