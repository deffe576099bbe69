"""The metrics of runs in the text format of Prometheus, from the same data as the live page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..runs.events import ClientTrained, Evaluated, RoundDone, is_number
from .reported_run import ReportedRun

MAX_CLIENTS = 1000
Sample = tuple[str, Mapping[str, str], float]


def exposition(runs: Sequence[ReportedRun], statuses: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per metric and run or client. All are gauges: their newest values."""
    samples: dict[str, list[str]] = {}
    for run, status in zip(runs, statuses, strict=True):
        for name, labels, value in _samples(run, status):
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in {"run": run.label, **labels}.items())
            samples.setdefault(name, []).append(f"hetero_ssfl_{name}{{{text}}} {value!r}")
    lines = [line for name, own in samples.items() for line in (f"# TYPE hetero_ssfl_{name} gauge", *own)]
    return "".join(f"{line}\n" for line in lines)


def _samples(run: ReportedRun, status: Mapping[str, Any]) -> Iterator[Sample]:
    yield "round", {}, status["round"]
    yield "rounds", {}, status["rounds"]
    yield "phase", {"phase": str(status["phase"])}, 1
    if status["updated"]:
        yield "updated_timestamp_seconds", {}, status["updated"]
    for event in run.events_of(RoundDone)[-1:]:
        yield "round_seconds", {}, event.seconds
        yield from ((f"round_{key}", {}, value) for key, value in event.figures.items() if key.isidentifier())
    for seen in [event for event in run.events_of(Evaluated) if event.split == "validation"][-1:]:
        yield from (("accuracy", {"probe": key}, value) for key, value in seen.mean.items())
    last = {event.client: event for event in run.events_of(ClientTrained)}
    for name, node in list(status["nodes"].items())[:MAX_CLIENTS]:
        who = {"client": name}
        yield "client_connected", who, float(node.get("state") != "away")
        for key in ("replies", "excluded", "bytes", "last_seen"):
            if is_number(node.get(key)):
                yield f"client_{key}", who, node[key]
        figures = last[name].figures if name in last else {}
        yield from ((f"client_{key}", who, value) for key, value in figures.items() if key.isidentifier())


def _escaped(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else "?" for letter in text[:200])
    return plain.replace("\\", "\\\\").replace('"', '\\"')
