"""status.json: what a run is doing right now, for people and programs that look on from outside."""

import time
from typing import Any

from ..runs import RunFolder
from .nodes import Event, Listener

EVERY = 1.0  # seconds between two writes at most, but for what must not be missed


def reporting(folder: RunFolder, listen: Listener) -> Listener:
    """Pass every event on, and keep the run's status on disk up to date."""
    status: dict[str, Any] = {"phase": "starting", "round": 0, "nodes": {}}
    written = 0.0

    def report(event: Event) -> None:
        nonlocal written
        urgent = _note(status, event)
        if urgent or time.monotonic() - written > EVERY:
            folder.write_json("status.json", {**status, "updated": time.time()})
            written = time.monotonic()
        listen(event)

    return report


def _note(status: dict[str, Any], event: Event) -> bool:
    """Whether it must be written at once."""
    kind, nodes = event["event"], status["nodes"]
    if kind == "joined":
        nodes[event["name"]] = {
            "encoder": event.get("encoder"),
            "examples": event.get("examples"),
            "state": "connected",
        }
    elif kind == "start":
        status |= {"round": event["round"], "rounds": event["rounds"]}
    elif kind == "begin":
        status |= {"phase": "training", "round": event["round"], "waiting_for": list(event["clients"])}
        for name in event["clients"]:
            nodes.setdefault(name, {})["state"] = "training"
    elif kind == "evaluating":
        status |= {"phase": "evaluating", "waiting_for": sorted(nodes)}
    elif kind == "answered":
        if event["client"] in status.get("waiting_for", []):
            status["waiting_for"].remove(event["client"])
        seen = {"state": "waiting", "last_seen": time.time(), "last_round": event["round"]}
        nodes[event["client"]] = {**nodes.get(event["client"], {}), **seen}
    elif kind == "left":
        nodes.setdefault(event["client"], {})["state"] = "away"
    elif kind == "warning":
        status["last_warning"] = event["text"]
    elif kind == "finished":
        status |= {"phase": "finished", "waiting_for": []}
    return kind in ("begin", "finished")
