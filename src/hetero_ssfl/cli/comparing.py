"""Commands about several runs at once: the demo, comparisons, the paper's tables, sweeps. Parse, call, print."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from .terminal import Json, Quiet, Set, configs, err, out, print_json


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
    from ..studies.demo import demo_table, run_demo

    try:
        done = run_demo(run_dir or Path("demo-run", f"seed{seed}"), err, [*(set_ or []), f"seed={seed}"], quiet)
    except KeyboardInterrupt:
        err.print("Interrupted. Run the same command again to continue.")
        sys.exit(130)
    if as_json:
        print_json({"rows": done.rows(), "picture": str(done.picture)})
        return
    out.print(demo_table(done))
    out.print(f"picture: {escape(str(done.picture))}", highlight=False, soft_wrap=True)
    arms = " ".join(shlex.quote(str(result.folder.path)) for result in done.results.values())
    out.print(
        f"write a report of these runs with: hetero-ssfl report {escape(arms)} -o report.html",
        highlight=False,
        soft_wrap=True,
    )


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
    from ..report.tables import Result, check_comparable, compare_rows, compare_table, metric_names
    from ..runs.folder import RunFolder

    results = [Result.read(RunFolder.open(path)) for path in runs]
    check_comparable(results)
    known = metric_names(results[0])
    if metric not in known:
        raise ConfigError(f"unknown metric '{metric}', expected one of {', '.join(known)}.")
    rows = compare_rows(results, metric)
    if plot:
        from ..report import plots

        figure, axes = plots.subplots(figsize=(7, 1 + 0.5 * len(rows)))
        plots.comparison(axes, rows)
        plots.save(figure, plot)
    if as_json:
        print_json({"rows": rows})
    else:
        out.print(compare_table(rows))


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
    from ..errors import ConfigError
    from ..studies.paper import kept
    from ..studies.paper.cells import Cell, cells_of
    from ..studies.paper.printing import paper_table
    from ..studies.paper.running import run_cells
    from ..studies.paper.scores import finished_runs, score

    cells = cells_of(table, only)
    harmless = ("engine.workers=", "engine.threads=", "engine.device=")
    own = [setting for setting in set_ or [] if not setting.startswith(harmless)]
    if own and (keep or check):
        option = "--keep" if keep else "--check"
        raise ConfigError(
            f"{option} is for the table's own settings. Leave out --set {own[0]}; engine.workers, engine.threads and "
            "engine.device may stay."
        )
    overrides = [*([f"engine.device={device}"] if device else []), *(set_ or [])]
    if check:
        compared = kept.check(cells, scale, check, metric, err, overrides)
        if as_json:
            print_json(compared)
        else:
            verdict = "agrees with" if compared["agrees"] else "is outside"
            low, high = compared["expected"]
            out.print(
                f"{compared['cell']}: {compared['found']:.1f} {verdict} {low:.1f} to {high:.1f}, the 95 % interval for "
                f"one more run after {len(compared['kept'])} kept ones (same seed: {compared['kept'][0]:.1f})",
                highlight=False,
                soft_wrap=True,
            )
        sys.exit(0 if compared["agrees"] else 1)
    if dry_run:
        from ..studies.paper.dry_run import cost_table, costs_of

        costs = [costs_of(cell.name, cell.config(scale, 0, overrides)) for cell in cells]
        if as_json:
            print_json({"table": table, "scale": scale, "costs": costs})
        else:
            out.print(cost_table(costs))
        return

    def known(cell: Cell, seed: int) -> bool:
        return keep is not None and kept.is_kept(keep, cell, scale, seed)

    def done(cell: Cell, seed: int) -> None:
        if keep is not None:
            kept.keep(cell, scale, seed, root, keep)

    try:
        stopped = {} if show else run_cells(cells, scale, seeds, root, err, quiet, overrides, jobs, known, done)
    except KeyboardInterrupt:
        err.print("Interrupted. Finished cells are kept. Run the same command again to continue.")
        sys.exit(130)
    files = show or keep
    runs = {c: kept.kept_runs(files, c, scale) if files else finished_runs(c, scale, seeds, root) for c in cells}
    faults = {c: [stopped[p] for k in range(seeds) if (p := c.folder(root, scale, k)) in stopped] for c in cells}
    scores = [score(cell, runs[cell], metric, faults[cell]) for cell in cells]
    if as_json:
        print_json({"table": table, "scale": scale, "cells": scores})
    else:
        out.print(paper_table(table, scores, scale))
    for entry in scores:
        for text in entry["lost"]:
            err.print(f"[yellow]lost[/] in {escape(entry['cell'])}: {escape(text)}", highlight=False, soft_wrap=True)
    if any(entry["lost"] for entry in scores):
        sys.exit(1)


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
    try:
        rows = run_sweep(config, axes, set_ or [], seeds, root, err, quiet)
    except KeyboardInterrupt:
        err.print("Interrupted. Finished runs are kept. Run the same command again to continue.")
        sys.exit(130)
    picture = root / "sweep.png"
    draw_sweep(axes, rows, metric, picture)
    if as_json:
        print_json({"rows": rows, "picture": str(picture)})
        return
    out.print(sweep_table(axes, rows))
    out.print(f"picture: {escape(str(picture))}", highlight=False, soft_wrap=True)
