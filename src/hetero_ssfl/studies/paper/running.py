"""Run the cells of a table, one run folder per cell and seed, and repeat a kept one to check it."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ...errors import ConfigError, RunError
from ...report.tables import student
from ...runs.folder import RunFolder
from ...terminal import Console
from ..grid import Row, run_rows
from .cells import Cell, Scale
from .kept import is_kept, keep, kept_runs
from .scores import RunScore, finished_runs, score, score_run


def run_cells(
    cells: Sequence[Cell],
    scale: Scale,
    seeds: int,
    root: Path,
    console: Console,
    quiet: bool,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    keep_in: Path | None = None,
) -> dict[Path, str]:
    """Run or resume unfinished cells. With `keep_in`, runs that are kept there are left out, and new ones are kept.

    Return the reason for each run that a fault or a diverged loss stopped; the other cells are run nevertheless.
    """
    runs = {
        cell.folder(root, scale, seed): (cell, seed)
        for seed in range(seeds)
        for cell in cells
        if keep_in is None or not is_kept(keep_in, cell, scale, seed)
    }
    rows = [
        Row(f"{cell.name}, seed {seed}", cell.config(scale, seed, overrides), path)
        for path, (cell, seed) in runs.items()
    ]

    def done(row: Row) -> None:
        if keep_in is not None:
            keep(*runs[row.folder], scale, root, keep_in)

    return run_rows(rows, console, quiet, jobs, done, go_on=True)


def scores_of(
    cells: Sequence[Cell],
    scale: Scale,
    seeds: int,
    root: Path,
    metric: str,
    stopped: Mapping[Path, str],
    kept_in: Path | None,
) -> list[dict[str, Any]]:
    """Return the accuracy of each cell, from the kept results or from the finished runs below `root`."""
    scores = []
    for cell in cells:
        runs = kept_runs(kept_in, cell, scale) if kept_in else finished_runs(cell, scale, seeds, root)
        folders = [cell.folder(root, scale, seed) for seed in range(seeds)]
        scores.append(score(cell, runs, metric, [stopped[folder] for folder in folders if folder in stopped]))
    return scores


def check(
    cells: Sequence[Cell], scale: Scale, results: Path, metric: str, console: Console, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run seed 0 of a kept cell again, and compare it with the interval for one more run of its cell.

    The interval is mean ± t s sqrt(1 + 1/n) over the kept seeds. The kept accuracy of the same seed stands beside it;
    the same kind of machine repeats it to the digit.
    """
    kept = {cell: kept_runs(results, cell, scale) for cell in cells}
    cell = cell_to_repeat(kept)
    if cell is None:
        raise ConfigError(
            f"'{results}' has no cell of scale {scale} with seed 0 and at least one other seed. Make them with --keep."
        )
    accuracies = [float(score(cell, [run], metric)["mean"]) for run in kept[cell]]
    half = student(len(accuracies)) * stdev(accuracies) * (1 + 1 / len(accuracies)) ** 0.5
    with tempfile.TemporaryDirectory() as root:
        stopped = run_cells([cell], scale, 1, Path(root), console, quiet=False, overrides=overrides)
        for reason in stopped.values():
            raise RunError(f"'{cell.name}' could not be repeated: {reason}")
        again = score_run(RunFolder(cell.folder(Path(root), scale, 0)))
    repeated = float(score(cell, [again], metric)["mean"])
    expected = [mean(accuracies) - half, mean(accuracies) + half]
    return {
        "cell": cell.name,
        "metric": metric,
        "kept": accuracies,
        "expected": expected,
        "found": repeated,
        "agrees": expected[0] <= repeated <= expected[1] and not again.lost,
    }


def cell_to_repeat(kept: Mapping[Cell, Sequence[RunScore]]) -> Cell | None:
    """Return the cheapest of the cells with the most seeds: with two seeds an interval holds almost any accuracy."""
    comparable = {cell: runs for cell, runs in kept.items() if len(runs) > 1 and runs[0].seed == 0}
    return min(comparable, key=lambda cell: (-len(kept[cell]), kept[cell][0].hours), default=None)
