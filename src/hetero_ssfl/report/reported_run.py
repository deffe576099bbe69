"""A run as a page needs it: the content of its folder, finished or not, with a label and a colour."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunError
from ..methods import Method, method_class
from ..plugins import is_trusted
from ..runs.events import ClientTrained, Evaluated, Event, KernelsSeen, RoundDone, is_number, never_trained
from ..runs.folder import RunFolder
from .rad_features import are_pictures, rad_of
from .tables import Result

STYLES = 8  # colours of the style sheet, c0 to c7; c0 is reserved for the last run
ABSOLUTE_PATH = re.compile(r"(?<![\w.\-:/])/(?:[^\s/'\"]+/)+([^\s/'\"]+)")


@dataclass(frozen=True)
class ReportedRun:
    label: str
    style: str
    result: Result
    events: list[Event]

    @property
    def folder(self) -> RunFolder:
        return self.result.folder

    @property
    def finished(self) -> bool:
        return self.folder.finished

    @cached_property
    def clients(self) -> list[str]:
        """All clients in the events, results or facts."""
        seen = {event.client for event in self.trained} | set(self.result.results["clients"])
        return sorted(seen | set(self.result.facts.get("holdings", {})))

    @cached_property
    def models(self) -> dict[str, dict[str, Any]]:
        """The encoder of each client, as far as it is known."""
        status = self.folder.path / "status.json"
        nodes = self.folder.read_json("status.json").get("nodes", {}) if status.exists() else {}
        found = {}
        for client in self.clients:
            try:
                found[client] = self.result.model(client)
            except RunError:  # not finished, or the model is on the client's own machine
                found[client] = nodes.get(client, {})
        return found

    def encoder(self, client: str) -> str:
        return str(self.models.get(client, {}).get("encoder") or "")

    def name(self, client: str) -> str:
        """Return the client's name and its architecture."""
        return f"{client} {self.encoder(client).removeprefix('given:').partition('(')[0]}".strip()

    @cached_property
    def things(self) -> str:
        """The word for the data: images, or samples if they are not known to be images."""
        try:
            known = self.folder.read_facts().site != "python" or are_pictures(rad_of(self.folder))
            return "images" if known else "samples"
        except RunError:
            return "samples"

    @cached_property
    def method(self) -> type[Method] | None:
        """The class of the method, or None if it is not available or its code is not trusted."""
        name = self.result.config.method
        try:
            return method_class(name) if is_trusted(name) else None
        except ConfigError:
            return None

    @cached_property
    def trained(self) -> list[ClientTrained]:
        return [event for event in self.events if isinstance(event, ClientTrained)]

    @cached_property
    def rounds(self) -> list[RoundDone]:
        return [event for event in self.events if isinstance(event, RoundDone)]

    @cached_property
    def kernels(self) -> list[KernelsSeen]:
        return [event for event in self.events if isinstance(event, KernelsSeen)]

    @property
    def rounds_done(self) -> int:
        return max((event.round for event in self.rounds), default=0)

    @property
    def untrained(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = self.result.results.get("untrained") or {}
        return found

    def series(self, key: str) -> dict[str, list[tuple[int, float]]]:
        """Return a figure over the rounds for each client that has it; prefix `validation:` for probes."""
        found: dict[str, list[tuple[int, float]]] = {}
        for number, client, figures in self._figures(key.startswith("validation:")):
            value = figures.get(key.removeprefix("validation:"))
            if is_number(value):
                found.setdefault(client, []).append((number, float(value)))
        return found

    def _figures(self, probes: bool) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        if probes:
            for event in _validations(self.events):
                yield from ((event.round, client, scores) for client, scores in event.clients.items())
        else:
            yield from ((event.round, event.client, event.to_json()) for event in self.trained)

    def server_series(self, key: str) -> list[tuple[int, float]]:
        found = [(event.round, event.to_json().get(key)) for event in self.rounds]
        return [(number, float(value)) for number, value in found if is_number(value)]

    @property
    def client_figures(self) -> list[str]:
        """Names of the figures that the clients report."""
        return sorted({key for event in self.trained for key in event.figures})

    def faults(self) -> list[tuple[int, str, str, str]]:
        """Return (round, who, what happened, reason) for each fault."""
        found = []
        for event in self.events:
            if isinstance(event, ClientTrained) and event.excluded:
                found.append((event.round, event.client, "left out", str(event.excluded)))
            if isinstance(event, ClientTrained) and event.warning:
                found.append((event.round, event.client, "warning", str(event.warning)))
            if isinstance(event, RoundDone) and event.away:
                found.append((event.round, ", ".join(map(str, event.away)), "away", "not connected in this round"))
        if self.result.never_trained:
            why = "no round selected them, or all their replies were left out: they are not part of the means"
            found.append((self.rounds_done, ", ".join(self.result.never_trained), "never trained", why))
        absent = ", ".join(map(str, self.result.results.get("absent", [])))
        if absent:
            found.append((self.rounds_done, absent, "absent", "left before the end: the final figures are unknown"))
        return found


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read runs and give each a unique label. The last run, which the page is about, gets the first colour."""
    folders = [RunFolder.open(path) for path in paths]
    resolved = [folder.path.resolve() for folder in folders]
    for place, path in enumerate(resolved):
        if path in resolved[:place]:
            raise RunError(f"'{paths[place]}' is listed twice. List each run once.")
    all_finished = all(folder.finished for folder in folders)
    styles = [f"c{1 + k % (STYLES - 1)}" for k in range(len(folders) - 1)] + ["c0"]
    labels = short_names(resolved)
    return [
        ReportedRun(label, style, Result.read(folder) if all_finished else _so_far(folder), folder.events())
        for label, style, folder in zip(labels, styles, folders, strict=True)
    ]


def _so_far(folder: RunFolder) -> Result:
    """Return the newest validation results, for comparing runs that are not all finished."""
    events = folder.events()
    probes = list(_validations(events))
    first = probes[0].clients if probes and probes[0].round == 0 else {}
    results: dict[str, Any] = {"clients": probes[-1].clients if probes else {}, "untrained": first, "mean": {}}
    if probes and probes[-1].round > 0:
        results["never_trained"] = never_trained(probes[-1].clients, events)
    if folder.finished:
        finished = folder.read_json("results.json")
        results |= {key: finished[key] for key in ("models", "absent") if key in finished}
    return Result(folder, folder.read_config(), folder.read_json("facts.json"), results)


def _validations(events: Sequence[Event]) -> Iterator[Evaluated]:
    yield from (event for event in events if isinstance(event, Evaluated) and event.split == "validation")


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return folder names with as many parents as needed to make them unique."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def without_folders(text: str) -> str:
    """Shorten absolute paths to their last part, because pages are sent to other people."""
    return ABSOLUTE_PATH.sub(r"\1", text)
