"""status.json: the current status of a run, for people and programs that watch it."""

import time
from typing import Any

from ...runs.events import (
    Answered,
    Evaluating,
    Event,
    Finished,
    Joined,
    Left,
    Listener,
    Progressed,
    RoundBegun,
    Started,
    Warned,
)
from ...runs.folder import RunFolder

EVERY = 1.0  # minimum seconds between two writes, except for urgent events
MAX_SHARE = 1 / 200  # of the time may be spent on such writes
MAX_WARNINGS, MAX_TEXT = 20, 1000  # the newest warnings of this process, and characters of each


def reporting(folder: RunFolder, listen: Listener) -> Listener:
    """Wrap a listener: keep status.json up to date, and pass every event on."""
    status: dict[str, Any] = {"phase": "starting", "round": 0, "nodes": {}}
    written, pause = 0.0, EVERY
    folder.write_json("status.json", {**status, "updated": time.time()})  # an earlier process may have left one

    def report(event: Event) -> None:
        nonlocal written, pause
        urgent, begun = _note(status, event), time.monotonic()
        if urgent or time.monotonic() - written > pause:
            folder.write_json("status.json", {**status, "updated": time.time()})
            written = time.monotonic()
            pause = max(EVERY, (written - begun) / MAX_SHARE)
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
            waiting = list(event.clients)
            status |= {"phase": "training", "round": event.round, "waiting_for": waiting, "began": time.time()}
            for name in event.clients:
                nodes.setdefault(name, {})["state"] = "training"
        case Progressed():
            nodes.setdefault(event.client, {})["done"] = event.done
        case Evaluating():
            status |= {"phase": "evaluating", "waiting_for": sorted(nodes)}
        case Answered():
            if event.client in status.get("waiting_for", []):
                status["waiting_for"].remove(event.client)
            now, known = time.time(), nodes.get(event.client, {})
            if status["phase"] == "training" and event.round > 0:
                known["seconds"] = now - status.get("began", now)
            seen = {"state": "waiting", "last_seen": now, "last_round": event.round}
            nodes[event.client] = {**{key: value for key, value in known.items() if key != "done"}, **seen}
        case Left():
            nodes.setdefault(event.client, {})["state"] = "away"
        case Warned():
            status["last_warning"] = event.text
            newest = f"round {event.round}: {event.text[:MAX_TEXT]}"
            status["warnings"] = [*status.get("warnings", []), newest][-MAX_WARNINGS:]
        case Finished():
            status |= {"phase": "finished", "waiting_for": []}
    return isinstance(event, RoundBegun | Finished)
