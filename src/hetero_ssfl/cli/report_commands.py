"""The commands about finished or running runs: status, evaluate, compare, report."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from ..config import evaluation_config, settings_of
from ..errors import ConfigError
from .options import Csv, Json, Latex, Markdown, Metric, Quiet, Run, Set
from .terminal import err, remark, save_table, say, show

app = typer.Typer()


@app.command()
def status(
    run: Run,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with code 1 if the run has ended too early or is stuck.")
    ] = False,
    max_silence: Annotated[
        float | None, typer.Option(help="Seconds without an event after which it is stuck; by default the round's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the status of a run and of each participant; for a run that has ended too early, how to continue it.

    Use it on the machine of the server. With --check, cron, systemd and containers can call it.

    Examples:
      hetero-ssfl status runs/a
      hetero-ssfl status runs/a --check --max-silence 7200
      watch hetero-ssfl status runs/a
    """
    from ..report.status import read_status, status_table
    from ..runs.folder import RunFolder

    state = read_status(RunFolder.open(run), max_silence=max_silence)
    warning = [f"last warning: {escape(state['last_warning'])}"] if state["last_warning"] else []
    show(as_json, state, escape(state["summary"]), status_table(state), *warning)
    if check and state["phase"] in ("stopped", "stalled", "not started"):
        sys.exit(1)


@app.command()
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Run folders.", show_default=False)],
    address: Annotated[str, typer.Option(help="HOST:PORT; 0 for any free port.")] = "127.0.0.1:8765",
) -> None:
    """Show a live page of one or more runs, going on or finished, until you press Ctrl-C. It only reads their folders.

    Other machines can see it only if --address is not a local one, and with the token that is printed then, or with
    your own: HETERO_SSFL_WATCH_TOKEN. Prometheus can read its /metrics.

    Examples:
      hetero-ssfl watch runs/a
      hetero-ssfl watch runs/a runs/b --address 0.0.0.0:8765
    """
    from ..federation.watching import open_page
    from ..report.live import LiveRuns
    from ..report.serving import watch as serve

    live = LiveRuns(runs)
    listener, token, url = open_page(address)
    say(f"live page: {escape(url)}")
    with suppress(KeyboardInterrupt):
        serve(live, listener, token)


@app.command()
def evaluate(
    run: Run,
    split: Annotated[Literal["validation", "test"], typer.Option(help="The images to test on.")] = "validation",
    images: Annotated[str | None, typer.Option(metavar="SOURCE", help="Other labeled images to test on.")] = None,
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Probe the encoders of a finished run again, on its own images or on others.

    With --images, a probe is fitted on one part of the other images and tested on the rest: their own test split, or a
    fixed fifth. They need one folder per class (or a label column), but not the classes of the run.

    Examples:
      hetero-ssfl evaluate runs/a
      hetero-ssfl evaluate runs/a --split test --set evaluation.labels_per_class=10
      hetero-ssfl evaluate runs/a --images new-images
    """
    from rich.progress import track

    from ..federation.participants import open_site
    from ..report.tables import spread
    from ..runs.folder import RunFolder
    from ..use.encoders import encoders_of, evaluate_on, reevaluate

    folder = RunFolder.open(run)
    results = folder.read_json("results.json")  # of a finished run: probing earlier would invite tuning on the result
    config = evaluation_config(folder.read_config(), settings_of(set_ or []))
    if images is None:
        clients, classes = reevaluate(folder, config, split), len(folder.read_facts().classes)
    else:
        built = encoders_of(folder, open_site(folder))
        clients, classes = evaluate_on(built, images, None, None, config)
        for name, reason in built.missing.items():
            remark(f"{name} is left out: {escape(reason)}")
    scores = dict(track(clients, "probing", config.clients.count, console=err, transient=True, disable=quiet))

    def means(what: str, of: Mapping[str, Mapping[str, float]]) -> list[str]:
        metrics = next(iter(of.values()), {})
        return [f"{what}, {key}: {spread([values[key] for values in of.values() if key in values])}" for key in metrics]

    lines = [
        f"{client}  " + "  ".join(f"{key} {value:.1f}" for key, value in values.items())
        for client, values in scores.items()
    ]
    lines += means("mean ± sd over clients", scores)
    if images is None and split == "test" and not set_:
        lines += means("the same encoders untrained", results["untrained"])
    lines += [f"chance level: {100 / classes:.1f} (all {classes} classes)"] if classes else []
    which = {"split": split} if images is None else {"images": images}
    show(as_json, {"run": str(folder.path), **which, "clients": scores}, *lines)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs; those that differ only in seed are grouped.")],
    metric: Metric = "linear_all",
    rounds: Annotated[bool, typer.Option("--rounds", help="Validation accuracies of each round instead.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also plot the comparison to this file.")] = None,
    csv: Csv = None,
    latex: Latex = None,
    markdown: Markdown = None,
    as_json: Json = False,
) -> None:
    """Compare runs: mean and spread over seeds and clients, and the difference to the first run.

    Example:
      hetero-ssfl compare runs/a runs/b --metric knn_all --plot comparison.png
      hetero-ssfl compare runs/a runs/b --latex comparison.tex
      hetero-ssfl compare runs/a runs/b --rounds --csv curves.csv
    """
    from ..report import tables
    from ..report.tables import Result, check_comparable, compare_rows, compare_table, floor_rows, metric_names
    from ..runs.folder import RunFolder

    results = [Result.read(RunFolder.open(path)) for path in runs]
    check_comparable(results)
    known = metric_names(results[0])
    if metric not in known:
        raise ConfigError(f"unknown metric '{metric}', expected one of {', '.join(known)}.")
    if rounds:
        curves = tables.round_curves(results, metric)
        if not any(curves):
            raise ConfigError(f"no run has '{metric}' between rounds. Train with evaluation.every = 1.")
        table = tables.rounds_table(results, curves, metric)
        show(as_json, {"runs": [str(path) for path in runs], "curves": curves}, table)
        save_table(table, csv, latex, markdown)
        return
    rows, floors = compare_rows(results, metric), floor_rows(results, metric)
    if plot:
        from ..report import plots

        figure, axes = plots.subplots(figsize=(7, 1 + 0.5 * len(rows)))
        plots.comparison(axes, rows)
        plots.save(figure, plot)
    table = compare_table(rows, floors)
    show(as_json, {"rows": rows, "floors": floors}, table)
    save_table(table, csv, latex, markdown)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is the baseline.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    map_: Annotated[Literal["pca", "tsne"], typer.Option("--map", help="How to project images to a plane.")] = "pca",
) -> None:
    """Write a report of one or more runs as a single HTML page that works offline.

    Examples:
      hetero-ssfl report runs/a
      hetero-ssfl report demo-run/seed0/alone demo-run/seed0/together -o demo.html
      hetero-ssfl report runs/a --map tsne
    """
    from ..report.page import write_report
    from ..use.encoders import read_rad_features

    write_report(runs, output, read_rad_features, map_)
    say(f"report: {escape(str(output))}")
