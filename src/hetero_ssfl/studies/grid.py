"""The one runner of many runs. A row is a run folder: what is missing or unfinished is run or resumed, the rest kept.

The demo, sweeps, the paper's tables and the scripts in experiments/ say which rows they want, and what to keep of each.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from rich.progress import track

from ..config import Config, parse_config
from ..errors import FaultError, TooFewRepliesError
from ..federation.engines.forkserver import end_with_parent
from ..federation.start import start
from ..report.progress import RunView
from ..runs.events import Listener
from ..terminal import Console


class Row(NamedTuple):
    name: str  # what a user reads beside the progress of the run
    config: Config
    folder: Path


def run_rows(
    rows: Sequence[Row],
    console: Console,
    quiet: bool = False,
    jobs: int = 1,
    done: Callable[[Row], None] = lambda _: None,
    go_on: bool = False,
    listen: Callable[[RunView, Row], Listener] = lambda view, _: view,
) -> dict[Path, str]:
    """Run or resume the rows, `jobs` at a time. Finished runs are left unchanged. `done` is called after each.

    With `go_on`, a fault or a diverged loss stops only its own run, and its reason is returned; with several jobs this
    is always so. `listen` may wrap what shows the progress of a run.
    """
    stopped: dict[Path, str] = {}
    if jobs == 1:
        for row in rows:
            try:
                with RunView(console, row.name, quiet) as view:
                    start(row.config, row.folder, listen(view, row))
                done(row)
            except (FaultError, TooFewRepliesError) as error:
                if not go_on:
                    raise
                stopped[row.folder] = str(error)
        return stopped
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        waiting = {pool.submit(run_alone, row.config.to_toml(), row.folder): row for row in rows}
        results = track(as_completed(waiting), f"{jobs} runs at a time", len(waiting), console=console, disable=quiet)
        for result in results:
            row, fault = waiting[result], result.result()
            if fault:
                stopped[row.folder] = fault
            else:
                done(row)
            if not quiet:
                console.print(f"{row.name}: {'stopped' if fault else 'done'}", highlight=False)
    return stopped


def run_alone(config: str, path: Path) -> str | None:
    """Run one row without progress output, in a separate process. Return the fault that stopped it, if any."""
    try:
        start(parse_config(config), path, lambda _: None)
    except (FaultError, TooFewRepliesError) as error:
        return str(error)
    return None


def mean_and_deviation(values: Sequence[float], digits: int = 1, sign: str = "") -> str:
    """Return such as "12.3 ± 0.4", or "12.3" for one value."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.{digits}f}{deviation}"
