"""Run one config over a grid of settings and seeds: `--over alignment.mu=0,0.5,4 --over rad.size=100,500`."""

from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from rich.table import Table

from ..config import load_config
from ..errors import ConfigError
from ..report import plots
from ..report.tables import Result, floor_rows, range_of, table_of
from ..runs.folder import RunFolder
from ..terminal import Console
from .grid import Row, mean_and_deviation, run_rows


class Axis(NamedTuple):
    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Axis":
        key, separator, listed = text.partition("=")
        values = tuple(value.strip() for value in listed.split(",") if value.strip())
        if not separator or not values:
            raise ConfigError(f"--over '{text}' cannot be read, expected key=value,value such as alignment.mu=0,1,4.")
        return cls(key.strip(), values)


def run_sweep(
    config: str, axes: list[Axis], overrides: list[str], seeds: int, root: Path, console: Console, quiet: bool
) -> list[dict[str, Any]]:
    """Run or resume every point of the grid. Return one entry per point."""
    points: list[tuple[dict[str, str], list[Row]]] = []
    for point in _points(axes):
        changes, rows = [f"{key}={value}" for key, value in point.items()], []
        for seed in range(seeds):
            folder = root / "-".join([*changes, f"seed{seed}"]).replace("/", "_")
            loaded = load_config(config, [*overrides, *changes, f"seed={seed}"])
            rows.append(Row(" ".join([*changes, f"seed {seed}"]), loaded, folder))
        points.append((point, rows))
    run_rows([row for _, rows in points for row in rows], console, quiet)
    return [_over_seeds(point, [Result.read(RunFolder(row.folder)) for row in rows]) for point, rows in points]


def _points(axes: list[Axis]) -> list[dict[str, str]]:
    return [dict(zip([a.key for a in axes], values, strict=True)) for values in product(*(a.values for a in axes))]


def _over_seeds(point: dict[str, str], results: list[Result]) -> dict[str, Any]:
    means = [result.results["mean"] for result in results]
    metrics = {metric: [values[metric] for values in means if metric in values] for metric in means[0]}
    return {
        "point": point,
        "seeds": len(results),
        "mean": {metric: mean(values) for metric, values in metrics.items()},
        "sd_over_seeds": {metric: stdev(values) for metric, values in metrics.items() if len(values) > 1},
        "per_seed": metrics,
        "floors": {metric: {row["run"]: row["mean"] for row in floor_rows(results, metric)} for metric in metrics},
    }


def sweep_table(axes: list[Axis], entries: list[dict[str, Any]]) -> Table:
    metrics = sorted(entries[0]["mean"])
    head = [*(axis.key for axis in axes), *(metric.replace("_", ", ") for metric in metrics)]
    floors = []
    for floor in dict.fromkeys(name for entry in entries for known in entry["floors"].values() for name in known):
        values = ([e["floors"][m][floor] for e in entries if floor in e["floors"][m]] for m in metrics)
        floors.append([floor, *[""] * (len(axes) - 1), *map(range_of, values)])
    rows = [[*e["point"].values(), *(mean_and_deviation(e["per_seed"][m]) for m in metrics)] for e in entries]
    title = f"test accuracy (%), mean over clients, over {entries[0]['seeds']} seeds"
    return table_of(title, head, floors, rows, texts=0)


def draw_sweep(axes: list[Axis], entries: list[dict[str, Any]], metric: str, path: Path) -> None:
    """Plot the sweep: the first axis along x, the other axes as lines, and a dot for each seed."""
    figure, canvas = plots.subplots(figsize=(6, 4))
    first, *others = axes
    for fixed in _points(others):
        line = [e for e in entries if fixed.items() <= e["point"].items() and metric in e["mean"]]
        places = [first.values.index(entry["point"][first.key]) for entry in line]
        label = ", ".join(f"{k}={v}" for k, v in fixed.items()) or None
        (drawn,) = canvas.plot(places, [entry["mean"][metric] for entry in line], marker="o", label=label)
        for place, entry in zip(places, line, strict=True):
            seeds = entry["per_seed"][metric]
            canvas.plot([place] * len(seeds), seeds, ".", color=drawn.get_color(), alpha=0.5)
    for name, value in entries[0]["floors"].get(metric, {}).items():
        plots.floor(canvas, name, value)
    canvas.set_xticks(range(len(first.values)), first.values)
    canvas.set(xlabel=first.key, ylabel=f"test accuracy (%), {metric.replace('_', ', ')}")
    if others:
        canvas.legend(frameon=False)
    plots.save(figure, path)
