"""Tables and plots of hand-made run folders with known figures."""

import io
from pathlib import Path

import pytest

from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError, RunError
from hetero_ssfl.federation.start import start
from hetero_ssfl.report import plots
from hetero_ssfl.report.page import render
from hetero_ssfl.report.tables import (
    Result,
    compare_rows,
    compare_table,
    metric_names,
    paired_interval,
    results_table,
    spread,
)
from hetero_ssfl.runs.events import ClientTrained, Evaluated
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.terminal import Console
from hetero_ssfl.use.encoders import read_rad_features


def make(path: Path, scores: list[float], *overrides: str) -> Result:
    config = load_config("smoke", list(overrides))
    folder = RunFolder.create(path, config, lambda _: None)
    names = [f"client-{k:03d}" for k in range(len(scores))]
    folder.write_json(
        "facts.json", {"site": "simulated", "classes": ["a", "b"], "holdings": {n: [3, 0] for n in names}}
    )
    results = {
        "clients": {n: {"linear_all": s} for n, s in zip(names, scores, strict=True)},
        "mean": {},
        "untrained": {},
        "models": {n: {"encoder": "resnet8\x1b]0;owned\x07[bold]", "parameters": 7} for n in names},
    }
    folder.write_json("results.json", results)
    return Result.read(folder)


def test_compare_takes_means_over_clients_then_over_seeds(tmp_path: Path) -> None:
    alone = [make(tmp_path / f"a{s}", [10.0 + s, 20.0 + s], "method=local", f"seed={s}") for s in (0, 2)]
    together = [make(tmp_path / f"t{s}", [30.0, 40.0 + 2 * s], f"seed={s}") for s in (0, 2)]
    first, second = compare_rows([*alone, *together], "linear_all")
    assert first["mean"] == pytest.approx((15 + 17) / 2)
    assert first["sd_over_seeds"] == pytest.approx(2**0.5)
    assert second["mean"] == pytest.approx((35 + 37) / 2)
    assert second["difference_to_first"] == pytest.approx(20)
    assert compare_table([first, second], []).row_count == 2


def test_clients_that_never_trained_are_named_and_not_part_of_any_mean(tmp_path: Path) -> None:
    """One client of three per round, two rounds: at least one client is never selected."""
    small = ["clients.count=3", "clients.per_round=1", "rounds=2", "local_epochs=1", "evaluation.every=0"]
    result = Result.read(start(load_config("smoke", [*small, "engine.workers=1"]), tmp_path / "run", lambda _: None))
    trained = {e.client for e in result.folder.events() if isinstance(e, ClientTrained) and e.round > 0}
    idle = sorted({"client-000", "client-001", "client-002"} - trained)
    assert idle
    assert result.never_trained == idle
    of_trained = [result.results["clients"][name]["linear_all"] for name in sorted(trained)]
    assert result.results["mean"]["linear_all"] == pytest.approx(sum(of_trained) / len(of_trained))
    assert result.scores("linear_all") == of_trained
    assert compare_rows([result], "linear_all")[0]["mean"] == pytest.approx(sum(of_trained) / len(of_trained))
    console = Console(file=io.StringIO(), width=200)
    console.print(results_table(result))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{idle[0]} (never trained)" in printed
    assert f"over the {len(trained)} clients that trained" in printed
    page = render([tmp_path / "run"], read_rad_features)
    assert f"<td>{len(idle)} of 3</td>" in page
    assert f"{idle[0]} (never trained)" in page
    assert f"{sum(of_trained) / len(of_trained):.1f} % (linear probe, all classes" in page


def test_the_difference_uses_only_equal_seeds(tmp_path: Path) -> None:
    a = make(tmp_path / "a", [10.0], "method=local", "seed=0")
    b = [make(tmp_path / f"b{s}", [20.0 + 50 * s], f"seed={s}") for s in (0, 1)]
    assert compare_rows([a, *b], "linear_all")[1]["difference_to_first"] == pytest.approx(10)


def test_runs_with_different_settings_are_not_grouped(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"mu{mu}", [10.0 * mu], f"alignment.mu={mu}") for mu in (1, 4)]
    rows = compare_rows(runs, "linear_all")
    assert [row["mean"] for row in rows] == [10, 40]
    assert rows[0]["run"] != rows[1]["run"]


def test_listing_a_run_twice_is_an_error(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [10.0])
    with pytest.raises(RunError, match="List each run once"):
        compare_rows([run, run], "linear_all")


def test_an_unknown_picture_format_raises_an_error(tmp_path: Path) -> None:
    figure, _ = plots.subplots(figsize=(2, 2))
    with pytest.raises(ConfigError, match=r"\.png"):
        plots.save(figure, tmp_path / "a.xyz")


def test_the_same_figure_gives_the_same_svg_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        figure, axes = plots.subplots(figsize=(2, 2))
        axes.plot([0, 1], "o", clip_on=True)
        plots.save(figure, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_escape_sequences_of_a_run_folder_do_not_reach_the_terminal(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [10.0])
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(results_table(run))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert r"resnet8\x1b]0;owned" in shown
    assert "\x1b]0" not in shown
    assert "\x07" not in shown
    assert "\x1b[" in shown, "rich's own colours are kept"


def test_the_interval_is_of_paired_differences(tmp_path: Path) -> None:
    """Clients differ by 50 points, but each gains 9 to 11, which only pairing can show."""
    alone = [make(tmp_path / f"a{s}", [10.0, 60.0], "method=local", f"seed={s}") for s in range(3)]
    together = [make(tmp_path / f"t{s}", [19.0, 71.0], f"seed={s}") for s in range(3)]
    low, high = paired_interval(alone, together, "linear_all") or (0, 0)
    assert 9 <= low < 10 < high <= 11
    assert paired_interval(alone, alone, "linear_all") == [0, 0]
    assert paired_interval(alone[:1], together[1:2], "linear_all") is None


def test_spread_is_mean_and_sample_deviation() -> None:
    assert spread([1.0, 3.0]) == "2.0 ± 1.4"
    assert spread([5.0]) == "5.0 ± 0.0"
    assert spread([]) == "-"


def test_the_table_of_a_run_has_a_row_per_client(tmp_path: Path) -> None:
    result = make(tmp_path / "a", [10.0, 20.0, 30.0])
    assert metric_names(result) == ["linear_all"]
    assert results_table(result).row_count == 4
    assert result.holdings("client-001") == "a"


def test_every_plot_can_be_drawn_and_saved(tmp_path: Path) -> None:
    figure, axes = plots.subplots(2, 2, figsize=(6, 6))
    events = [Evaluated(r, "validation", {"a": {"m": r}, "b": {"m": 2 * r}}) for r in (0, 1)]
    plots.curves(axes[0, 0], {"alone": events, "together": events}, "m")
    line = axes[0, 0].lines[0]
    assert list(line.get_ydata()) == [0, 1.5]
    plots.heat_map(axes[0, 1], [[1.0, 0.5], [0.5, 1.0]], "cka", ["a", "b"])
    assert "mean 0.50" in axes[0, 1].get_title()
    plots.holdings(axes[1, 0], {"a": [3, 0], "b": [0, 5]}, ["x", "y"])
    plots.comparison(axes[1, 1], [{"run": "a", "mean": 3.0, "per_seed": {0: 3.0}, "metric": "m"}])
    plots.save(figure, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1
