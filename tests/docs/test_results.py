"""The figures on docs/results.md and README.md come from the files below results/."""

import importlib
import re
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest

from hetero_ssfl.learning.floors import FLOORS
from hetero_ssfl.studies.paper.cells import CHOSEN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
README = (ROOT / "README.md").read_text()
INTERVAL = re.compile(r"[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\)")

# Comparisons of the text that no table prints.
COMPARED = [
    ("together, CKA", "alone with RAD images"),
    ("together without RAD images in the local loss", "alone"),
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return monkeypatch


@pytest.mark.parametrize(("name", "options"), [("tables", []), ("arms", ["--table"])])
def test_the_page_has_the_tables_of_the_kept_runs(
    name: str, options: list[str], tmp_path: Path, script: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(name)
    page = tmp_path / "results.md"
    page.write_text(PAGE)
    script.setattr("sys.argv", [f"{name}.py", *options, "--write", str(page)])
    module.main()
    assert page.read_text() == PAGE
    script.setattr(module, "RESULTS", tmp_path)  # without results every cell is empty
    module.main()
    assert page.read_text() != PAGE


def by_client(results: dict[int, dict[str, Any]], metric: str) -> dict[int, list[float]]:
    return {seed: [client[metric] for client in result["clients"].values()] for seed, result in results.items()}


def printed_by_arms(arms: ModuleType) -> str:
    lines = [
        line for sweep in ({"untrained": [], **arms.ARMS}, *arms.SWEEPS.values()) for line in arms.table_lines(sweep)
    ]
    for arm, control in COMPARED:
        one, other = arms.kept(arm), arms.kept(control)
        lines += [arms.difference(by_client(one, m), by_client(other, m)) for m in ("linear_all", "knn_all")]
    return "\n".join(lines)


@pytest.mark.usefixtures("script")
def test_every_interval_of_the_text_is_printed_from_the_kept_runs() -> None:
    """The study with BYOL, the last section, is not kept below results/."""
    known = printed_by_arms(importlib.import_module("arms"))
    known += "\n".join(
        [*importlib.import_module("tables").page_lines(), *importlib.import_module("demo").table_lines()]
    )
    text = " ".join(PAGE.split("## The alignment term with BYOL")[0].split())
    assert len(INTERVAL.findall(text)) > 100
    assert not [interval for interval in INTERVAL.findall(text) if interval not in known]


@pytest.mark.usefixtures("script")
def test_trials_on_the_page_are_as_kept(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, selection = (importlib.import_module(name) for name in ("recipe", "selection"))
    for stage in recipe.VARIANTS:
        recipe.print_table(list(recipe.VARIANTS[stage]), seeds=3)
    selection.print_table()
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in PAGE.splitlines() if re.match(r"\| [ACLNR]-", line)]
    assert len(shown) >= 5
    assert not [line for line in shown if line not in printed]
    best = {row: f"{selection.kept(row)[0]['linear_all']:.1f}" for row in ("FedBYOL", "FedSimCLR")}
    assert f"FedBYOL has {best['FedBYOL']} (untrained 30.3), that of FedSimCLR {best['FedSimCLR']}" in PAGE


@pytest.mark.usefixtures("script")
def test_the_tables_use_the_best_trial_of_each_method() -> None:
    selection = importlib.import_module("selection")
    winners = {row: sorted(selection.kept(row)[0]["overrides"]) for row in selection.ROWS}
    assert winners == {row: sorted(settings) for row, settings in CHOSEN.items()}


@pytest.mark.usefixtures("script")
def test_the_floors_are_as_kept() -> None:
    lines = list(importlib.import_module("floors").table_lines())
    assert len(lines) > 5
    assert "\n".join(lines) in PAGE


@pytest.mark.usefixtures("script")
def test_the_readme_has_the_figures_of_the_kept_runs() -> None:
    arms, floors, demo = (importlib.import_module(name) for name in ("arms", "floors", "demo"))
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:1] == "|"
    ]
    readme = {row[0]: row[1:] for row in rows if len(row) == 5}
    metrics = ("linear_all", "knn_all")
    for name, arm in {
        "alone": "alone",
        "alone, the RAD as extra data": "alone with RAD images",
        "together": "together",
    }.items():
        digits = [f"{mean(demo.scores(arm, metric)):.1f}" for metric in metrics]
        means = [arms.over_seeds(by_client(arms.kept(arm), metric)) for metric in metrics]
        assert [cell.strip("*") for cell in readme[name]] == [*digits, *[text.split()[0] for text in means]]
    digits = [f"{max(mean(demo.scores(floor, metric)) for floor in FLOORS):.1f}" for metric in metrics]
    probed = [f"{floors.floor('cifar10-workstation', probe):.1f}" for probe in ("linear", "knn")]
    assert readme["floor: features that nobody trained"] == [*digits, *probed]
    gains = [demo.difference("alone with RAD images", metric) for metric in metrics]
    assert gains == ["+2.0 (+0.6 to +3.4)", "+5.3 (+3.0 to +7.6)"]
    assert "by 2.0 points (95 % t interval over seeds: 0.6 to 3.4)" in README
    assert "5.3 (3.0 to 7.6) with nearest neighbours" in README


@pytest.mark.usefixtures("script")
def test_the_demo_is_as_kept() -> None:
    assert "\n".join(importlib.import_module("demo").table_lines()) in PAGE
