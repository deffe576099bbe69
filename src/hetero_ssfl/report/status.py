"""The status of a run for its operator: current phase, participants, failures and their reasons."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from ..runs.events import ClientTrained, Event, RoundDone
from ..runs.folder import RunFolder, resume_command
from .tables import duration

ENDED = ("finished", "stopped")
SLACK = 300.0  # seconds that the server may compute, in addition to engine.round_timeout


def read_status(
    folder: RunFolder, events: Sequence[Event] | None = None, max_silence: float | None = None
) -> dict[str, Any]:
    """Read the status from status.json (current), events.jsonl (finished rounds) and the lock of the folder."""
    now = folder.read_status()
    events = folder.events() if events is None else events
    rounds = [e for e in events if isinstance(e, RoundDone)]
    total = folder.read_config().rounds
    done = max((e.round for e in rounds), default=0)
    nodes: dict[str, dict[str, Any]] = {name: dict(seen) for name, seen in now.get("nodes", {}).items()}
    for event in (e for e in events if isinstance(e, ClientTrained)):
        node = nodes.setdefault(event.client, {})
        node["replies"] = node.get("replies", 0) + (event.excluded is None)
        node["excluded"] = node.get("excluded", 0) + (event.excluded is not None)
        node["bytes"] = node.get("bytes", 0) + (event.bytes_up or 0) + event.bytes_down
        if event.excluded:
            node["last_fault"] = f"round {event.round}: {event.excluded}"
    limit = folder.read_config().engine.round_timeout + SLACK if max_silence is None else max_silence
    phase = _phase(folder, now, limit)
    if phase in ENDED:
        for node in nodes.values():
            node["state"] = "away" if node.get("state") == "away" else phase
    seconds = [e.seconds for e in rounds if e.round > 0]
    status = {
        "run": str(folder.path),
        "phase": phase,
        "round": done,
        "rounds": total,
        "seconds_left": median(seconds[-10:]) * (total - done) if seconds and phase not in ENDED else None,
        "updated": now.get("updated"),
        "waiting_for": [] if phase in ENDED else now.get("waiting_for", []),
        "last_warning": now.get("last_warning", ""),
        "warnings": now.get("warnings", []),
        "began": now.get("began"),
        "resume": resume_command(folder.path) if phase in ("stopped", "stalled") else None,
        "nodes": dict(sorted(nodes.items())),
    }
    return {**status, "summary": _summary(folder, status, max_silence)}


def _phase(folder: RunFolder, now: dict[str, Any], max_silence: float) -> str:
    """Return the phase that the server reported, unless it has ended, or has been silent for too long."""
    if folder.finished:
        return "finished"
    if not folder.is_busy():
        return "stopped" if now else "not started"
    silence = time.time() - (now.get("updated") or time.time())
    return "stalled" if silence > max_silence else now.get("phase", "starting")


def _summary(folder: RunFolder, status: dict[str, Any], max_silence: float | None) -> str:
    phase, updated = status["phase"], status["updated"]
    text = f"{phase}: {status['round']} of {status['rounds']} rounds done"
    ago = "" if updated is None else f"{duration(time.time() - updated)} ago"
    last = f"Last progress {ago} ({datetime.fromtimestamp(updated, UTC):%Y-%m-%d %H:%M} UTC)." if updated else ""
    if phase == "finished":
        means = folder.read_json("results.json").get("mean", {})
        return text + "".join(f", {name} {value:.1f}" for name, value in sorted(means.items()))
    if phase == "stopped":
        return f"{text}; no process of this machine works on it. {last} Continue with: {status['resume']}"
    if phase == "stalled":
        default = f"engine.round_timeout = {folder.read_config().engine.round_timeout:g} s"
        limit = default if max_silence is None else f"{max_silence:g} s"
        return (
            f"{text}; its server process is there, but has been silent for longer than {limit}. {last} "
            f"Look at its log, stop it, and continue with: {status['resume']}"
        )
    if status["seconds_left"] is not None:
        text += f", about {duration(status['seconds_left'])} left"
    if status["waiting_for"]:
        text += f"; waiting for {', '.join(status['waiting_for'])}"
    return f"{text} (as of {ago})" if ago else text


def status_table(status: dict[str, Any]) -> Table:
    right = [Column(heading, justify="right") for heading in ("replies", "left out", "MB")]
    table = Table("participant", "encoder", "state", *right, "last seen", "last fault")
    for name, node in status["nodes"].items():
        table.add_row(
            name,
            escape(str(node.get("encoder") or "-")),
            node.get("state", "-"),
            str(node.get("replies", 0)),
            str(node.get("excluded", 0)),
            f"{node.get('bytes', 0) / 1e6:.1f}",
            f"{duration(time.time() - node['last_seen'])} ago" if "last_seen" in node else "-",
            escape(node.get("last_fault", "")),
        )
    return table
