"""Run the cells of a table. A cell is one run folder per seed; missing or unfinished runs are run or resumed."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rich.progress import track

from ...config import parse_config
from ...errors import FaultError, TooFewRepliesError
from ...federation.engines.forkserver import end_with_parent
from ...federation.start import start
from ...report.progress import RunView
from ...terminal import Console
from .cells import Cell, Scale


def run_cells(
    cells: list[Cell],
    scale: Scale,
    seeds: int,
    root: Path,
    console: Console,
    quiet: bool,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    known: Callable[[Cell, int], bool] = lambda *_: False,
    done: Callable[[Cell, int], None] = lambda *_: None,
) -> dict[Path, str]:
    """Run or resume unfinished cells, `jobs` runs at a time. Finished cells are left unchanged.

    `known` says which cells and seeds need no run here; `done` is called after each of the others has finished.
    Return the reason for each run that a fault or a diverged loss stopped; the other cells are run nevertheless.
    """
    runs = {
        cell.folder(root, scale, seed): (cell, seed) for seed in range(seeds) for cell in cells if not known(cell, seed)
    }
    configs = {path: cell.config(scale, seed, overrides) for path, (cell, seed) in runs.items()}
    titles = {path: f"{cell.name}, seed {seed}" for path, (cell, seed) in runs.items()}
    stopped: dict[Path, str] = {}
    if jobs == 1:
        for path, config in configs.items():
            try:
                with RunView(console, titles[path], quiet) as view:
                    start(config, path, view)
                done(*runs[path])
            except (FaultError, TooFewRepliesError) as error:
                stopped[path] = str(error)
        return stopped
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        waiting = {pool.submit(_run_alone, config.to_toml(), path): path for path, config in configs.items()}
        results = track(as_completed(waiting), f"{jobs} runs at a time", len(waiting), console=console, disable=quiet)
        for result in results:
            path, fault = waiting[result], result.result()
            if fault:
                stopped[path] = fault
            else:
                done(*runs[path])
            if not quiet:
                console.print(f"{titles[path]}: {'stopped' if fault else 'done'}", highlight=False)
    return stopped


def _run_alone(config: str, path: Path) -> str | None:
    """Run one cell without progress output, in a separate process. Return the fault that stopped it, if any."""
    try:
        start(parse_config(config), path, lambda _: None)
    except (FaultError, TooFewRepliesError) as error:
        return str(error)
    return None
