import json
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

from hetero_ssfl.errors import ConfigError
from hetero_ssfl.learning.floors import FLOORS
from hetero_ssfl.studies.sweep import Axis, sweep_table

Call = Callable[..., tuple[int, str, str]]


def test_an_axis_is_a_key_and_its_values() -> None:
    assert Axis.parse("alignment.mu=0, 0.5,4") == Axis("alignment.mu", ("0", "0.5", "4"))
    for wrong in ("alignment.mu", "alignment.mu="):
        with pytest.raises(ConfigError, match="expected key=value,value"):
            Axis.parse(wrong)


def test_a_sweep_runs_every_point_once_and_plots_it(tmp_path: Path, call: Call) -> None:
    small = ["--set", "rounds=1", "--set", "evaluation.every=0", "--set", "evaluation.epochs=2", "--quiet"]
    small += ["--set", "evaluation.floors=true", "--json"]
    arguments = ["sweep", "smoke", "--over", "alignment.mu=0,4", "--root", tmp_path, *small]
    code, printed, _ = call(*arguments)
    shown = json.loads(printed)
    assert code == 0
    assert [row["point"] for row in shown["rows"]] == [{"alignment.mu": "0"}, {"alignment.mu": "4"}]
    assert Path(shown["picture"]).read_bytes().startswith(b"\x89PNG")
    floors = shown["rows"][0]["floors"]["linear_all"]
    assert list(floors) == list(FLOORS)
    table = sweep_table([Axis.parse("alignment.mu=0,4")], shown["rows"])
    assert list(table.columns[0].cells) == [*FLOORS, "0", "4"], "the floors come first"
    (column,) = (column for column in table.columns if column.header == "linear, all")
    assert next(iter(column.cells)) == f"{floors[FLOORS[0]]:.1f}"
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("results.json")}
    assert len(times) == 2
    files = {f"--{kind}": tmp_path / f"table.{kind}" for kind in ("csv", "latex", "markdown")}
    again = [*arguments, *(word for pair in files.items() for word in pair)]
    assert call(*again)[:2] == (0, printed)
    read = pandas.read_csv(files["--csv"], dtype=str)
    assert read["alignment.mu"].tolist() == [*FLOORS, "0", "4"]
    assert read["linear, all"].tolist() == list(column.cells)
    assert r"\begin{tabular}" in files["--latex"].read_text()
    lines = files["--markdown"].read_text().splitlines()
    assert (lines[0].startswith("| alignment.mu | "), len(lines)) == (True, 2 + len(read))
    assert all(p.stat().st_mtime_ns == t for p, t in times.items())


def test_a_misspelt_key_is_found_before_anything_runs(tmp_path: Path, call: Call) -> None:
    code, _, said = call("sweep", "smoke", "--over", "rounds=1,2", "--over", "alignment.muu=1", "--root", tmp_path)
    assert (code, "expected 'mu'" in said) == (2, True)
    assert not list(tmp_path.iterdir())
