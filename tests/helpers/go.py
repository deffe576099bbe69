"""Start or continue a run in a given folder and print its events. The test kills this program."""

import sys
from pathlib import Path

from hetero_ssfl.config import parse_config
from hetero_ssfl.federation.start import start
from hetero_ssfl.runs.events import Event


def show(event: Event) -> None:
    print(event.kind, getattr(event, "round", ""), flush=True)


if __name__ == "__main__":
    start(parse_config(Path(sys.argv[2]).read_text()), Path(sys.argv[1]), show)
