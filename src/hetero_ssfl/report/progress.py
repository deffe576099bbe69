"""Live view of a run on a terminal: rounds, training clients, losses, alignment, time left.

Without a terminal (a log file, CI) it prints one plain line per finished round, and at least one every 30 seconds.
A long run prints how long it will take as soon as the first steps of its first round have shown it.
"""

import html
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..runs.events import Evaluated, Evaluating, Event, Progressed, RoundBegun, RoundDone, Started, Warned, Watched
from ..terminal import Console
from .tables import duration

MAX_SILENCE = 30.0  # seconds without a line, where there is no terminal
MIN_MEASURED = 3.0  # seconds of training before the time of the run is estimated: a first step takes longer than others
MIN_ESTIMATE = 60.0  # seconds; nobody needs an estimate of a shorter run
SHOWN = {
    "loss_ssl": "ssl",
    "loss_alignment": "alignment",
    "spread": "spread",
    "consensus_effective_rank": "consensus rank",
}


class NotebookBar:
    """A bar in the output of a notebook's cell. Bars of rich and tqdm would need ipywidgets."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self.html, self.shown = HTML, 0.0
        self.handle = display(HTML(""), display_id=True)

    def show(self, part: float, text: str) -> None:
        """Show it at most five times a second; without text, remove it."""
        if text and time.monotonic() - self.shown < 0.2:
            return
        self.shown = time.monotonic()
        bar = f'<progress value="{part:.4f}" style="width: 16em"></progress> <small>{html.escape(text)}</small>'
        self.handle.update(self.html(bar if text else ""))


class WorkView:
    """What is shown of long work: a bar, or without a terminal a line when nothing was printed for long.

    Use as a context manager around the work. A thread prints these lines, because a slow step sends no events.
    """

    def __init__(self, console: Console, title: str, quiet: bool, max_silence: float, *notes: TextColumn) -> None:
        self.title, self.quiet, self.max_silence = escape(title), quiet, max_silence
        self.live = console.is_terminal and not quiet
        columns = (TextColumn("{task.description}"), BarColumn(), *notes, TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not self.live)
        self.cell: NotebookBar | None = None
        self.ended, self.thread = threading.Event(), threading.Thread(target=self._print_heartbeat, daemon=True)
        self.printed = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        if self.bar.console.is_jupyter and not self.quiet:
            self.cell = NotebookBar()
        elif not (self.live or self.quiet):
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()
        self.bar.stop()
        if self.cell:
            self.cell.show(1, "")

    def _print_heartbeat(self) -> None:
        while not self.ended.wait(max(0.0, self.printed + self.max_silence - time.monotonic())):
            if time.monotonic() - self.printed >= self.max_silence:
                self._say(f"{self.title}: {self.still()}")

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.bar.console.print(text, highlight=False, soft_wrap=True)
            self.printed = time.monotonic()

    def still(self) -> str:
        """Describe how far the work is."""
        return f"{self.bar.tasks[0].completed:.0%}"


class RunView(WorkView):
    """Listens to a run's events."""

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
        super().__init__(console, title, quiet, max_silence, TextColumn("{task.fields[note]}"))
        self.shorter, self.clock = shorter, clock
        self.rounds = self.bar.add_task(f"[bold]{self.title}", total=1, note="")
        self.clients: dict[str, TaskID] = {}
        self.total, self.round, self.selected, self.doing = 1, 0, 1, "starting"
        self.done: dict[str, float] = {}
        self.first_step: float | None = None
        self.estimated = False

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self.total = event.rounds
                self.bar.update(self.rounds, total=self.total, completed=event.round)
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
                self.bar.update(self.rounds, note=self.doing)
                if self.cell:
                    self.cell.show(self.round / self.total, self.doing)
            case RoundDone():
                self._on_round(event)
            case Evaluated() if event.split == "validation" and event.mean and not self.live:
                scores = "  ".join(f"{key} {value:.1f}" for key, value in event.mean.items())
                self._say(f"{self.title}: validation after round {event.round}: {scores}")
            case Watched():
                self._say(f"{self.title}: live page: {escape(event.url)}")
            case Warned():
                self._say(f"[yellow]warning[/] (round {event.round}): {escape(event.text)}")
        if isinstance(event, Started | RoundDone | Evaluated) and event.round >= self.total:
            self.doing = "finishing"

    def still(self) -> str:
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
        if self.round:
            completed = self.round - 1 + sum(self.done.values()) / self.selected
            self.bar.update(self.rounds, completed=completed)
            if self.cell:
                self.cell.show(completed / self.total, f"{self.total} rounds, {self.still()}")
        self._estimate_early()

    def _estimate_early(self) -> None:
        """Estimate the time of the run from the first steps of its first round, whose own time does not count."""
        now, done = self.clock(), sum(self.done.values()) / self.selected
        self.first_step = now if self.first_step is None else self.first_step
        passed = now - self.first_step
        if self.shorter is None or self.estimated or passed < MIN_MEASURED or not done:
            return
        self.estimated, left = True, self.total - self.round + 1
        seconds = passed / done * left
        if seconds > MIN_ESTIMATE:
            hint = f"; {self.shorter} to try" if self.round == 1 < self.total else ""
            self._say(f"{self.title}: about {duration(seconds)} for {left} round{'s' * (left > 1)}{hint}")

    def _on_round(self, event: RoundDone) -> None:
        parts = [f"{label} {event.figures[key]:.3g}" for key, label in SHOWN.items() if key in event.figures]
        if self.live:
            self.bar.update(self.rounds, completed=max(0, event.round), note="  ".join(parts))
        else:
            text = "  ".join([f"round {event.round}/{self.total}", *parts])
            self._say(f"{self.title}: {text}  ({event.seconds:.1f} s)")
        self.estimated |= event.round > 0  # a round may be shorter than the measurement
        left = self.total - event.round
        if event.round == 1 and left * event.seconds > 2 * MIN_ESTIMATE:
            time_left = duration(left * event.seconds)
            self._say(f"{self.title}: about {time_left} for the other {left} round{'s' * (left > 1)}")

    def _clear_clients(self) -> None:
        for task in self.clients.values():
            self.bar.remove_task(task)
        self.clients.clear()


@contextmanager
def progress(
    console: Console, title: str, quiet: bool = False, max_silence: float = MAX_SILENCE
) -> Iterator[Callable[[float], None]]:
    """Show how far some work is. Pass it the completed part."""
    view = WorkView(console, title, quiet, max_silence)
    task = view.bar.add_task(view.title, total=1.0)
    with view:
        yield lambda part: view.bar.update(task, completed=part)
