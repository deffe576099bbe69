"""The events of a run, one type per kind.

The server passes every event to its listener (the progress view, status.json, TensorBoard, a user's function). Kinds
with `saved = True` are also written to events.jsonl, one JSON object per line: `event` is the kind, and the figures
that a method reports are stored beside the other fields. Only this module reads and writes that format.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import FiniteFloat, Strict, StrictInt, StrictStr, TypeAdapter, ValidationError

from ..errors import LostStateError, RunError
from .files import COPY, altered, write_atomically

Number = Annotated[FiniteFloat, Strict()]


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
    round: StrictInt
    client: StrictStr
    bytes_down: StrictInt = 0
    bytes_up: StrictInt | None = None
    examples: StrictInt | None = None
    excluded: StrictStr | None = None
    warning: StrictStr | None = None
    figures: Mapping[StrictStr, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated(Event):
    """Accuracies of every client's probes, and their means over clients."""

    kind = "evaluation"
    saved = True
    round: StrictInt
    split: StrictStr
    clients: Mapping[StrictStr, Mapping[StrictStr, Number]]
    mean: Mapping[StrictStr, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class FloorProbed(Event):
    """Accuracies of features that nobody trained, beside which those of trained encoders must be read."""

    kind = "floor"
    saved = True
    split: StrictStr
    name: StrictStr
    clients: Mapping[StrictStr, Mapping[StrictStr, Number]]
    mean: Mapping[StrictStr, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelsSeen(Event):
    """The spectrum of the mean kernel and, if the server has the clients' kernels, their mutual CKA."""

    kind = "kernels"
    saved = True
    round: StrictInt
    spectrum: list[Number] = field(default_factory=list)
    clients: list[StrictStr] | None = None
    mutual_cka: list[list[Number]] | None = None


@dataclass(frozen=True)
class RoundDone(Event):
    """A round is complete: number of replies used, absent clients, means over clients and the server's figures."""

    kind = "round"
    saved = True
    round: StrictInt
    replies: StrictInt = 0
    seconds: Number = 0.0
    away: list[StrictStr] | None = None
    figures: Mapping[StrictStr, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished(Event):
    """The run is finished; `results` is the content of results.json."""

    kind = "finished"
    round: int
    results: Mapping[str, Any]


RESERVED = {"event", *(f.name for kind in (ClientTrained, RoundDone) for f in fields(kind))}
"""Names that a figure must not have, since figures lie beside these fields."""

KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}


# --- their JSON ---


@cache
def _reader(kind: str) -> tuple[TypeAdapter[Event], frozenset[str]]:
    return TypeAdapter(KINDS[kind]), frozenset(f.name for f in fields(KINDS[kind]))


def from_json(line: Mapping[str, Any]) -> Event | None:
    """Return the event of one line, or None for an unknown kind or a wrong type. Unknown fields are ignored.

    Types are checked because a run folder may come from someone else.
    """
    kind = str(line.get("event"))
    if kind not in KINDS:
        return None
    reader, names = _reader(kind)
    values = {name: value for name, value in line.items() if name in names}
    if "figures" in names:
        values["figures"] = {k: v for k, v in line.items() if k not in names and is_number(v)}
    try:
        return reader.validate_python(values)
    except ValidationError:
        return None


def from_lines(lines: Iterable[str | bytes]) -> list[Event]:
    """Return the events of a file's lines. An incomplete last line after a crash is skipped."""
    events = []
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        event = from_json(content) if isinstance(content, Mapping) else None
        events += [event] if event is not None else []
    return events


def to_lines(events: Iterable[Event]) -> str:
    return "".join(json.dumps(event.to_json(), allow_nan=False) + "\n" for event in events)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def never_trained(clients: Iterable[str], events: Iterable[Event]) -> list[str]:
    """Return the clients that no round selected, or whose replies were all excluded: their networks are untrained."""
    replies = [e for e in events if isinstance(e, ClientTrained) and e.round > 0 and e.excluded is None]
    trained = {reply.client for reply in replies}
    return [client for client in clients if client not in trained]


# --- the file ---


class EventLog:
    """events.jsonl with a running digest. The commit point of a round says how long the file was, and its digest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._digest = 0, sha256()
        self._known = False  # whether size and digest are those of the file

    def append(self, lines: bytes) -> None:
        self._look()
        try:
            with self.path.open("ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write events in '{self.path.parent}': {error.strerror}. Free some disk space and resume."
            ) from None
        self._size += len(lines)
        self._digest.update(lines)

    def mark(self) -> dict[str, Any]:
        """Return the length and digest of the file for a commit point."""
        self._look()
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def read(self, mark: Mapping[str, Any] | None) -> bytes:
        """Return the part of the file that a commit point covers, checked; the whole file without one."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise LostStateError(f"'{self.path}' cannot be read ({error.strerror}). {COPY}") from None
        if mark is None:
            return content
        committed = content[: mark["bytes"]]
        if len(committed) != mark["bytes"] or sha256(committed).hexdigest() != mark["sha256"]:
            raise LostStateError(str(altered(self.path)))
        return committed

    def keep(self, content: bytes) -> None:
        """Replace the file after a crash by what counts of it."""
        write_atomically(self.path, content)
        self._known = False

    def _look(self) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if not self._known or size != self._size:
            content = self.read(None)
            self._size, self._digest, self._known = len(content), sha256(content), True
