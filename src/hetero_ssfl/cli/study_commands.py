"""The commands about many runs, or one run examined: demo, paper, sweep, audit, theory."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError
from ..runs.schema import StudySection
from ..studies.paper.cells import Scale, TableName, cells_of
from .options import Csv, Json, Latex, Markdown, Metric, Preset, Quiet, Run, Seeds, Set
from .terminal import err, remark, resumable, save_table, show

if TYPE_CHECKING:
    from ..runs.folder import RunFolder

app = typer.Typer()

# These options change how a run is carried out, and not its results.
HARMLESS = ("engine.workers=", "engine.threads=", "engine.device=")


@app.command()
def demo(
    run_dir: Annotated[Path | None, typer.Option(help="The folder of the runs; by default demo-run/seedN.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The random seed.")] = 0,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train five different encoders on embedded digits, alone and together; takes about 3 minutes on 2 cores.

    Example:
      hetero-ssfl demo --seed 1 --run-dir demo-run/second
    """
    from ..report.page import write_report
    from ..studies.demo import demo_rows, demo_table, draw_demo, run_demo, summary_rows, summary_table
    from ..use.encoders import read_rad_features

    folder = run_dir or Path("demo-run", f"seed{seed}")
    picture = folder / "demo.png"
    with resumable():
        results = run_demo(folder, err, [*(set_ or []), f"seed={seed}"], quiet)
        draw_demo(results, picture)
    page = folder / "report.html"
    write_report([result.folder.path for result in results.values()], page, read_rad_features)
    files = {"picture": str(picture), "report": str(page)}
    content = {"rows": demo_rows(results), "means": summary_rows(results), **files}
    lines = [f"picture: {escape(str(picture))}", f"report, to open in a browser: {escape(str(page))}"]
    show(as_json, content, demo_table(results), summary_table(results), *lines)


@app.command()
def paper(
    table: Annotated[TableName, typer.Argument(help="The table of the paper.")],
    scale: Annotated[Scale, typer.Option(help="The size of the experiments.")] = "laptop",
    seeds: Seeds = 1,
    only: Annotated[str | None, typer.Option(help="Only this cell (CIFAR-10/FedEMA), row or column.")] = None,
    metric: Metric = "linear_all",
    root: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/paper"),
    keep: Annotated[Path | None, typer.Option(help="Keep each run's figures here; kept runs are not repeated.")] = None,
    check: Annotated[Path | None, typer.Option(help="Run a cheap cell that is kept here again, and compare.")] = None,
    show_: Annotated[
        Path | None, typer.Option("--show", help="Print the table from the figures kept here; run nothing.")
    ] = None,
    set_: Set = None,
    device: Annotated[str | None, typer.Option(help="Where to train, such as cuda:0; by default cpu.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; each uses engine.workers processes.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cost; train nothing.")] = False,
    csv: Csv = None,
    latex: Latex = None,
    markdown: Markdown = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run or resume the missing cells of one of the paper's tables, and print it beside the paper's figures.

    Examples:
      hetero-ssfl paper table1 --scale smoke
      hetero-ssfl paper table1 --scale full --device cuda:0 --jobs 2
      hetero-ssfl paper table1 --scale workstation --seeds 3 --keep results
      hetero-ssfl paper table1 --scale workstation --check results

    The exit code is 1 if a cell lost a reply, a client or a whole run to a fault (such cells are marked in the table),
    or if --check finds another figure.
    """
    from ..studies.paper import running

    cells = cells_of(table, only)
    overrides = [*([f"engine.device={device}"] if device else []), *(set_ or [])]
    own = [setting for setting in set_ or () if not setting.startswith(HARMLESS)]
    if own and (keep or check):
        raise ConfigError(f"--keep and --check are for the table's own settings. Leave out --set {own[0]}.")
    if check:
        compared = running.check(cells, scale, check, metric, err, overrides)
        show(as_json, compared, _comparison(compared))
        sys.exit(0 if compared["agrees"] else 1)
    if dry_run:
        from ..studies.paper.dry_run import cost_table, costs_of

        costs = [costs_of(cell.name, cell.config(scale, 0, overrides)) for cell in cells]
        show(as_json, {"table": table, "scale": scale, "costs": costs}, cost_table(costs))
        return
    runs = running.Runs(cells, scale, seeds, root, show_ or keep)
    with resumable():
        stopped = {} if show_ else runs.run(err, quiet, overrides, jobs)
    shown = _print_scores(scores := runs.scores(metric, stopped), table, scale, as_json)
    save_table(shown, csv, latex, markdown)
    _tell_losses(scores)


def _print_scores(scores: list[dict[str, Any]], table: TableName, scale: Scale, as_json: bool) -> Table:
    from ..studies.paper.printing import paper_table

    shown = paper_table(table, scores, scale)
    show(as_json, {"table": table, "scale": scale, "cells": scores}, shown)
    return shown


def _tell_losses(scores: list[dict[str, Any]]) -> None:
    """End with exit code 1 if a cell lost anything."""
    lost = [f"[yellow]lost[/] in {escape(entry['cell'])}: {escape(text)}" for entry in scores for text in entry["lost"]]
    for line in lost:
        remark(line)
    if lost:
        sys.exit(1)


def _comparison(repeated: dict[str, Any]) -> str:
    (low, high), kept, cell = repeated["expected"], repeated["kept"], repeated["cell"]
    verdict = f"{'agrees with' if repeated['agrees'] else 'is outside'} {low:.1f} to {high:.1f}"
    interval = f"the 95 % interval for one more run after {len(kept)} kept ones"
    return f"{cell}: {repeated['found']:.1f} {verdict}, {interval} (same seed: {kept[0]:.1f})"


@app.command()
def sweep(
    config: Annotated[str, Preset],
    over: Annotated[list[str], typer.Option(metavar="KEY=A,B,...", help="Values of one setting; repeat for a grid.")],
    seeds: Seeds = 1,
    root: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/sweep"),
    set_: Set = None,
    metric: Metric = "linear_all",
    csv: Csv = None,
    latex: Latex = None,
    markdown: Markdown = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run or resume one config over a grid of settings, and write a table and a plot.

    Example:
      hetero-ssfl sweep my.toml --over alignment.mu=0,4 --over rad.size=100,500
    """
    from ..studies.sweep import Axis, draw_sweep, run_sweep, sweep_table

    axes = [Axis.parse(text) for text in over]
    with resumable():
        rows = run_sweep(config, axes, set_ or [], seeds, root, err, quiet)
    picture = root / "sweep.png"
    draw_sweep(axes, rows, metric, picture)
    content = {"rows": rows, "picture": str(picture)}
    table = sweep_table(axes, rows)
    show(as_json, content, table, f"picture: {escape(str(picture))}")
    save_table(table, csv, latex, markdown)


@app.command()
def audit(
    run: Run,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps of each network that the attacker trains.")] = 60,
    shadows: Annotated[int, typer.Option(min=2, help="Clients that the attacker trains on public images.")] = 20,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack the clients of a run from what their server has, and tell what it could learn.

    Example:
      hetero-ssfl audit runs/a --steps 20 --shadows 10

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
    content: dict[str, Any] = {"attacker": list(ATTACKER), "steps": steps, "shadows": shadows, **audited}
    _leave(folder, "audit.json", content, section(content), as_json)


@app.command()
def theory(
    run: Run,
    steps: Annotated[int, typer.Option(min=1, help="The largest number of gradient steps of a measured round.")] = 8,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the paper's bound on the change of the loss in a round with the measured change.

    Example:
      hetero-ssfl theory runs/a --steps 20

    Every client trains a few steps from its untrained and from its saved networks, which stay as they are. The figures
    are also written to theory.json in the run folder, where `hetero-ssfl report` finds them.
    """
    from ..report.progress import progress
    from ..runs.folder import RunFolder
    from ..studies.theory.measure import measure
    from ..studies.theory.tables import changed_assumptions, section

    folder = RunFolder.open(run)
    with progress(err, "measuring", quiet) as done:
        rounds = measure(folder, steps, done)
    changed = changed_assumptions(folder.read_config())
    content: dict[str, Any] = {"rounds": rounds, "changed_assumptions": changed}
    _leave(folder, "theory.json", content, section(rounds, changed), as_json)


def _leave(folder: "RunFolder", file: str, content: dict[str, Any], section: StudySection, as_json: bool) -> None:
    """Write what a study found to the run folder, where a report finds it, and print it as a report shows it."""
    from ..report.tables import table_of

    folder.write_json(file, {**content, "section": section.model_dump()})
    parts: list[str | Table] = []
    for part in section.tables:
        table = table_of(escape(part.caption), part.head, ([*map(escape, row)] for row in part.rows))
        table.title_justify = "left"
        parts.append(table)
    folded = [
        line for title, texts in section.folded.items() for line in (f"{title}:", *(f"- {text}" for text in texts))
    ]
    show(as_json, {"run": str(folder.path), **content}, *parts, *map(escape, [*section.notes, *folded]))
