"""A run as a page needs it: the content of its folder, finished or not, with a label and a colour."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, RunError
from ..methods import Method, method_class
from ..plugins import is_trusted
from ..runs.events import (
    ClientTrained,
    Evaluated,
    Event,
    FloorProbed,
    KernelsSeen,
    RoundDone,
    is_number,
    never_trained,
)
from ..runs.folder import RunFolder
from .blocks import Block, Legend
from .plots import MARKERS
from .rad_features import are_pictures
from .tables import Result, metric_names

SUSPECT = 0.5  # a learned weight below it
STYLES = 8  # colours of the style sheet, c0 to c7; c0 is reserved for the last run
UNTRAINED = "cu"
MAX_ROWS = 100  # of a table

E = TypeVar("E", bound=Event)
Series = dict[str, list[tuple[int, float]]]
"""The values of a metric over the rounds, by client."""


@dataclass(frozen=True)
class ReportedRun(Result):
    label: str
    style: str
    events: list[Event]

    @cached_property
    def clients(self) -> list[str]:
        """All clients in the events, results or facts."""
        seen = {event.client for event in self.events_of(ClientTrained)} | set(self.results["clients"])
        return sorted(seen | set(self.facts.get("holdings", {})))

    @cached_property
    def models(self) -> dict[str, dict[str, Any]]:
        """The encoder of each client, as far as it is known."""
        models, nodes = self.results.get("models", {}), self.folder.read_status().get("nodes", {})
        return {client: models.get(client) or nodes.get(client, {}) for client in self.clients}

    def encoder(self, client: str) -> str:
        return str(self.models.get(client, {}).get("encoder") or "")

    def name(self, client: str) -> str:
        return f"{client} {self.encoder(client).removeprefix('given:').partition('(')[0]}".strip()

    @cached_property
    def things(self) -> str:
        """The word for the data: images, or samples if they are not known to be images."""
        try:
            known = self.facts["site"] != "python" or are_pictures(self.folder.rad()[0])
            return "images" if known else "samples"
        except RunError:
            return "samples"

    @cached_property
    def method(self) -> type[Method] | None:
        """The class of the method, or None if it is not available or its code is not trusted."""
        name = self.config.method
        try:
            return method_class(name) if is_trusted(name) else None
        except ConfigError:
            return None

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def rounds_done(self) -> int:
        return max((event.round for event in self.events_of(RoundDone)), default=0)

    @property
    def untrained(self) -> dict[str, dict[str, float]]:
        return self.results.get("untrained") or {}

    def client_series(self, key: str) -> Series:
        """Return what the clients report, or the bytes that they send and receive."""
        return _series(key, self._client_rounds)

    @cached_property
    def _client_rounds(self) -> list[tuple[int, dict[str, dict[str, Any]]]]:
        return [(e.round, {e.client: e.to_json()}) for e in self.events_of(ClientTrained)]

    def validation_series(self, metric: str) -> Series:
        return _series(metric, [(e.round, e.clients) for e in _validations(self.events)])

    def weight_series(self) -> Series:
        """Return the learned weights of the clients."""
        rounds = [(e.round, e.weights) for e in self.events_of(KernelsSeen) if e.weights]
        return _series("weight", [(number, {c: {"weight": w} for c, w in seen.items()}) for number, seen in rounds])

    def server_series(self, key: str) -> list[tuple[int, float]]:
        return _series(key, [(e.round, {"": e.to_json()}) for e in self.events_of(RoundDone)]).get("", [])

    def bytes_of(self, key: str) -> dict[str, float]:
        return {client: sum(count for _, count in points) for client, points in self.client_series(key).items()}

    @property
    def seconds(self) -> float:
        return sum(value for _, value in self.server_series("seconds"))

    def faults(self) -> list[tuple[int, str, str, str]]:
        """Return (round, who, what happened, reason) for each fault."""
        faults = []
        for event in self.events:
            if isinstance(event, ClientTrained):
                happened = (("left out", event.excluded), ("warning", event.warning))
                faults += [(event.round, event.client, what, why) for what, why in happened if why]
            elif isinstance(event, RoundDone) and event.away:
                faults.append((event.round, ", ".join(event.away), "away", "not connected in this round"))
        faults += self._suspects()
        if never := self.never_trained:
            why = "no round selected them, or all their replies were left out: they are not part of the means"
            faults.append((self.rounds_done, ", ".join(never), "never trained", why))
        if absent := self.results.get("absent"):
            faults.append((self.rounds_done, ", ".join(absent), "absent", "left before the end: no final metrics"))
        return faults

    def _suspects(self) -> list[tuple[int, str, str, str]]:
        """Return the clients whose learned weight is low after the last round, with the reason."""
        seen = [event for event in self.events_of(KernelsSeen) if event.weights and event.agreement]
        if not seen:
            return []
        last, suspects = seen[-1], []
        for client, weight in (last.weights or {}).items():
            if weight < SUSPECT:
                part = (last.agreement or {}).get(client, 0.0)
                why = f"its kernel agrees {part:.0%} as much with those of the others as the median client's"
                suspects.append((last.round, client, "suspect", f"{why}: its weight is {weight:.2f}"))
        return suspects


def _series(key: str, rounds: Sequence[tuple[int, Mapping[str, Mapping[str, Any]]]]) -> Series:
    series: Series = {}
    for number, clients in rounds:
        for client, values in clients.items():
            if is_number(value := values.get(key)):
                series.setdefault(client, []).append((number, float(value)))
    return series


def read_runs(
    paths: Sequence[Path], events_of: Callable[[RunFolder], list[Event]] = RunFolder.events
) -> list[ReportedRun]:
    """Read runs and give each a unique label. The last run, which the page is about, gets the first colour."""
    folders = [RunFolder.open(path) for path in paths]
    resolved = [folder.path.resolve() for folder in folders]
    if twice := [path for path in resolved if resolved.count(path) > 1]:
        raise RunError(f"'{twice[0]}' is listed twice. List each run once.")
    all_finished = all(folder.finished for folder in folders)
    styles = [*(f"c{1 + k % (STYLES - 1)}" for k in range(len(folders) - 1)), "c0"]
    runs = []
    for folder, label, style in zip(folders, short_names(resolved), styles, strict=True):
        config, facts, events = folder.read_config(), folder.read_json("facts.json"), events_of(folder)
        results = folder.read_json("results.json") if all_finished else _so_far(folder, events)
        runs.append(ReportedRun(folder, config, facts, results, label, style, events))
    return runs


def _so_far(folder: RunFolder, events: Sequence[Event]) -> dict[str, Any]:
    """Return the newest validation results, for comparing runs that are not all finished."""
    finished, probes = folder.read_json("results.json") if folder.finished else {}, _validations(events)
    results: dict[str, Any] = {key: finished[key] for key in ("models", "absent") if key in finished}
    results |= {"clients": {}, "untrained": {}, "mean": {}}
    if probes:
        results["clients"] = probes[-1].clients
        results["untrained"] = probes[0].clients if probes[0].round == 0 else {}
    floors = {e.name: e.clients for e in events if isinstance(e, FloorProbed) and e.split == "validation"}
    results |= {"floors": floors} if floors else {}
    if probes and probes[-1].round > 0:
        results["never_trained"] = never_trained(probes[-1].clients, events)
    return results


def _validations(events: Sequence[Event]) -> list[Evaluated]:
    return [event for event in events if isinstance(event, Evaluated) and event.split == "validation"]


def metric_of(runs: Sequence[ReportedRun]) -> str | None:
    """Return the accuracy that the page shows: that of the linear probe on all classes, if there is one."""
    known = sorted({name for run in runs for name in metric_names(run)})
    return "linear_all" if "linear_all" in known else next(iter(known), None)


def legend(runs: Sequence[ReportedRun], untrained: bool = False) -> list[Block]:
    entries = [(UNTRAINED, "untrained")] * untrained + [(run.style, run.label) for run in runs]
    marks = {"o": "●", "s": "■", "^": "▲", "D": "◆"}
    return [Legend([(s, marks[MARKERS[s]], label) for s, label in entries])] if len(entries) > 1 else []


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return folder names with as many parents as needed to make them unique."""
    depths = range(1, max(len(path.parts) for path in paths) + 1)
    choices = (["/".join(path.parts[-depth:]) for path in paths] for depth in depths)
    return next(names for names in choices if len(set(names)) == len(names))
