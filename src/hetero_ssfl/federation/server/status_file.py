"""status.json: the current status of a run, for people and programs that watch it."""

import time
from typing import Any

from ...runs.events import Answered, Evaluating, Event, Finished, Joined, Left, Listener, RoundBegun, Started, Warned
from ...runs.folder import RunFolder

EVERY = 1.0  # minimum seconds between two writes, except for urgent events


def reporting(folder: RunFolder, listen: Listener) -> Listener:
    """Wrap a listener: keep status.json up to date, and pass every event on."""
    status: dict[str, Any] = {"phase": "starting", "round": 0, "nodes": {}}
    written = 0.0
    folder.write_json("status.json", {**status, "updated": time.time()})  # an earlier process may have left one

    def report(event: Event) -> None:
        nonlocal written
        urgent = _note(status, event)
        if urgent or time.monotonic() - written > EVERY:
            folder.write_json("status.json", {**status, "updated": time.time()})
            written = time.monotonic()
        listen(event)

    return report


def _note(status: dict[str, Any], event: Event) -> bool:
    """Update the status. Return whether it must be written at once."""
    nodes: dict[str, dict[str, Any]] = status["nodes"]
    match event:
        case Joined():
            nodes[event.name] = {"encoder": event.encoder, "examples": event.examples, "state": "connected"}
        case Started():
            status |= {"round": event.round, "rounds": event.rounds}
        case RoundBegun():
            status |= {"phase": "training", "round": event.round, "waiting_for": list(event.clients)}
            for name in event.clients:
                nodes.setdefault(name, {})["state"] = "training"
        case Evaluating():
            status |= {"phase": "evaluating", "waiting_for": sorted(nodes)}
        case Answered():
            if event.client in status.get("waiting_for", []):
                status["waiting_for"].remove(event.client)
            seen = {"state": "waiting", "last_seen": time.time(), "last_round": event.round}
            nodes[event.client] = {**nodes.get(event.client, {}), **seen}
        case Left():
            nodes.setdefault(event.client, {})["state"] = "away"
        case Warned():
            status["last_warning"] = event.text
        case Finished():
            status |= {"phase": "finished", "waiting_for": []}
    return isinstance(event, RoundBegun | Finished)
