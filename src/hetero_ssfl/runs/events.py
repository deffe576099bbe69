"""The events of a run, one type per kind.

The server passes every event to its listener (the progress view, status.json, TensorBoard, a user's function). Kinds
with `saved=True` are also written to events.jsonl, one JSON object per line: `event` is the kind, and the figures
that a method reports are stored beside the other fields. Only this module reads and writes that format.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard, dataclass_transform

from pydantic import FiniteFloat, Strict, StrictInt, StrictStr, TypeAdapter, ValidationError

from ..errors import LostStateError, RunError
from .files import COPY, altered, write_atomically

Number = Annotated[FiniteFloat, Strict()]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Event:
    kind: ClassVar[str]
    saved: ClassVar[bool]

    def __init_subclass__(cls, kind: str, saved: bool = False) -> None:
        cls.kind, cls.saved = kind, saved
        dataclass(frozen=True)(cls)

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object, without empty fields and with figures beside the other fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        figures = values.pop("figures", {})
        plain = {name: value for name, value in values.items() if value is not None and value != ()}
        return {"event": self.kind, **plain, **figures}


Listener = Callable[[Event], None]


class Joined(Event, kind="joined"):
    """A participant told the server its name for the first time."""

    name: str
    encoder: str
    parameters: int = 0
    examples: int = 0


class Left(Event, kind="left"):
    """A participant is no longer connected."""

    round: int
    client: str


class Watched(Event, kind="watched"):
    """The live page of the run is open."""

    url: str


class Started(Event, kind="start"):
    """The run starts, or continues after `round`."""

    round: int
    rounds: int
    clients: tuple[str, ...] = ()


class RoundBegun(Event, kind="begin"):
    """The server is about to send the round's instructions to `clients`."""

    round: int
    clients: tuple[str, ...]


class Progressed(Event, kind="progress"):
    """A client of this machine has finished the fraction `done` of its round."""

    client: str
    done: float
    loss: float


class Answered(Event, kind="answered"):
    """A reply arrived; it has not been checked yet."""

    round: int
    client: str


class Warned(Event, kind="warning"):
    """A problem that does not end the run."""

    round: int
    text: str


class Evaluating(Event, kind="evaluating"):
    """All clients are asked to probe their encoders."""

    round: int
    split: str


class ClientTrained(Event, kind="client", saved=True):
    """One client in one round: what it sent and reported, or why its reply was excluded."""

    round: StrictInt
    client: StrictStr
    bytes_down: StrictInt = 0
    bytes_up: StrictInt | None = None
    examples: StrictInt | None = None
    excluded: StrictStr | None = None
    warning: StrictStr | None = None
    figures: Mapping[StrictStr, Number] = field(default_factory=dict)


class Evaluated(Event, kind="evaluation", saved=True):
    """Accuracies of every client's probes, and their means over clients."""

    round: StrictInt
    split: StrictStr
    clients: Mapping[StrictStr, Mapping[StrictStr, Number]]
    mean: Mapping[StrictStr, Number] = field(default_factory=dict)


class FloorProbed(Event, kind="floor", saved=True):
    """Accuracies of features that nobody trained, beside which those of trained encoders must be read."""

    split: StrictStr
    name: StrictStr
    clients: Mapping[StrictStr, Mapping[StrictStr, Number]]
    mean: Mapping[StrictStr, Number] = field(default_factory=dict)


class KernelsSeen(Event, kind="kernels", saved=True):
    """The spectrum of the mean kernel and, if the server has the clients' kernels, their mutual CKA. With learned
    weights, also each client's agreement with the others, and its weight before all are scaled to sum to 1."""

    round: StrictInt
    spectrum: list[Number] = field(default_factory=list)
    clients: list[StrictStr] | None = None
    mutual_cka: list[list[Number]] | None = None
    agreement: dict[StrictStr, Number] | None = None
    weights: dict[StrictStr, Number] | None = None


class RoundDone(Event, kind="round", saved=True):
    """A round is complete: number of replies used, absent clients, means over clients and the server's figures."""

    round: StrictInt
    replies: StrictInt = 0
    seconds: Number = 0.0
    away: list[StrictStr] | None = None
    figures: Mapping[StrictStr, Number] = field(default_factory=dict)


class Finished(Event, kind="finished"):
    """The run is finished; `results` is the content of results.json."""

    round: int
    results: Mapping[str, Any]


RESERVED = {"event", *(f.name for kind in (ClientTrained, RoundDone) for f in fields(kind))}
"""Names that a figure must not have, since figures lie beside these fields."""

KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}


@cache
def _reader(kind: str) -> TypeAdapter[Event]:
    return TypeAdapter(KINDS[kind])


def from_json(line: Mapping[str, Any]) -> Event | None:
    """Return the event of one line, or None for an unknown kind or a wrong type: a folder may come from others."""
    kind = str(line.get("event"))
    if kind not in KINDS:
        return None
    names = {f.name for f in fields(KINDS[kind])}
    figures = {name: value for name, value in line.items() if name not in names and is_number(value)}
    with suppress(ValidationError):
        return _reader(kind).validate_python({**line, "figures": figures})  # ignores other entries
    return None


def from_lines(lines: Iterable[str | bytes]) -> list[Event]:
    """Return the events of a file's lines. An incomplete last line after a crash is skipped."""
    events = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            events += [from_json(content)] if isinstance(content, Mapping) else []
    return [event for event in events if event is not None]


def to_lines(events: Iterable[Event]) -> str:
    return "".join(json.dumps(event.to_json(), allow_nan=False) + "\n" for event in events)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def never_trained(clients: Iterable[str], events: Iterable[Event]) -> list[str]:
    """Return the clients that no round selected, or whose replies were all excluded: their networks are untrained."""
    trained = {e.client for e in events if isinstance(e, ClientTrained) and e.round > 0 and e.excluded is None}
    return [client for client in clients if client not in trained]


# --- the file ---


class EventLog:
    """events.jsonl with a running digest. The commit point of a round says how long the file was, and its digest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._digest = -1, sha256()  # -1: not known yet

    def append(self, lines: bytes) -> None:
        self._look()
        try:
            with self.path.open("ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write '{self.path}': {error.strerror}. Free some disk space and resume.") from None
        self._size += len(lines)
        self._digest.update(lines)

    def mark(self) -> dict[str, Any]:
        """Return the length and digest of the file for a commit point."""
        self._look()
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def read(self, mark: Mapping[str, Any] | None) -> bytes:
        """Return the part of the file that a commit point covers, checked; the whole file without one."""
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
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
        self._size = -1

    def _look(self) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            content = self.read(None)
            self._size, self._digest = len(content), sha256(content)
