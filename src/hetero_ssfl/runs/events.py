"""The events of a run, one type per kind.

The server passes every event to its listener (the progress view, status.json, TensorBoard, a user's function). Kinds
with `saved = True` are also written to events.jsonl, one JSON object per line: `event` is the kind, and the figures
that a method reports are stored beside the other fields. Only this module reads and writes that format.

`python -m hetero_ssfl.runs.events` prints the table of kinds, which the site shows in docs/guide.md.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeGuard


@dataclass(frozen=True)
class Event:
    kind: ClassVar[str]
    saved: ClassVar[bool] = False

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object, without empty fields and with figures beside the other fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        figures = values.pop("figures", {})
        plain = {name: value for name, value in values.items() if value is not None and value != ()}
        return {"event": self.kind, **plain, **figures}


Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Joined(Event):
    """A participant told the server its name for the first time."""

    kind = "joined"
    name: str
    encoder: str
    parameters: int = 0
    examples: int = 0


@dataclass(frozen=True)
class Left(Event):
    """A participant is no longer connected."""

    kind = "left"
    round: int
    client: str


@dataclass(frozen=True)
class Started(Event):
    """The run starts, or continues after `round`."""

    kind = "start"
    round: int
    rounds: int
    clients: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundBegun(Event):
    """The server is about to send the round's instructions to `clients`."""

    kind = "begin"
    round: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class Progressed(Event):
    """A client of this machine has finished the fraction `done` of its round."""

    kind = "progress"
    client: str
    done: float
    loss: float


@dataclass(frozen=True)
class Answered(Event):
    """A reply arrived; it has not been checked yet."""

    kind = "answered"
    round: int
    client: str


@dataclass(frozen=True)
class Warned(Event):
    """A problem that does not end the run."""

    kind = "warning"
    round: int
    text: str


@dataclass(frozen=True)
class Evaluating(Event):
    """All clients are asked to probe their encoders."""

    kind = "evaluating"
    round: int
    split: str


@dataclass(frozen=True)
class ClientTrained(Event):
    """One client in one round: what it sent and reported, or why its reply was excluded."""

    kind = "client"
    saved = True
    round: int
    client: str
    bytes_down: int = 0
    bytes_up: int | None = None
    examples: int | None = None
    excluded: str | None = None
    warning: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated(Event):
    """Accuracies of every client's probes, and their means over clients."""

    kind = "evaluation"
    saved = True
    round: int
    split: str
    clients: Mapping[str, Mapping[str, float]]
    mean: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelsSeen(Event):
    """The spectrum of the mean kernel and, if the server has the clients' kernels, their mutual CKA."""

    kind = "kernels"
    saved = True
    round: int
    spectrum: list[float] = field(default_factory=list)
    clients: list[str] | None = None
    mutual_cka: list[list[float]] | None = None


@dataclass(frozen=True)
class RoundDone(Event):
    """A round is complete: number of replies used, absent clients, means over clients and the server's figures."""

    kind = "round"
    saved = True
    round: int
    replies: int = 0
    seconds: float = 0.0
    away: list[str] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished(Event):
    """The run is finished; `results` is the content of results.json."""

    kind = "finished"
    round: int
    results: Mapping[str, Any]


RESERVED = {"event", *(f.name for kind in (ClientTrained, RoundDone) for f in fields(kind))}
"""Names that a figure must not have, since figures lie beside these fields."""

KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}


def from_json(line: Mapping[str, Any]) -> Event | None:
    """Return the event of one line, or None for an unknown kind or a wrong type. Unknown fields are ignored."""
    kind = KINDS.get(str(line.get("event")))
    if kind is None:
        return None
    names = {f.name for f in fields(kind)}
    if "round" in names and type(line.get("round")) is not int:
        return None
    values = {name: value for name, value in line.items() if name in names}
    if not all(_fits(kind, name, value) for name, value in values.items()):
        return None
    if "figures" in names:
        values["figures"] = {k: v for k, v in line.items() if k not in names and is_number(v)}
    try:
        return kind(**values)
    except TypeError:  # a required field is missing
        return None


def _fits(kind: type[Event], name: str, value: object) -> bool:
    """Tell whether a value of a saved kind has the type of its field. A run folder may come from someone else."""
    if name in ("round", "bytes_down", "bytes_up", "examples", "replies"):
        return type(value) is int
    if name == "seconds":
        return is_number(value)
    if name in ("client", "split", "excluded", "warning"):
        return isinstance(value, str)
    if name == "clients" and kind is Evaluated:
        return isinstance(value, Mapping) and all(map(_are_figures, value.values()))
    if name == "mean":
        return _are_figures(value)
    if name == "spectrum":
        return isinstance(value, list) and all(map(is_number, value))
    if name == "mutual_cka":
        return isinstance(value, list) and all(isinstance(row, list) and all(map(is_number, row)) for row in value)
    if name in ("away", "clients"):
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    return True


def _are_figures(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(is_number, value.values()))


def from_lines(lines: Iterable[str | bytes]) -> list[Event]:
    """Return the events of a file's lines. An incomplete last line after a crash is skipped."""
    found = []
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        event = from_json(content) if isinstance(content, Mapping) else None
        found += [event] if event is not None else []
    return found


def never_trained(clients: Iterable[str], events: Iterable[Event]) -> list[str]:
    """Return the clients that no round selected, or whose replies were all excluded: their networks are untrained."""
    replies = [e for e in events if isinstance(e, ClientTrained) and e.round > 0 and e.excluded is None]
    trained = {reply.client for reply in replies}
    return [client for client in clients if client not in trained]


def to_lines(events: Iterable[Event]) -> str:
    return "".join(json.dumps(event.to_json(), allow_nan=False) + "\n" for event in events)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def table_of_kinds() -> str:
    """Return a Markdown table of all kinds, for docs/guide.md."""
    rows = ["| `event` | in events.jsonl | fields | meaning |", "|---|---|---|---|"]
    for kind in KINDS.values():
        names = ", ".join(f"`{f.name}`" for f in fields(kind))
        rows.append(f"| `{kind.kind}` | {'yes' if kind.saved else 'no'} | {names} | {kind.__doc__} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table_of_kinds())
