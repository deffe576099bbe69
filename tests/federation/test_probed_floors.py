"""Floors in a whole run: probed once per encoder, kept in the results, and said when nothing beats them."""

from pathlib import Path

import pytest

from helpers.whole_runs import tiny
from hetero_ssfl.data.cache import cache_folder
from hetero_ssfl.federation.server.evaluating import below_floors
from hetero_ssfl.federation.start import start
from hetero_ssfl.learning.floors import FLOORS, PIXELS
from hetero_ssfl.report.tables import Result, compare_rows, compare_table, floor_rows, results_table
from hetero_ssfl.runs.events import Event, FloorProbed, Warned

WITH_FLOORS = ("evaluation.floors=true", "rounds=1", "local_epochs=1", "optim.lr=1e-9", "engine.workers=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[Event]]:
    events: list[Event] = []
    models = "clients.models=['resnet8(width=4)', 'vit(width=8, depth=1, heads=2)']"
    config = tiny(*WITH_FLOORS, models, "clients.count=3")
    return Result.read(start(config, tmp_path_factory.mktemp("floors") / "run", events.append)), events


def test_every_client_has_the_floor_of_its_width(run: tuple[Result, list[Event]]) -> None:
    result, events = run
    probed = [event for event in events if isinstance(event, FloorProbed)]
    assert [(e.split, e.name) for e in probed] == [(s, f) for s in ("validation", "test") for f in FLOORS]
    assert result.floors == list(FLOORS)
    for floor in FLOORS:
        first, second, third = (result.results["floors"][floor][f"client-00{k}"] for k in range(3))
        assert first == third, "the same encoder"
        assert (first != second) is (
            floor == PIXELS or (floor.startswith("untrained convolutions") and "full" not in floor)
        )
        assert set(first) == {"linear_all"}, "the probes of the config"
    assert [e.name for e in result.folder.events() if isinstance(e, FloorProbed)] == list(FLOORS)


def test_a_run_that_learned_nothing_says_so(run: tuple[Result, list[Event]]) -> None:
    result, events = run
    warnings = [event.text for event in events if isinstance(event, Warned) and "nobody trained" in event.text]
    assert len(warnings) == 1
    assert f"linear {result.results['mean']['linear_all']:.1f}" in warnings[0]
    floor = FloorProbed("test", PIXELS, {}, {"linear_all": 50.0})
    assert below_floors({"linear_all": 50.1}, [floor]) is None
    assert below_floors({"linear_all": 49.9}, [floor]) is not None


def test_floors_are_the_first_rows_of_tables(run: tuple[Result, list[Event]]) -> None:
    result, _ = run
    names = list(results_table(result).columns[0].cells)
    assert names[: len(FLOORS)] == list(FLOORS)
    rows = floor_rows([result], "linear_all")
    assert [row["run"] for row in rows] == list(FLOORS)
    assert rows[0]["mean"] == pytest.approx(sum(result.scores("linear_all", FLOORS[0])) / 3)
    table = compare_table(compare_rows([result], "linear_all"), rows)
    assert list(table.columns[0].cells)[:1] == [FLOORS[0]]


def test_floors_are_computed_once_per_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    config = tiny(*WITH_FLOORS, "evaluation.every=0", "clients.models=['resnet8(width=4)']")
    first = start(config, tmp_path / "first", lambda _: None)
    facts = sorted(cache_folder().glob("*.fact"))
    assert len(facts) == len(FLOORS)
    times = [file.stat().st_mtime_ns for file in facts]
    second = start(config, tmp_path / "second", lambda _: None)
    assert [file.stat().st_mtime_ns for file in sorted(cache_folder().glob("*.fact"))] == times
    assert first.read_json("results.json")["floors"] == second.read_json("results.json")["floors"]
