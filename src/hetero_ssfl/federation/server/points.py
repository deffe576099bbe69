"""The numbers of a run's events as points (tag, value, round), for trackers."""

from collections.abc import Iterator

from ...runs.events import ClientTrained, Evaluated, Event, Finished, RoundDone, Started, from_lines
from ...runs.folder import RunFolder


class NewEvents:
    """The events that a run has written since the last call; from the first one when it starts or continues."""

    def __init__(self, folder: RunFolder) -> None:
        self.lines, self.read = folder.path / "events.jsonl", 0

    def after(self, event: Event) -> list[Event]:
        if isinstance(event, Finished):
            return [Evaluated(event.round, "test", event.results["clients"], event.results["mean"])]
        if isinstance(event, Started):
            self.read = 0  # the run may have gone back a round
        if not isinstance(event, Started | RoundDone) or not self.lines.exists():
            return []
        content = self.lines.read_bytes()
        written, self.read = from_lines(content[self.read :].splitlines()), len(content)
        return written


def points(event: Event) -> Iterator[tuple[str, float, int]]:
    """Yield tag, value and round of each number: FIGURE/CLIENT, SPLIT_PROBE/CLIENT (or mean) and round/FIGURE."""
    if isinstance(event, Evaluated):
        for client, scores in [*event.clients.items(), ("mean", event.mean)]:
            yield from ((f"{event.split}_{key}/{client}", value, event.round) for key, value in scores.items())
    if isinstance(event, ClientTrained | RoundDone):
        for key, value in event.to_json().items():
            if type(value) in (int, float) and key != "round":
                tag = f"{key}/{event.client}" if isinstance(event, ClientTrained) else f"round/{key}"
                yield tag, value, event.round
