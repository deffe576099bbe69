"""The tables on docs/results.md are printed from the files below results/."""

import importlib
from pathlib import Path

import pytest

from hetero_ssfl.paper.cells import CHOSEN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text().splitlines()


@pytest.mark.parametrize("script", ["arms", "selection"])
def test_the_page_has_the_table_that_the_script_prints(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    importlib.import_module(script).print_table()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 2
    missing = [line for line in printed if line not in PAGE]
    assert not missing


@pytest.mark.parametrize("sweep", ["RAD size", "local epochs", "mu", "kernel"])
def test_the_page_has_every_kept_run_of_a_sweep(
    sweep: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    arms = importlib.import_module("arms")
    arms.print_table(arms.SWEEPS[sweep])
    assert not [line for line in capsys.readouterr().out.splitlines() if line not in PAGE]


def test_the_tables_use_the_best_trial_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    selection = importlib.import_module("selection")
    winners = {row: sorted(selection.kept(row)[0]["overrides"]) for row in selection.ROWS}
    assert winners == {row: sorted(settings) for row, settings in CHOSEN.items()}


def test_the_page_has_the_tables_of_the_kept_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    tables = importlib.import_module("tables")
    page = tmp_path / "results.md"
    page.write_text((ROOT / "docs" / "results.md").read_text())
    monkeypatch.setattr("sys.argv", ["tables.py", "--write", str(page)])
    tables.main()
    assert page.read_text().splitlines() == PAGE
    monkeypatch.setattr(tables, "RESULTS", tmp_path)  # without results every cell is empty
    tables.main()
    assert page.read_text().splitlines() != PAGE


@pytest.mark.parametrize("stage", ["A", "C", "N"])
def test_every_result_of_the_search_is_on_the_page(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    recipe = importlib.import_module("recipe")
    recipe.print_table(list(recipe.VARIANTS[stage]), seeds=3)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 2
    assert not [line for line in printed if line not in PAGE]
