"""What long work shows where there is no terminal."""

import io
import time

import pytest

from hetero_ssfl.report.progress import RunView, progress
from hetero_ssfl.runs.events import Evaluating, Progressed, RoundBegun, RoundDone, Started
from hetero_ssfl.terminal import Console


def test_a_line_is_printed_when_nothing_was_printed_for_long() -> None:
    screen = io.StringIO()
    with RunView(Console(file=screen), "long", max_silence=0.01) as view:
        view(Started(0, 3))
        view(RoundBegun(2, ("a", "b")))
        view(Progressed("a", 0.4, 1.0))
        give_up = time.monotonic() + 60
        while screen.getvalue().count("long: still in round 2/3: a 40%") < 2 and time.monotonic() < give_up:
            time.sleep(0.01)
        view(Evaluating(2, "test"))
        assert view.still() == "still probing on test images"
        view(RoundDone(2, seconds=1.0))
        assert view.still() == "still probing on test images"
        view(RoundDone(3, seconds=1.0))
        assert view.still() == "still finishing"
    assert screen.getvalue().count("long: still in round 2/3: a 40%") >= 2
    assert not view.thread.is_alive()


def test_a_quiet_run_prints_nothing() -> None:
    screen = io.StringIO()
    with RunView(Console(file=screen), "quiet", quiet=True, max_silence=0.0) as view:
        assert not view.thread.is_alive()
    assert screen.getvalue() == ""


def test_lines_are_at_most_half_a_minute_apart() -> None:
    assert RunView(Console(file=io.StringIO()), "run").max_silence <= 30


def said_at_the_start(rounds: int, share: float, seconds: float = 4.0, shorter: str | None = "--rounds 1") -> str:
    """Return what is printed while two clients do a share of round 1 in some seconds of a clock that we set."""
    screen, now = io.StringIO(), [0.0]
    with RunView(Console(file=screen), "run", shorter=shorter, clock=lambda: now[0]) as view:
        view(Started(0, rounds))
        view(RoundDone(0, seconds=50.0))  # the opening does not train
        view(RoundBegun(1, ("a", "b")))
        now[0] = 100.0  # workers start, images are read
        view(Progressed("a", 0.0, 1.0))
        view(Progressed("b", 0.0, 1.0))
        now[0] += seconds
        view(Progressed("a", share, 1.0))
        view(Progressed("b", share, 1.0))
        view(Progressed("a", 2 * share, 1.0))
    return screen.getvalue().partition("(50.0 s)\n")[2]


def test_a_long_run_says_how_long_before_its_first_round_is_done() -> None:
    """In 4 s client a does 1/7 of its round, so both do 1/14 of theirs: a round takes 56 s, and 30 rounds 28 min."""
    assert said_at_the_start(30, 1 / 7) == "run: about 28 min for 30 rounds; --rounds 1 to try\n"
    assert "about 28 min for 30 rounds; rounds=1 to try" in said_at_the_start(30, 1 / 7, shorter="rounds=1")
    assert "about 9.3 h for 30 rounds" in said_at_the_start(30, 1 / 140)


@pytest.mark.parametrize(("share", "seconds", "shorter"), [(0.5, 0.5, "x"), (0.5, 0.99, "x"), (1 / 7, 4.0, None)])
def test_a_short_run_and_one_without_an_audience_say_nothing(share: float, seconds: float, shorter: str | None) -> None:
    assert said_at_the_start(30, share, seconds, shorter) == ""
    assert said_at_the_start(3, 0.9) == said_at_the_start(1, 1 / 7) == ""


@pytest.mark.parametrize(("quiet", "lines"), [(False, 2), (True, 0)])
def test_other_work_says_how_far_it_is(quiet: bool, lines: int) -> None:
    screen = io.StringIO()
    with progress(Console(file=screen), "attacking [a]", quiet, max_silence=0.01) as done:
        done(0.25)
        give_up = time.monotonic() + 60
        while screen.getvalue().count("attacking [a]: 25%\n") < lines and time.monotonic() < give_up:
            time.sleep(0.01)
    assert screen.getvalue().count("attacking [a]: 25%\n") >= lines
    assert bool(screen.getvalue()) != quiet
