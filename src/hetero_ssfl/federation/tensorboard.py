"""A run's figures for TensorBoard, in RUN/tensorboard: the numbers of events.jsonl as points, one per round.

They are written anew whenever a run goes on: points of rounds that a crash took back do not stay, and none is missing
that a crash kept from being written.
"""

import json
import shutil
from collections.abc import Iterator
from typing import Any

from ..config import Config
from ..errors import RunError
from ..plugins import load_module
from ..runs import RunFolder
from .nodes import Event, Listener

TOGETHER = ("loss_ssl", "loss_alignment", "spread", "effective_rank", "validation_linear_all")
"""Shown as one chart with a line per client, on the page "Custom scalars"."""


def check_tracking(config: Config) -> Any:
    """The package that writes, if it is wanted; an error if it is not installed."""
    if not config.tracking.tensorboard:
        return None
    return load_module("torch.utils.tensorboard", "pip install 'hetero-ssfl[tensorboard]'")


def tracking(folder: RunFolder, listen: Listener) -> Listener:
    """Pass every event on, and write points where the settings ask for them."""
    package = check_tracking(folder.config)
    if package is None:
        return listen
    place = folder.path / "tensorboard"
    writer: Any = None
    read = 0  # bytes of events.jsonl that are written already

    def track(event: Event) -> None:
        nonlocal writer, read
        kind = event["event"]
        try:
            if kind == "start":
                shutil.rmtree(place, ignore_errors=True)
                writer = package.SummaryWriter(str(place), purge_step=0)  # a viewer that is open forgets as well
                writer.add_custom_scalars({"clients": {key: ["Multiline", [f"{key}/.*"]] for key in TOGETHER}})
            if kind in ("start", "round"):
                events, read = _new_events(folder, read)
                for written in events:
                    _write(writer, written)
            if kind == "finished":
                _write(writer, {**event, "event": "evaluation", "split": "test"})
            if kind in ("start", "round", "finished"):
                writer.flush()
            if kind == "finished":
                writer.close()
        except OSError as error:
            raise RunError(f"cannot write in '{place}': {error.strerror}. Make room there and resume.") from None
        listen(event)

    return track


def _new_events(folder: RunFolder, start: int) -> tuple[list[Event], int]:
    """What was appended to events.jsonl since `start`, and where that ends."""
    path = folder.path / "events.jsonl"
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read()
    return [json.loads(line) for line in lines.splitlines()], start + len(lines)


def _write(writer: Any, event: Event) -> None:
    for tag, value in points(event):
        writer.add_scalar(tag, value, event["round"])


def points(event: Event) -> Iterator[tuple[str, float]]:
    """Figures of an event, under FIGURE/CLIENT, SPLIT_PROBE/CLIENT (or mean) and round/FIGURE."""
    kind = event["event"]
    if kind == "evaluation":
        for client, scores in [*event["clients"].items(), ("mean", event["mean"])]:
            yield from ((f"{event['split']}_{key}/{client}", value) for key, value in scores.items())
    elif kind in ("client", "round"):
        figures = {key: value for key, value in event.items() if type(value) in (int, float) and key != "round"}
        name = event.get("client")
        yield from ((f"{key}/{name}" if name else f"round/{key}", value) for key, value in figures.items())
