"""Run one config over a grid of settings and seeds: `--over alignment.mu=0,0.5,4 --over rad.size=100,500`."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.table import Table

from ..config import load_config
from ..errors import ConfigError
from ..federation.start import start
from ..report import plots
from ..report.progress import RunView
from ..report.tables import Result
from ..terminal import Console


@dataclass(frozen=True)
class Axis:
    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Axis":
        key, separator, values = text.partition("=")
        found = tuple(value.strip() for value in values.split(",") if value.strip())
        if not separator or not found:
            raise ConfigError(f"--over '{text}' cannot be read, expected key=value,value such as alignment.mu=0,1,4.")
        return cls(key.strip(), found)


def run_sweep(
    config: str, axes: list[Axis], overrides: list[str], seeds: int, root: Path, console: Console, quiet: bool
) -> list[dict[str, Any]]:
    """Run or resume every point of the grid. Return one row per point."""
    points = [dict(zip([a.key for a in axes], values, strict=True)) for values in product(*(a.values for a in axes))]
    for point in points:  # find a misspelt key before the first run
        load_config(config, [*overrides, *[f"{k}={v}" for k, v in point.items()]])
    rows = []
    for point in points:
        changes = [f"{key}={value}" for key, value in point.items()]
        results = []
        for seed in range(seeds):
            name = "-".join([*changes, f"seed{seed}"]).replace("/", "_")
            with RunView(console, " ".join([*changes, f"seed {seed}"]), quiet) as view:
                loaded = load_config(config, [*overrides, *changes, f"seed={seed}"])
                results.append(Result.read(start(loaded, root / name, view)))
        rows.append(_row(point, results))
    return rows


def _row(point: dict[str, str], results: list[Result]) -> dict[str, Any]:
    metrics: dict[str, list[float]] = {}
    for result in results:
        for metric, value in result.results["mean"].items():
            metrics.setdefault(metric, []).append(value)
    return {
        "point": point,
        "seeds": len(results),
        "mean": {metric: mean(values) for metric, values in metrics.items()},
        "sd_over_seeds": {metric: stdev(values) for metric, values in metrics.items() if len(values) > 1},
        "per_seed": metrics,
    }


def sweep_table(axes: list[Axis], rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"test accuracy (%), mean over clients, over {rows[0]['seeds']} seeds")
    for axis in axes:
        table.add_column(axis.key, justify="right")
    metrics = sorted(rows[0]["mean"])
    for metric in metrics:
        table.add_column(metric.replace("_", ", "), justify="right")
    for row in rows:
        cells = [
            f"{row['mean'][m]:.1f}" + (f" ± {row['sd_over_seeds'][m]:.1f}" if m in row["sd_over_seeds"] else "")
            for m in metrics
        ]
        table.add_row(*row["point"].values(), *cells)
    return table


def draw_sweep(axes: list[Axis], rows: list[dict[str, Any]], metric: str, path: Path) -> None:
    """Plot the sweep: the first axis along x, the other axes as lines, and a dot for each seed."""
    figure, canvas = plots.subplots(figsize=(6, 4))
    first, *others = axes
    for values in product(*(axis.values for axis in others)):
        fixed = dict(zip([a.key for a in others], values, strict=True))
        chosen = [r for r in rows if all(r["point"][k] == v for k, v in fixed.items()) and metric in r["mean"]]
        places = [first.values.index(row["point"][first.key]) for row in chosen]
        label = ", ".join(f"{k}={v}" for k, v in fixed.items()) or None
        (line,) = canvas.plot(places, [row["mean"][metric] for row in chosen], marker="o", label=label)
        for place, row in zip(places, chosen, strict=True):
            seeds = row["per_seed"][metric]
            canvas.plot([place] * len(seeds), seeds, ".", color=line.get_color(), alpha=0.5)
    canvas.set_xticks(range(len(first.values)), first.values)
    canvas.set(xlabel=first.key, ylabel=f"test accuracy (%), {metric.replace('_', ', ')}")
    if others:
        canvas.legend(frameon=False)
    canvas.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)
