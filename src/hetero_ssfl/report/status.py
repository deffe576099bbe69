"""The status of a run for its operator: current phase, participants, failures and their reasons."""

import time
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..events import ClientTrained, RoundDone
from ..runs import RunFolder


def read_status(folder: RunFolder) -> dict[str, Any]:
    """Read the status from status.json (current) and events.jsonl (finished rounds)."""
    now: dict[str, Any] = folder.read_json("status.json") if (folder.path / "status.json").exists() else {}
    events = folder.events()
    rounds = [e for e in events if isinstance(e, RoundDone)]
    total = folder.config.rounds
    done = max((e.round for e in rounds), default=0)
    nodes: dict[str, dict[str, Any]] = {name: dict(seen) for name, seen in now.get("nodes", {}).items()}
    for event in events:
        if isinstance(event, ClientTrained):
            node = nodes.setdefault(event.client, {})
            node["replies"] = node.get("replies", 0) + (event.excluded is None)
            node["excluded"] = node.get("excluded", 0) + (event.excluded is not None)
            node["bytes"] = node.get("bytes", 0) + (event.bytes_up or 0) + event.bytes_down
            if event.excluded:
                node["last_fault"] = f"round {event.round}: {event.excluded}"
    seconds = [e.seconds for e in rounds if e.round > 0]
    left = median(seconds[-10:]) * (total - done) if seconds else None
    phase = "finished" if folder.finished else now.get("phase", "not started")
    return {
        "run": str(folder.path),
        "phase": phase,
        "round": done,
        "rounds": total,
        "seconds_left": None if folder.finished else left,
        "updated": now.get("updated"),
        "waiting_for": now.get("waiting_for", []),
        "last_warning": now.get("last_warning", ""),
        "nodes": dict(sorted(nodes.items())),
        "summary": _summary(phase, done, total, left, now),
    }


def _summary(phase: str, done: int, total: int, left: float | None, now: dict[str, Any]) -> str:
    text = f"{phase}: {done} of {total} rounds done"
    if phase == "finished":
        return text
    if left is not None:
        text += f", about {duration(left)} left"
    if now.get("waiting_for"):
        text += f"; waiting for {', '.join(now['waiting_for'])}"
    if now.get("updated"):
        text += f" (as of {duration(time.time() - now['updated'])} ago)"
    return text


def status_table(found: dict[str, Any]) -> Table:
    table = Table()
    for heading in ("participant", "encoder", "state", "replies", "left out", "MB", "last seen", "last fault"):
        table.add_column(heading, justify="right" if heading in ("replies", "left out", "MB") else "left")
    for name, node in found["nodes"].items():
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


def duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 90:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
