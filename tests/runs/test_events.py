"""Events survive a round trip, and unknown lines are ignored."""

import json

import pytest

from hetero_ssfl.runs.events import (
    KINDS,
    ClientTrained,
    Evaluated,
    Event,
    KernelsSeen,
    RoundDone,
    from_json,
    from_lines,
    to_lines,
)

WRITTEN = [
    ClientTrained(1, "a", 10, 20, 300, warning="collapsed", figures={"loss_ssl": 0.5, "own_figure": 2.0}),
    ClientTrained(1, "b", 10, excluded="b did not answer."),
    Evaluated(1, "validation", {"a": {"linear_all": 50.0}}, {"linear_all": 50.0}),
    KernelsSeen(1, [0.5, 0.25], ["a", "b"], [[1.0, 0.5], [0.5, 1.0]]),
    RoundDone(1, 1, 2.5, ["c"], {"loss_ssl": 0.5}),
]


@pytest.mark.parametrize("event", WRITTEN, ids=lambda event: event.kind)
def test_a_saved_event_is_read_as_it_was_written(event: Event) -> None:
    assert event.saved
    assert from_lines(to_lines([event]).splitlines()) == [event]


def test_figures_are_stored_beside_the_other_fields() -> None:
    """Users read this format with pandas."""
    assert WRITTEN[0].to_json() == {
        "event": "client",
        "round": 1,
        "client": "a",
        "bytes_down": 10,
        "bytes_up": 20,
        "examples": 300,
        "warning": "collapsed",
        "loss_ssl": 0.5,
        "own_figure": 2.0,
    }
    assert "bytes_up" not in WRITTEN[1].to_json()


def test_a_line_of_run_format_2_is_read() -> None:
    line = {"event": "client", "round": 3, "client": "a", "bytes_down": 7, "bytes_up": 9, "examples": 5, "spread": 0.9}
    assert from_json(line) == ClientTrained(3, "a", 7, 9, 5, figures={"spread": 0.9})
    assert from_json({"event": "round", "round": 3, "replies": 2, "seconds": 1.5, "loss_ssl": 1}) == RoundDone(
        3, 2, 1.5, None, {"loss_ssl": 1}
    )


@pytest.mark.parametrize(
    "line",
    [
        {"event": "from a newer version", "round": 1},
        {"round": 1},
        {"event": "client", "round": "one", "client": "a"},
        {"event": "client", "round": 1},
        {"event": ["client"], "round": 1},
    ],
)
def test_an_invalid_event_line_is_ignored(line: dict[str, object]) -> None:
    assert from_json(line) is None
    assert from_lines([json.dumps(line), "[]", "3", '{"event": "rou', json.dumps(WRITTEN[1].to_json())]) == [WRITTEN[1]]


def test_a_figure_that_is_not_a_number_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_lines([RoundDone(1, figures={"loss_ssl": float("nan")})])


def test_every_kind_has_a_unique_name_and_a_docstring() -> None:
    assert len(KINDS) == len(Event.__subclasses__()) == 15
    assert all(kind.__doc__ for kind in KINDS.values())
