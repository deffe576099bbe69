"""What the scripts of this folder share: runs on one core with a stopwatch, their results as files, Markdown tables."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_ssfl.config import Config
from hetero_ssfl.report.progress import RunView
from hetero_ssfl.runs.environment import environment
from hetero_ssfl.runs.events import Evaluated, Evaluating, Event, RoundBegun, RoundDone
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.studies.grid import Row, run_rows
from hetero_ssfl.terminal import Console

RESULTS = Path(__file__).parents[1] / "results"
MACHINE = "2 cores, no GPU"
ONE_CORE = ["engine.workers=1", "engine.threads=1"]

# --- runs ---


class StoppedBeforeTestError(Exception):
    """The run is over except for the test images."""


class Stopwatch:
    """Passes events on, keeps the CPU seconds of each round's training in the run folder, and stops before the test."""

    def __init__(self, view: RunView, folder: Path, test: bool) -> None:
        self.view, self.file, self.test = view, folder / "cpu_seconds.json", test
        self.round = 0
        self.began: float | None = None

    def __call__(self, event: Event) -> None:
        self.view(event)
        if isinstance(event, RoundBegun):
            self.round, self.began = event.round, cpu_seconds()
        elif isinstance(event, Evaluating | RoundDone) and self.began is not None:
            kept = json.loads(self.file.read_text()) if self.file.exists() else {}
            kept[str(self.round)] = round(cpu_seconds() - self.began, 1)
            self.file.write_text(json.dumps(kept))
            self.began = None
        if isinstance(event, Evaluating) and event.split == "test" and not self.test:
            raise StoppedBeforeTestError


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all processes below it; workers are children of the fork server."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


def train(config: Config, path: Path, title: str, test: bool) -> None:
    """Train in a run folder, or continue there, and count the CPU time. Without `test`, stop before the test images."""
    with suppress(StoppedBeforeTestError):
        run_rows([Row(title, config, path)], Console(), listen=lambda view, _: Stopwatch(view, path, test))


def core_minutes(path: Path) -> float:
    return round(sum(json.loads((path / "cpu_seconds.json").read_text()).values()) / 60, 2)


def provenance() -> dict[str, Any]:
    return {"commit": environment()["commit"], "machine": MACHINE}


def validation_metrics(path: Path) -> dict[str, Any]:
    """Return means over clients, on validation images; each client's linear probes stand beside them."""
    events = RunFolder(path).events()
    probes = {e.round: e for e in events if isinstance(e, Evaluated) and e.split == "validation"}
    before, after = probes[0], probes[max(probes)]
    last = [e.figures for e in events if isinstance(e, RoundDone)][-1]
    ranks = ("batch_rank", "effective_rank", "consensus_effective_rank", "spread", "loss_ssl", "loss_alignment")
    return {
        **{key: round(value, 2) for key, value in after.mean.items()},
        **{f"untrained_{key}": round(value, 2) for key, value in before.mean.items()},
        "linear_all_by_client": [round(c["linear_all"], 2) for c in after.clients.values()],
        "linear_own_by_client": [round(c["linear_own"], 2) for c in after.clients.values()],
        **{key: round(last[key], 3) for key in ranks if key in last},
        "core_minutes": core_minutes(path),
    }


# --- results and tables ---


def write_result(file: Path, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def write_to_page(page: Path, script: str, text: str) -> None:
    """Replace what a script prints on a page of the documentation, between the two marks of that script."""
    begin, end = f"<!-- printed by {script} -->", f"<!-- end of what {script} prints -->"
    content = page.read_text() if page.is_file() else ""
    if begin not in content or end not in content:
        sys.exit(f"'{page}' has no line '{begin}' or no line '{end}' to put the tables between.")
    before, after = content.split(begin)[0], content.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
