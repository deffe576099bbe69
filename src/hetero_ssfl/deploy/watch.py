"""Follow a run folder that another process writes, and pass its events to a view."""

from itertools import takewhile
from pathlib import Path
from typing import Any

from ..report.progress import RunView
from ..runs.events import ClientTrained, RoundDone, Started, Warned, from_lines
from ..runs.folder import RunFolder


class RunWatch:
    """Passes the new events of a run folder to a view."""

    def __init__(self, run_dir: Path, view: RunView) -> None:
        self.run_dir, self.view = run_dir, view
        self.seen = self._lines()
        self.status: dict[str, Any] = {}
        self.round = max((event.round for event in from_lines(self.seen) if isinstance(event, RoundDone)), default=0)

    @property
    def finished(self) -> bool:
        return (self.run_dir / "results.json").exists()

    def look(self) -> None:
        self._show_status()
        lines = self._lines()
        # A server that continues drops the events of an unfinished round, so lines that we have seen may disappear.
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.seen, lines, strict=False)))
        for event in from_lines(lines[same:]):
            if isinstance(event, RoundDone):
                self.round = max(self.round, event.round)
            if isinstance(event, ClientTrained) and event.excluded:
                event = Warned(event.round, event.excluded)
            self.view(event)
        self.seen = lines

    def _show_status(self) -> None:
        """Show what the server is doing: a bar and a note on a terminal, nothing in a log file."""
        now = RunFolder(self.run_dir).read_status()
        if now == self.status:
            return
        self.status = now
        if self.view.rounds is None and "rounds" in now:
            self.view(Started(self.round, now["rounds"]))
        if self.view.rounds is not None:
            waiting = ", ".join(now.get("waiting_for", []))
            note = f"{now['phase']}, waiting for {waiting}" if waiting else now["phase"]
            self.view.bar.update(self.view.rounds, note=note)

    def _lines(self) -> list[str]:
        text = _read(self.run_dir / "events.jsonl")
        return text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
