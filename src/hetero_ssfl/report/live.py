"""What a live page shows: the sections of a report, and above them what each run and client is doing now.

`LiveRuns` reads the run folders and nothing else, so that a run need not know that it is watched, and the page of a
resumed run is that of one that was never interrupted. Only new lines of events.jsonl are parsed.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from ..errors import HeteroSSFLError
from ..runs.events import ClientTrained, Evaluated, Event, KernelsSeen, RoundDone, from_lines
from ..runs.folder import RunFolder
from . import gallery, record, sections
from .blocks import TEXT, Rows, Section
from .page import fill_block
from .reported_run import MAX_ROWS, ReportedRun, metric_of, read_runs
from .status import ENDED, read_status
from .tables import duration, number, of_metric, volume, without_folders

NEWEST = 10  # rounds in the table of rounds
MAX_WARNINGS = 12  # of each run
MAX_SHARE = 0.01  # of the machine's time may be spent on showing a run that is training
PAUSE = 0.5  # seconds between two looks at the folders
METRICS = {
    "loss_ssl": "own loss",
    "loss_alignment": "alignment",
    "spread": "spread",
    "effective_rank": "rank",
}

Status = dict[str, Any]


class LiveRuns:
    """The parts of the page as HTML, by name. `refresh` makes new ones; the page keeps the last if it fails."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        for path in paths:
            RunFolder.open(path)
        self.parts: dict[str, str] = {}
        self.runs: list[ReportedRun] = []
        self.statuses: list[Status] = []
        self._read: dict[Path, tuple[bytes, list[Event]]] = {}
        self._stamp: object = None
        self._drawn: object = None
        self._next_look = self._next_drawing = 0.0
        self._lock = threading.Lock()

    def refresh(self, draw: bool = True, at_once: bool = False) -> None:
        with self._lock:
            if at_once or time.monotonic() > self._next_look:
                self._refresh(draw, at_once)

    def _refresh(self, draw: bool, at_once: bool) -> None:
        """Look at the folders, and make the parts that have changed."""
        begun = time.process_time()
        try:
            if (stamp := [self._changed(path) for path in self.paths]) != self._stamp:
                self.runs, self._stamp = read_runs(self.paths, self._events), stamp
            self.statuses = [read_status(run.folder, run.events) for run in self.runs]
            self.parts |= {"trouble": "", **self._show(now(self.runs, self.statuses))}
            drawn = stamp, [status["phase"] in ENDED for status in self.statuses]
            if draw and drawn != self._drawn and (at_once or time.monotonic() > self._next_drawing or all(drawn[1])):
                begun_drawing = time.process_time()
                self._draw()
                self._drawn, self._next_drawing = drawn, self._pause(begun_drawing)
        except (HeteroSSFLError, OSError) as error:  # a file is being replaced, or is damaged
            self.parts["trouble"] = self._show([Section("trouble", "This page cannot be updated", str(error))])[
                "trouble"
            ]
        self._next_look = max(time.monotonic() + PAUSE, self._pause(begun))

    def _pause(self, begun: float) -> float:
        """Return when the work that has begun at this CPU time may be repeated."""
        spent = time.process_time() - begun
        return time.monotonic() + (spent / MAX_SHARE / (os.cpu_count() or 1) if self.going else 0)

    @staticmethod
    def _changed(path: Path) -> tuple[object, ...]:
        """Return what differs after each finished round. status.json is read every time."""
        names = ("events.jsonl", "server.safetensors", "results.json", "config.toml")
        stats = [(path / name).stat() if (path / name).exists() else None for name in names]
        return tuple(stat and (stat.st_mtime_ns, stat.st_size) for stat in stats)

    def _events(self, folder: RunFolder) -> list[Event]:
        lines, (known, events) = folder.event_lines(), self._read.get(folder.path, (b"", []))
        if not lines.startswith(known):  # the run went back a round
            known, events = b"", []
        self._read[folder.path] = lines, [*events, *from_lines(lines[len(known) :].splitlines())]
        return self._read[folder.path][1]

    def _draw(self) -> None:
        runs, metric = self.runs, metric_of(self.runs)
        shown = [sections.accuracy(runs, metric), sections.curves(runs, metric)]
        shown += [gallery.similarity(runs, [], ""), gallery.spectrum(runs, [], "")]
        shown += [*record.privacy(runs), *record.studies(runs)]
        shown += [record.costs(runs), record.faults(runs), record.repeat(runs)]
        top = fill_block("top", cards=sections.key_metrics(runs, metric), summary=sections.summary(runs, metric))
        kept = {name: html for name, html in self.parts.items() if name in ("trouble", "warnings", "clients", "newest")}
        self.parts = {**kept, "top": top, **self._show(shown)}

    @staticmethod
    def _show(shown: Sequence[Section]) -> dict[str, str]:
        return {section.anchor: fill_block("section", section=section) for section in shown}

    @property
    def state(self) -> str:
        if not self.statuses:
            return "reading the run folder …"
        return "live" if self.going else "no run is going on"

    @property
    def going(self) -> bool:
        """Whether one of the runs is going on."""
        return any(status["phase"] not in ENDED for status in self.statuses)

    @property
    def finished(self) -> bool:
        return all(status["phase"] == "finished" for status in self.statuses)

    @property
    def title(self) -> str:
        if not self.runs:
            return "hetero-ssfl"
        return f"{self.runs[-1].config.name}: {', '.join(run.label for run in self.runs)}"


def now(runs: Sequence[ReportedRun], statuses: Sequence[Status]) -> list[Section]:
    """Return the sections that change all the time: warnings first, then clients and the newest rounds."""
    metric = metric_of(runs)
    return [warnings(runs, statuses), clients(runs, statuses, metric), newest(runs, metric)]


def warnings(runs: Sequence[ReportedRun], statuses: Sequence[Status]) -> Section:
    rows = []
    for run, status in zip(runs, statuses, strict=True):
        faults = run.faults()[::-1]
        reasons = {why for _, _, _, why in faults}
        own = [[run.label, "now", "", status["phase"], status["summary"]]] * (status["phase"] in ("stopped", "stalled"))
        recent = [text for text in reversed(status["warnings"]) if text.partition(": ")[2] not in reasons]
        own += [[run.label, *_split(text)] for text in recent]
        own += [[run.label, str(at), who, what, why] for at, who, what, why in faults]
        rows += [[*row[:4], without_folders(row[4][: record.MAX_REASON])] for row in own[:MAX_WARNINGS]]
    if not rows:
        return Section("warnings", "Warnings", "None: every reply was used, and no client is away.")
    intro = f"The newest first, at most {MAX_WARNINGS} of each run."
    return Section(
        "warnings", "Warnings", intro, [Rows("Warnings", ["run", "round", "who", "what", "why"], rows, TEXT)]
    )


def _split(text: str) -> list[str]:
    """Return round, nobody, "warning" and text of a warning in status.json."""
    at, _, words = text.partition(": ")
    return [at.removeprefix("round "), "", "warning", words]


def clients(runs: Sequence[ReportedRun], statuses: Sequence[Status], metric: str | None) -> Section:
    blocks = [_table_of_clients(run, status, metric) for run, status in zip(runs, statuses, strict=True)]
    summaries = [f"{run.label}: {status['summary']}." for run, status in zip(runs, statuses, strict=True)]
    return Section("clients", "Now", without_folders(" ".join(summaries)), blocks)


def _table_of_clients(run: ReportedRun, status: Status, metric: str | None) -> Rows:
    nodes: dict[str, Any] = status["nodes"]
    names = sorted(nodes.keys() | set(run.clients))
    last = {event.client: event for event in run.events_of(ClientTrained)}
    left_out = {name for name, event in last.items() if event.excluded}
    urgent = [n for n in names if nodes.get(n, {}).get("state") == "away" or n in left_out]
    waiting = [name for name in names if name in set(status["waiting_for"]) - set(urgent)]
    first = dict.fromkeys([*urgent, *waiting, *names]) if len(names) > MAX_ROWS else names
    scores, likeness = ([{}, *_accuracies(run, metric).values()])[-1], _likeness(run)
    rows = []
    for name in list(first)[:MAX_ROWS]:
        node, event = nodes.get(name, {}), last.get(name)
        metrics = event.figures if event else {}
        rows.append(
            [
                name,
                _state(name, node, status, left_out),
                *[f"{metrics[key]:.3g}" if key in metrics else "-" for key in METRICS],
                f"{likeness[name]:.2f}" if name in likeness else "-",
                number(scores.get(name)),
                f"{node.get('replies', 0)}" + (f", {node['excluded']} left out" if node.get("excluded") else ""),
                volume(node.get("bytes", 0)),
                run.encoder(name) or "-",
            ]
        )
    more = f", {MAX_ROWS} of {len(names)}: first those that are away, left out or at work" * (len(names) > MAX_ROWS)
    head = ["client", "now", *METRICS.values(), "CKA with others", "validation %", "replies", "bytes", "encoder"]
    return Rows(f"Clients of {run.label}{more}", head, rows, range(2, len(head) - 1))


def _state(name: str, node: Mapping[str, Any], status: Status, left_out: set[str]) -> str:
    """Return where a client is in its round, and how long it will take if that is known."""
    state = str(node.get("state") or "-")
    if state != "training" or name not in status["waiting_for"]:
        return "left out of its last round" if name in left_out and state in ("waiting", "-") else state
    passed, done, before = time.time() - (status["began"] or time.time()), node.get("done"), node.get("seconds")
    text = f"training, {done:.0%}" if done is not None else f"training for {duration(passed)}"
    if done is None and any("done" in other for other in status["nodes"].values()):
        return f"waiting for a worker for {duration(passed)}"  # on this machine, those that train say how far they are
    if before and before < passed:
        return f"{text}, longer than its last {duration(before)}"
    left = before - passed if before else passed / done - passed if done else None
    return text if left is None else f"{text}, about {duration(left)} left"


def _accuracies(run: ReportedRun, metric: str | None) -> dict[int, dict[str, float]]:
    """Return the validation accuracies of each round."""
    seen = [event for event in run.events_of(Evaluated) if event.split == "validation" and metric]
    return {event.round: of_metric(event.clients, str(metric)) for event in seen}


def _likeness(run: ReportedRun) -> dict[str, float]:
    """Return each client's mean CKA with the others in the newest round that has them."""
    seen = [event for event in run.events_of(KernelsSeen) if event.clients and event.mutual_cka]
    names, matrix = (seen[-1].clients or [], seen[-1].mutual_cka or []) if seen else ([], [])
    if len(names) < 2 or [len(row) for row in matrix] != [len(names)] * len(names):
        return {}
    return {name: (sum(row) - row[k]) / (len(row) - 1) for k, (name, row) in enumerate(zip(names, matrix, strict=True))}


def newest(runs: Sequence[ReportedRun], metric: str | None) -> Section:
    blocks = [_table_of_rounds(run, metric) for run in runs]
    return Section("newest", "Newest rounds", "Means over the clients of a round.", blocks)


def _table_of_rounds(run: ReportedRun, metric: str | None) -> Rows:
    rounds = run.events_of(RoundDone)[: -NEWEST - 1 : -1]
    scores = _accuracies(run, metric)
    sent = {event.round: 0 for event in rounds}
    left_out = dict(sent)
    for event in run.events_of(ClientTrained):
        if event.round in sent:
            sent[event.round] += (event.bytes_up or 0) + event.bytes_down
            left_out[event.round] += event.excluded is not None
    rows = [
        [
            str(event.round),
            *[f"{event.figures[key]:.3g}" if key in event.figures else "-" for key in METRICS],
            number(mean(own.values())) if (own := scores.get(event.round)) else "-",
            str(event.replies),
            str(left_out[event.round]),
            str(len(event.away or ())),
            volume(sent[event.round]),
            f"{event.seconds:.1f} s",
        ]
        for event in rounds
    ]
    head = ["round", *METRICS.values(), "validation %", "replies", "left out", "away", "bytes", "time"]
    return Rows(f"{run.label}, the newest round first", head, rows)
