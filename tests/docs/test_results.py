"""The figures on docs/results.md, results/tables.md and README.md come from the files below results/."""

import importlib
import re
from pathlib import Path
from statistics import mean

import pytest

from hetero_ssfl.learning.floors import FLOORS
from hetero_ssfl.studies.paper.cells import CHOSEN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
TABLES = (ROOT / "results" / "tables.md").read_text()
README = (ROOT / "README.md").read_text()
INTERVAL = re.compile(r"[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\)")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return monkeypatch


@pytest.mark.parametrize(("name", "text", "options"), [("tables", TABLES, []), ("arms", PAGE, ["--table"])])
def test_the_page_has_the_tables_of_the_kept_runs(
    name: str, text: str, options: list[str], tmp_path: Path, script: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(name)
    page = tmp_path / "page.md"
    page.write_text(text)
    script.setattr("sys.argv", [f"{name}.py", *options, "--write", str(page)])
    module.main()
    assert page.read_text() == text
    script.setattr(module, "RESULTS", tmp_path)  # without results every cell is empty
    module.main()
    assert page.read_text() != text


@pytest.mark.usefixtures("script")
def test_every_interval_of_the_text_is_printed_from_the_kept_runs() -> None:
    arms, tables, demo = (importlib.import_module(name) for name in ("arms", "tables", "demo"))
    known = "\n".join([*arms.table_lines(), *tables.page_lines(), *demo.table_lines()])
    shown = INTERVAL.findall(" ".join([*PAGE.split(), *TABLES.split()]))
    assert len(shown) > 100
    assert not [interval for interval in shown if interval not in known]


@pytest.mark.usefixtures("script")
def test_trials_on_the_page_are_as_kept(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, selection = (importlib.import_module(name) for name in ("recipe", "selection"))
    for stage in recipe.VARIANTS:
        recipe.print_table(list(recipe.VARIANTS[stage]), seeds=3)
    selection.print_table()
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in PAGE.splitlines() if re.match(r"\| [LTW]-", line)]
    assert len(shown) >= 3
    assert not [line for line in shown if line not in printed]
    best = {row: f"{selection.kept(row)[0]['linear_all']:.1f}" for row in ("FedBYOL", "FedSimCLR")}
    assert f"FedBYOL has {best['FedBYOL']} (untrained 30.3), that of FedSimCLR {best['FedSimCLR']}" in TABLES


@pytest.mark.usefixtures("script")
def test_the_tables_use_the_best_trial_of_each_method() -> None:
    selection = importlib.import_module("selection")
    winners = {row: sorted(selection.kept(row)[0]["overrides"]) for row in selection.ROWS}
    assert winners == {row: sorted(settings) for row, settings in CHOSEN.items()}


@pytest.mark.usefixtures("script")
def test_the_readme_has_the_figures_of_the_kept_runs() -> None:
    arms, demo = (importlib.import_module(name) for name in ("arms", "demo"))
    rows = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in README.splitlines() if row[:1] == "|"]
    readme = {row[0]: row[1:] for row in rows if len(row) == 5}
    metrics = ("linear_all", "knn_all")

    def of_demo(features: str) -> list[str]:
        return [f"{mean(demo.scores(features, metric)):.1f}" for metric in metrics]

    def of_arms(arm: str) -> list[str]:
        return [arms.over_seeds(arms.scores(arm, metric)).split()[0] for metric in metrics]

    floors = [f"{max(mean(demo.scores(floor, metric)) for floor in FLOORS):.1f}" for metric in metrics]
    floors += [f"{arms.strongest_floor(metric):.1f}" for metric in metrics]
    assert readme["floor: features that nobody trained"] == floors
    control, central = "alone with RAD images", "one model with the images of all"
    assert readme["alone, the RAD as extra data"] == of_demo(control) + of_arms(control)
    assert readme["alone, also taught by its own kernel"] == of_demo(demo.OWN) + of_arms(arms.OWN)
    assert readme["together"] == of_demo("together") + of_arms("together")
    assert readme[central] == ["", "", *of_arms(central)]
    gains = [demo.difference(control, metric) for metric in metrics]
    gains += [arms.over_seeds(arms.gains(arm, metric), "+") for arm in (control, arms.OWN) for metric in metrics]
    assert [gain for gain in gains if gain not in " ".join(README.split())] == []


@pytest.mark.usefixtures("script")
def test_the_demo_is_as_kept() -> None:
    assert "\n".join(importlib.import_module("demo").table_lines()) in PAGE
