"""Run the cells of a table, one run folder per cell and seed, and repeat a kept one to check it."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ...errors import ConfigError, RunError
from ...report.tables import student
from ...runs.folder import RunFolder
from ...terminal import Console
from ..grid import Row, run_rows
from .cells import Cell, Scale
from .scores import RunScore, finished_runs, is_kept, keep, kept_runs, score, score_run


@dataclass(frozen=True)
class Runs:
    """The runs of some cells: one run folder for each cell and seed."""

    cells: Sequence[Cell]
    scale: Scale
    seeds: int
    root: Path
    kept: Path | None = None  # a folder of kept results: runs that it has are not run, and new ones are added

    def run(
        self, console: Console, quiet: bool = False, overrides: Sequence[str] = (), jobs: int = 1
    ) -> dict[Path, str]:
        """Run or resume what is unfinished. Return the reason for each run that a fault or a diverged loss stopped."""
        runs = {
            cell.folder(self.root, self.scale, seed): (cell, seed)
            for seed in range(self.seeds)
            for cell in self.cells
            if self.kept is None or not is_kept(self.kept, cell, self.scale, seed)
        }
        settings = {path: cell.config(self.scale, seed, overrides) for path, (cell, seed) in runs.items()}
        rows = [Row(f"{cell.name}, seed {seed}", settings[path], path) for path, (cell, seed) in runs.items()]

        def done(row: Row) -> None:
            if self.kept is not None:
                keep(*runs[row.folder], self.scale, self.root, self.kept)

        return run_rows(rows, console, quiet, jobs, done, go_on=True)

    def scores(self, metric: str, stopped: Mapping[Path, str]) -> list[dict[str, Any]]:
        """Return the accuracy of each cell, from the kept results or from the finished runs."""
        scores = []
        for cell in self.cells:
            folders = [cell.folder(self.root, self.scale, seed) for seed in range(self.seeds)]
            runs = kept_runs(self.kept, cell, self.scale) if self.kept else finished_runs(folders)
            faults = [stopped[folder] for folder in folders if folder in stopped]
            scores.append(score(cell, runs, metric, faults))
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
        for reason in Runs([cell], scale, 1, Path(root)).run(console, overrides=overrides).values():
            raise RunError(f"'{cell.name}' could not be repeated: {reason}")
        again = score_run(RunFolder(cell.folder(Path(root), scale, 0)))
    found = float(score(cell, [again], metric)["mean"])
    low, high = mean(accuracies) - half, mean(accuracies) + half
    agrees = low <= found <= high and not again.lost
    seeds = {"kept": accuracies, "expected": [low, high], "found": found, "agrees": agrees}
    return {"cell": cell.name, "metric": metric, **seeds}


def cell_to_repeat(kept: Mapping[Cell, Sequence[RunScore]]) -> Cell | None:
    """Return the cheapest of the cells with the most seeds: with two seeds an interval holds almost any accuracy."""
    comparable = {cell: runs for cell, runs in kept.items() if len(runs) > 1 and runs[0].seed == 0}
    return min(comparable, key=lambda cell: (-len(kept[cell]), kept[cell][0].hours), default=None)
