"""The tables on docs/results.md are printed from the files below results/."""

import importlib
import re
from pathlib import Path

import pytest

from hetero_ssfl.studies.paper.cells import CHOSEN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text().splitlines()


def test_the_page_has_the_table_of_the_selection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    importlib.import_module("selection").print_table()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 2
    assert not [line for line in printed if line not in PAGE]


def test_the_tables_use_the_best_trial_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    selection = importlib.import_module("selection")
    winners = {row: sorted(selection.kept(row)[0]["overrides"]) for row in selection.ROWS}
    assert winners == {row: sorted(settings) for row, settings in CHOSEN.items()}


@pytest.mark.parametrize(("script", "options"), [("tables", []), ("arms", ["--table"])])
def test_the_page_has_the_tables_of_the_kept_runs(
    script: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    module = importlib.import_module(script)
    page = tmp_path / "results.md"
    page.write_text((ROOT / "docs" / "results.md").read_text())
    monkeypatch.setattr("sys.argv", [f"{script}.py", *options, "--write", str(page)])
    module.main()
    assert page.read_text().splitlines() == PAGE
    monkeypatch.setattr(module, "RESULTS", tmp_path)  # without results every cell is empty
    module.main()
    assert page.read_text().splitlines() != PAGE


@pytest.mark.parametrize("stage", ["A", "C", "N", "R"])
def test_every_result_of_the_search_is_on_the_page(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    recipe = importlib.import_module("recipe")
    recipe.print_table(list(recipe.VARIANTS[stage]), seeds=3)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 2
    assert not [line for line in printed if line not in PAGE]


def test_every_interval_of_the_readme_is_on_the_page() -> None:
    page = " ".join(PAGE)
    section = (ROOT / "README.md").read_text().split("## What it shows")[1].split("## The demo")[0]
    intervals = re.findall(r"[+-]?[\d.]+ \([+-]?[\d.]+ to [+-]?[\d.]+\)", " ".join(section.split()))
    assert len(intervals) > 20
    assert not [interval for interval in intervals if interval not in page]
