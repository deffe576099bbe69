"""One run as a page needs it: what is in its folder, however far it came, and how it is named and coloured."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import ConfigError, RunError
from ..methods import method_class
from ..plugins import is_trusted
from ..runs import RunFolder
from .looks import are_pictures, rad_of
from .tables import Result

STYLES = 8  # colours of the style sheet, c0 to c7; c0 is kept for the last run
ABSOLUTE_PATH = re.compile(r"(?<![\w.\-:/])/(?:[^\s/'\"]+/)+([^\s/'\"]+)")


@dataclass(frozen=True)
class Arm:
    label: str
    style: str
    result: Result
    events: list[dict[str, Any]]

    @property
    def folder(self) -> RunFolder:
        return self.result.folder

    @property
    def finished(self) -> bool:
        return self.folder.finished

    @cached_property
    def clients(self) -> list[str]:
        """Everyone who was ever heard of."""
        seen = {str(e["client"]) for e in self.of("client")} | set(self.result.results["clients"])
        return sorted(seen | set(self.result.facts.get("holdings", {})))

    @cached_property
    def models(self) -> dict[str, dict[str, Any]]:
        """Each client's encoder, as far as it is known here."""
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
        """Short, with its architecture: what a reader tells clients apart by."""
        return f"{client} {self.encoder(client).removeprefix('given:').partition('(')[0]}".strip()

    @property
    def given(self) -> bool:
        """Whether its clients were objects of a user's program."""
        return "given" in self.result.facts

    @cached_property
    def things(self) -> str:
        """What its data are: images, unless a program handed over something else."""
        try:
            return "samples" if self.given and not are_pictures(rad_of(self.folder)) else "images"
        except RunError:
            return "samples"

    @cached_property
    def reads_labels(self) -> bool | None:
        """Whether its method trains on labels; None where the method is not at hand."""
        method = self.result.config.method
        try:
            return method_class(method).needs_labels if is_trusted(method) else None
        except ConfigError:
            return None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e.get("event") == kind]

    @property
    def rounds_done(self) -> int:
        return max((e["round"] for e in self.of("round")), default=0)

    @property
    def untrained(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = self.result.results.get("untrained") or {}
        return found

    def series(self, key: str) -> dict[str, list[tuple[int, float]]]:
        """A client's figure over the rounds, for each client that has it; `validation:` for probes."""
        found: dict[str, list[tuple[int, float]]] = {}
        for number, client, figures in self._figures(key.startswith("validation:")):
            value = figures.get(key.removeprefix("validation:"))
            if is_number(value):
                found.setdefault(client, []).append((number, float(value)))
        return found

    def _figures(self, probes: bool) -> Iterator[tuple[int, str, dict[str, Any]]]:
        if probes:
            for event in self.of("evaluation"):
                if event["split"] == "validation":
                    yield from ((event["round"], client, scores) for client, scores in event["clients"].items())
        else:
            yield from ((event["round"], event["client"], event) for event in self.of("client"))

    def server_series(self, key: str) -> list[tuple[int, float]]:
        return [(e["round"], float(e[key])) for e in self.of("round") if is_number(e.get(key))]

    @property
    def client_figures(self) -> list[str]:
        """Whatever the method's clients report of themselves."""
        plain = {"event", "round", "client", "examples", "bytes_up", "bytes_down"}
        return sorted({k for e in self.of("client") for k, v in e.items() if k not in plain and is_number(v)})

    def faults(self) -> list[tuple[int, str, str, str]]:
        """(round, who, what happened, in their words)."""
        found = []
        for event in self.events:
            if "excluded" in event:
                found.append((event["round"], str(event["client"]), "left out", str(event["excluded"])))
            if "warning" in event:
                found.append((event["round"], str(event.get("client", "server")), "warning", str(event["warning"])))
            if event.get("away"):
                names = ", ".join(map(str, event["away"]))
                found.append((event["round"], names, "away", "not connected in this round"))
        absent = ", ".join(map(str, self.result.results.get("absent", [])))
        if absent:
            found.append((self.rounds_done, absent, "absent", "left before the end: its figures are unknown"))
        return found


def read_arms(paths: Sequence[Path]) -> list[Arm]:
    """Every run with a name of its own; the last one is the first colour, since it is what the page is about."""
    folders = [RunFolder.open(path) for path in paths]
    resolved = [folder.path.resolve() for folder in folders]
    for place, path in enumerate(resolved):
        if path in resolved[:place]:
            raise RunError(f"'{paths[place]}' is named twice. Name each run once.")
    all_finished = all(folder.finished for folder in folders)
    styles = [f"c{1 + k % (STYLES - 1)}" for k in range(len(folders) - 1)] + ["c0"]
    labels = short_names(resolved)
    return [
        Arm(label, style, Result.read(folder) if all_finished else _so_far(folder), folder.events())
        for label, style, folder in zip(labels, styles, folders, strict=True)
    ]


def _so_far(folder: RunFolder) -> Result:
    """The newest figures on validation images: what runs have in common of which not all are finished."""
    probes = [e for e in folder.events() if e["event"] == "evaluation" and e["split"] == "validation"]
    first = probes[0]["clients"] if probes and probes[0]["round"] == 0 else {}
    results = {"clients": probes[-1]["clients"] if probes else {}, "untrained": first, "mean": {}}
    if folder.finished:
        finished = folder.read_json("results.json")
        results |= {key: finished[key] for key in ("models", "absent") if key in finished}
    return Result(folder, folder.config, folder.read_json("facts.json"), results)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents as it takes to tell them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def without_folders(text: str) -> str:
    """Absolute paths as their last part: a page is sent to others."""
    return ABSOLUTE_PATH.sub(r"\1", text)
