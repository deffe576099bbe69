"""The view of a run where there is no terminal."""

import io
import time

from hetero_ssfl.events import Evaluating, Progressed, RoundBegun, Started
from hetero_ssfl.progress import RunView
from hetero_ssfl.screen import Console


def test_a_line_is_printed_when_nothing_was_printed_for_long() -> None:
    screen = io.StringIO()
    with RunView(Console(file=screen), "long", longest_silence=0.01) as view:
        view(Started(0, 3))
        view(RoundBegun(2, ("a", "b")))
        view(Progressed("a", 0.4, 1.0))
        give_up = time.monotonic() + 60
        while screen.getvalue().count("long: still in round 2/3: a 40%") < 2 and time.monotonic() < give_up:
            time.sleep(0.01)
        view(Evaluating(2, "test"))
        assert view.still() == "still probing on test images"
    assert screen.getvalue().count("long: still in round 2/3: a 40%") >= 2
    assert not view.watch.is_alive()


def test_a_quiet_run_prints_nothing() -> None:
    screen = io.StringIO()
    with RunView(Console(file=screen), "quiet", quiet=True, longest_silence=0.0) as view:
        assert not view.watch.is_alive()
    assert screen.getvalue() == ""


def test_lines_are_at_most_half_a_minute_apart() -> None:
    assert RunView(Console(file=io.StringIO()), "run").longest_silence <= 30
