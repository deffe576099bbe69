"""Commands about many runs, or one run examined: demo, compare, paper, sweep, audit, theory. Parse, call, print."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.markup import escape

from .terminal import Json, Quiet, Set, configs, err, out, print_json, print_section, say

if TYPE_CHECKING:
    from ..runs.folder import RunFolder
    from ..runs.schema import StudySection
    from ..studies.paper.cells import Cell, Scale, TableName

# These options change how a run is carried out, and not its results.
HARMLESS = ("engine.workers=", "engine.threads=", "engine.device=")


@contextmanager
def _resumable() -> Iterator[None]:
    """Say how to continue when the user interrupts."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("Interrupted. Finished runs are kept. Run the same command again to continue.")
        sys.exit(130)


def demo(
    run_dir: Annotated[Path | None, typer.Option(help="The folder of the runs; by default demo-run/seedN.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The random seed.")] = 0,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train five different encoders on embedded digits, alone and together; takes about 3 minutes on 2 cores.

    Examples:
      hetero-ssfl demo
      hetero-ssfl demo --seed 1 --run-dir demo-run/second
    """
    from ..studies.demo import demo_rows, demo_table, draw_demo, run_demo, summary_rows, summary_table

    folder = run_dir or Path("demo-run", f"seed{seed}")
    picture = folder / "demo.png"
    with _resumable():
        results = run_demo(folder, err, [*(set_ or []), f"seed={seed}"], quiet)
        draw_demo(results, picture)
    if as_json:
        print_json({"rows": demo_rows(results), "means": summary_rows(results), "picture": str(picture)})
        return
    out.print(demo_table(results))
    out.print(summary_table(results))
    say(f"picture: {escape(str(picture))}")
    arms = " ".join(shlex.quote(str(result.folder.path)) for result in results.values())
    say(f"write a report of these runs with: hetero-ssfl report {escape(arms)} -o report.html")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Finished run folders; runs that differ only in seed are grouped.")
    ],
    metric: Annotated[str, typer.Option(help="The accuracy to compare.")] = "linear_all",
    plot: Annotated[Path | None, typer.Option(help="Also plot the comparison to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: mean and spread over seeds and clients, and the difference to the first run.

    Examples:
      hetero-ssfl compare runs/a runs/b
      hetero-ssfl compare runs/a runs/b --metric knn_all --plot comparison.png
    """
    from ..errors import ConfigError
    from ..report.tables import Result, check_comparable, compare_rows, compare_table, floor_rows, metric_names
    from ..runs.folder import RunFolder

    results = [Result.read(RunFolder.open(path)) for path in runs]
    check_comparable(results)
    known = metric_names(results[0])
    if metric not in known:
        raise ConfigError(f"unknown metric '{metric}', expected one of {', '.join(known)}.")
    rows, floors = compare_rows(results, metric), floor_rows(results, metric)
    if plot:
        from ..report import plots

        figure, axes = plots.subplots(figsize=(7, 1 + 0.5 * len(rows)))
        plots.comparison(axes, rows)
        plots.save(figure, plot)
    if as_json:
        print_json({"rows": rows, "floors": floors})
    else:
        out.print(compare_table(rows, floors))


def paper(
    table: Annotated[Literal["table1", "table2", "table3", "table4"], typer.Argument(help="The table of the paper.")],
    scale: Annotated[
        Literal["full", "workstation", "laptop", "smoke"], typer.Option(help="The size of the experiments.")
    ] = "laptop",
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions, seeds 0 to N-1.")] = 1,
    only: Annotated[str | None, typer.Option(help="Only this cell (CIFAR-10/FedEMA), row or column.")] = None,
    metric: Annotated[
        str, typer.Option(help="linear_all, linear_own (only the client's own classes), knn_all, finetune_1%, ...")
    ] = "linear_all",
    root: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/paper"),
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep each run's figures as a small file here; runs that are kept are not repeated."),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Run a cheap cell that is kept here again, and compare; print no table.")
    ] = None,
    show: Annotated[Path | None, typer.Option(help="Print the table from the figures kept here; run nothing.")] = None,
    set_: Set = None,
    device: Annotated[str | None, typer.Option(help="Where to train, such as cuda:0; by default cpu.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; each uses engine.workers processes.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, train nothing, print the cost.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run or resume the missing cells of one of the paper's tables, and print it beside the paper's figures.

    Examples:
      hetero-ssfl paper table1 --scale smoke
      hetero-ssfl paper table4 --seeds 3
      hetero-ssfl paper table1 --scale full --dry-run
      hetero-ssfl paper table1 --scale full --device cuda:0 --jobs 2
      hetero-ssfl paper table1 --scale workstation --seeds 3 --keep results
      hetero-ssfl paper table1 --scale workstation --check results

    The exit code is 1 if a cell lost a reply, a client or a whole run to a fault (such cells are marked in the table),
    or if --check finds another figure.
    """
    from ..studies.paper.cells import cells_of
    from ..studies.paper.running import run_cells, scores_of

    cells = cells_of(table, only)
    overrides = [*([f"engine.device={device}"] if device else []), *(set_ or [])]
    if keep or check:
        _refuse_own_settings(set_ or [], "--keep" if keep else "--check")
    if check:
        _check_kept(cells, scale, check, metric, overrides, as_json)
    if dry_run:
        _print_costs(cells, table, scale, overrides, as_json)
        return
    with _resumable():
        stopped = {} if show else run_cells(cells, scale, seeds, root, err, quiet, overrides, jobs, keep)
    scores = scores_of(cells, scale, seeds, root, metric, stopped, show or keep)
    _print_scores(scores, table, scale, as_json)


def _print_scores(scores: list[dict[str, Any]], table: "TableName", scale: "Scale", as_json: bool) -> None:
    from ..studies.paper.printing import paper_table

    if as_json:
        print_json({"table": table, "scale": scale, "cells": scores})
    else:
        out.print(paper_table(table, scores, scale))
    for entry in scores:
        for text in entry["lost"]:
            err.print(f"[yellow]lost[/] in {escape(entry['cell'])}: {escape(text)}", highlight=False, soft_wrap=True)
    if any(entry["lost"] for entry in scores):
        sys.exit(1)


def _refuse_own_settings(settings: list[str], option: str) -> None:
    from ..errors import ConfigError

    own = [setting for setting in settings if not setting.startswith(HARMLESS)]
    if own:
        raise ConfigError(
            f"{option} is for the table's own settings. Leave out --set {own[0]}; engine.workers, engine.threads and "
            "engine.device may stay."
        )


def _check_kept(
    cells: "Sequence[Cell]", scale: "Scale", kept: Path, metric: str, overrides: list[str], as_json: bool
) -> NoReturn:
    from ..studies.paper.running import check

    compared = check(cells, scale, kept, metric, err, overrides)
    if as_json:
        print_json(compared)
    else:
        verdict = "agrees with" if compared["agrees"] else "is outside"
        low, high = compared["expected"]
        say(
            f"{compared['cell']}: {compared['found']:.1f} {verdict} {low:.1f} to {high:.1f}, the 95 % interval for "
            f"one more run after {len(compared['kept'])} kept ones (same seed: {compared['kept'][0]:.1f})"
        )
    sys.exit(0 if compared["agrees"] else 1)


def _print_costs(cells: "Sequence[Cell]", table: str, scale: str, overrides: list[str], as_json: bool) -> None:
    from ..studies.paper.dry_run import cost_table, costs_of

    costs = [costs_of(cell.name, cell.config(scale, 0, overrides)) for cell in cells]
    if as_json:
        print_json({"table": table, "scale": scale, "costs": costs})
    else:
        out.print(cost_table(costs))


def sweep(
    config: Annotated[
        str, typer.Argument(metavar="PRESET|FILE.toml", help="A preset or a config file.", autocompletion=configs)
    ],
    over: Annotated[list[str], typer.Option(metavar="KEY=A,B,...", help="Values of one setting; repeat for a grid.")],
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions, seeds 0 to N-1.")] = 1,
    root: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/sweep"),
    set_: Set = None,
    metric: Annotated[str, typer.Option(help="The accuracy to plot.")] = "linear_all",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run or resume one config over a grid of settings, and write a table and a plot.

    Examples:
      hetero-ssfl sweep smoke --over alignment.mu=0,1,4
      hetero-ssfl sweep my.toml --over alignment.mu=0,4 --over rad.size=100,500
    """
    from ..studies.sweep import Axis, draw_sweep, run_sweep, sweep_table

    axes = [Axis.parse(text) for text in over]
    with _resumable():
        rows = run_sweep(config, axes, set_ or [], seeds, root, err, quiet)
    picture = root / "sweep.png"
    draw_sweep(axes, rows, metric, picture)
    if as_json:
        print_json({"rows": rows, "picture": str(picture)})
        return
    out.print(sweep_table(axes, rows))
    say(f"picture: {escape(str(picture))}")


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a simulated run.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps of each network that the attacker trains.")] = 60,
    shadows: Annotated[int, typer.Option(min=2, help="Clients that the attacker trains on public images.")] = 20,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack the clients of a run from what their server has, and tell what it could learn.

    Examples:
      hetero-ssfl audit runs/a
      hetero-ssfl audit runs/a --steps 20 --shadows 10 --json

    Three attacks: which classes a client holds, whether an image was in its training data, and stealing its encoder.
    Each from the contribution as sent, from sketches, from sums over several clients, and with noise. The figures are
    also written to audit.json in the run folder, where `hetero-ssfl report` finds them.
    """
    from ..report.progress import progress
    from ..runs.folder import RunFolder
    from ..studies.audit.measure import ATTACKER, measure
    from ..studies.audit.tables import section

    folder = RunFolder.open(run)
    with progress(err, "attacking", quiet) as done:
        audited = measure(folder, steps, shadows, workers or os.cpu_count() or 1, done)
    content: dict[str, Any] = {"attacker": list(ATTACKER), "steps": steps, "shadows": shadows, **audited.to_json()}
    _leave(folder, "audit.json", content, section(content), as_json)


def theory(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="The largest number of gradient steps of a measured round.")] = 8,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the paper's bound on the change of the loss in a round with the measured change.

    Examples:
      hetero-ssfl theory runs/a
      hetero-ssfl theory runs/a --steps 20 --json

    Every client trains a few steps from its untrained and from its saved networks, which stay as they are. The figures
    are also written to theory.json in the run folder, where `hetero-ssfl report` finds them.
    """
    from ..report.progress import progress
    from ..runs.folder import RunFolder
    from ..studies.theory.assumptions import changed_assumptions
    from ..studies.theory.measure import measure
    from ..studies.theory.tables import section

    folder = RunFolder.open(run)
    with progress(err, "measuring", quiet) as done:
        rounds = measure(folder, steps, done)
    changed = changed_assumptions(folder.read_config())
    content: dict[str, Any] = {"rounds": rounds, "changed_assumptions": changed}
    _leave(folder, "theory.json", content, section(rounds, changed), as_json)


def _leave(folder: "RunFolder", file: str, content: dict[str, Any], section: "StudySection", as_json: bool) -> None:
    """Write what a study found to the run folder, where a report finds it, and print it."""
    folder.write_json(file, {**content, "section": section.model_dump()})
    if as_json:
        print_json({"run": str(folder.path), **content})
    else:
        print_section(section)
