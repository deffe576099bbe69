"""Live view of a run on a terminal: rounds, training clients, losses, alignment, time left.

Without a terminal (a log file, CI) it prints one plain line per finished round, and at least one every 30 seconds.
A long run prints how long it will take as soon as the first steps of its first round have shown it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..runs.events import Evaluated, Evaluating, Event, Progressed, RoundBegun, RoundDone, Started, Warned
from ..terminal import Console

MAX_SILENCE = 30.0  # seconds without a line, where there is no terminal
MIN_MEASURED = 3.0  # seconds of training before the time of the run is estimated: a first step takes longer than others
MIN_ESTIMATE = 60.0  # seconds; nobody needs an estimate of a shorter run
SHOWN = {
    "loss_ssl": "ssl",
    "loss_alignment": "alignment",
    "spread": "spread",
    "consensus_effective_rank": "consensus rank",
}


class RunView:
    """Listens to a run's events. Use as a context manager around the run."""

    def __init__(
        self,
        console: Console,
        title: str,
        quiet: bool = False,
        max_silence: float = MAX_SILENCE,
        shorter: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shorter` is how to try a shorter run, such as "--rounds 1". If it is given, a long run prints its time."""
        self.console, self.title, self.quiet = console, escape(title), quiet
        self.max_silence, self.last_line, self.doing = max_silence, time.monotonic(), "starting"
        self.ended = threading.Event()
        self.watch = threading.Thread(target=self._print_heartbeat, daemon=True)
        self.live = console.is_terminal and not quiet
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.rounds: TaskID | None = None
        self.clients: dict[str, TaskID] = {}
        self.total, self.round, self.selected = 1, 0, 1
        self.done: dict[str, float] = {}
        self.shorter, self.clock = shorter, clock
        self.first_step: float | None = None
        self.estimated = False

    def __enter__(self) -> "RunView":
        self.bar.start()
        if not self.live and not self.quiet:
            self.watch.start()  # a slow step or probe sends no events
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.watch.is_alive():
            self.watch.join()
        self.bar.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self.total = event.rounds
                self.rounds = self.bar.add_task(f"[bold]{self.title}", total=self.total, completed=event.round, note="")
                if event.round:
                    self._say(f"{self.title}: continuing after round {event.round} of {self.total}")
            case RoundBegun():
                self.round, self.selected, self.done, self.doing = event.round, len(event.clients), {}, "training"
                self._clear_clients()
            case Progressed():
                self._on_progress(event)
            case Evaluating():
                self.doing = f"probing on {event.split} images"
                self._clear_clients()
                if self.rounds is not None:
                    self.bar.update(self.rounds, note=self.doing)
            case RoundDone():
                self._on_round(event)
            case Evaluated() if event.split == "validation" and event.mean and not self.live:
                scores = "  ".join(f"{key} {value:.1f}" for key, value in event.mean.items())
                self._say(f"{self.title}: validation after round {event.round}: {scores}")
            case Warned():
                self._say(f"[yellow]warning[/] (round {event.round}): {escape(event.text)}")
        if isinstance(event, Started | RoundDone | Evaluated) and event.round >= self.total:
            self.doing = "finishing"

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.bar.console.print(text, highlight=False, soft_wrap=True)
            self.last_line = time.monotonic()

    def _print_heartbeat(self) -> None:
        while not self.ended.wait(max(0.0, self.last_line + self.max_silence - time.monotonic())):
            if time.monotonic() - self.last_line >= self.max_silence:
                self._say(f"{self.title}: {self.still()}")

    def still(self) -> str:
        """Describe what the run is doing now."""
        done = self.done.copy()  # the run's own thread may change it
        if self.doing != "training" or not done:
            return f"still {self.doing}"
        clients = "  ".join(f"{name} {fraction:.0%}" for name, fraction in list(done.items())[:8])
        return f"still in round {self.round}/{self.total}: {clients}"

    def _on_progress(self, event: Progressed) -> None:
        name = event.client
        if name not in self.clients:
            self.clients[name] = self.bar.add_task(f"  {name}", total=1.0, note="")
        self.bar.update(self.clients[name], completed=event.done, note=f"loss {event.loss:.3f}")
        self.done[name] = event.done
        if self.rounds is not None and self.round:
            self.bar.update(self.rounds, completed=self.round - 1 + sum(self.done.values()) / self.selected)
        self._estimate_early()

    def _estimate_early(self) -> None:
        """Estimate the time of the run from the first steps of its first round, whose own time does not count."""
        now, done = self.clock(), sum(self.done.values()) / self.selected
        self.first_step = now if self.first_step is None else self.first_step
        passed = now - self.first_step
        if self.shorter is None or self.estimated or passed < MIN_MEASURED or not done:
            return
        self.estimated = True
        seconds = passed / done * (self.total - self.round + 1)
        if seconds > MIN_ESTIMATE:
            hint = f"; {self.shorter} to try" if self.round == 1 < self.total else ""
            self._say(f"{self.title}: about {_duration(seconds)} for {_rounds(self.total - self.round + 1)}{hint}")

    def _on_round(self, event: RoundDone) -> None:
        parts = [f"{label} {event.figures[key]:.3g}" for key, label in SHOWN.items() if key in event.figures]
        if self.rounds is not None and self.live:
            self.bar.update(self.rounds, completed=max(0, event.round), note="  ".join(parts))
        else:
            text = "  ".join([f"round {event.round}/{self.total}", *parts])
            self._say(f"{self.title}: {text}  ({event.seconds:.1f} s)")
        self.estimated |= event.round > 0  # a round may be shorter than the measurement
        left = (self.total - event.round) * event.seconds
        if event.round == 1 and left > 2 * MIN_ESTIMATE:
            self._say(f"{self.title}: about {_duration(left)} for the other {_rounds(self.total - 1)}")

    def _clear_clients(self) -> None:
        for task in self.clients.values():
            self.bar.remove_task(task)
        self.clients.clear()


@contextmanager
def progress(
    console: Console, title: str, quiet: bool = False, max_silence: float = MAX_SILENCE
) -> Iterator[Callable[[float], None]]:
    """Show how far some work is: a bar, or without a terminal a line every 30 seconds. Pass it the completed part."""
    live, ended = console.is_terminal and not quiet, threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not live) as bar:
        task = bar.add_task(escape(title), total=1.0)

        def print_lines() -> None:
            while not ended.wait(max_silence):
                console.print(f"{escape(title)}: {bar.tasks[0].completed:.0%}", highlight=False, soft_wrap=True)

        lines = threading.Thread(target=print_lines, daemon=True)
        if not live and not quiet:
            lines.start()
        try:
            yield lambda part: bar.update(task, completed=part)
        finally:
            ended.set()
            if lines.is_alive():
                lines.join()


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} minute{'s' * (minutes != 1)}"
    return f"{round(minutes / 60)} hours" if minutes < 60 * 48 else f"{round(minutes / 1440)} days"


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"
