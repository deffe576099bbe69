"""The commands of hetero-ssfl: parse, call, print. Heavy imports wait until a command needs them."""

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.markup import escape

from ..errors import HeteroSSFLError
from .check_commands import app as check_app
from .data_commands import app as data_app
from .deploy_commands import app as deploy_app
from .list_commands import app as list_app
from .report_command import report
from .study_commands import audit, compare, demo, paper, sweep, theory
from .terminal import BadImage, Json, Quiet, Set, configs, err, out, print_json, say
from .use_commands import app as use_app

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..config import Config
    from ..runs.folder import RunFolder

app = typer.Typer(
    name="hetero-ssfl",
    help="Learn image encoders together from unlabeled data, each participant with its own architecture.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.add_typer(check_app, name="check")
app.add_typer(list_app)  # list, preset
app.add_typer(use_app)  # embed, export, neighbours

Run = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]


def main() -> None:
    """Entry point. An error that the user can fix is printed without a traceback, with exit code 2."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.path.append(str(Path.cwd()))  # finds `my_module:MyEncoder` beside the config; last, so that it hides nothing
    try:
        app()
    except HeteroSSFLError as error:
        err.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"hetero-ssfl {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that every command has."""


@app.command()
def run(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|FILE.toml", help="A preset or a config file; by default `demo`.", autocompletion=configs
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The run folder; by default runs/NAME-METHOD-seedN, or the next free name.")
    ] = None,
    set_: Set = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="All rounds of the run; with --resume, more than are done.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue an interrupted run; with --rounds, also a finished one."),
    ] = None,
    engine: Annotated[
        Literal["in-process", "simulation"] | None, typer.Option(help="Worker processes, or Flower's simulation (Ray).")
    ] = None,
    node: Annotated[
        list[Path] | None,
        typer.Option(metavar="NODE.toml", help="Settings of one participant, or the folder of node.toml; repeat."),
    ] = None,
    on_bad_image: BadImage = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a federation on this machine.

    Examples:
      hetero-ssfl run smoke
      hetero-ssfl run my.toml --set seed=1 --run-dir runs/a
      hetero-ssfl run --resume runs/a
      hetero-ssfl run --resume runs/a --rounds 30
      hetero-ssfl run --resume runs/a --set optim.lr=0.01
      hetero-ssfl run federation.toml --node a/node.toml --node b/node.toml
    """
    with _told_how_to_resume(run_dir or resume):
        from ..config import load_config
        from ..errors import ConfigError

        node = [path / "node.toml" if path.is_dir() else path for path in node or ()]
        set_ = [*(set_ or []), *([] if rounds is None else [f"rounds={rounds}"])]
        if resume is not None:
            if config or run_dir or on_bad_image or engine or node:
                raise ConfigError(
                    "--resume continues a run with its own config, except for --rounds and --set. "
                    "Remove the other arguments."
                )
            _resume(resume, set_, as_json, quiet)
            return
        overrides = [*set_, *([f"data.on_bad_image={on_bad_image}"] if on_bad_image else [])]
        overrides += [f"engine.kind={engine}"] if engine else []
        overrides += [f"clients.count={len(node)}"] if node else []
        loaded = load_config(config or "demo", overrides)
        _train(loaded, run_dir, as_json, quiet, None, node)


def _resume(path: Path, overrides: list[str], as_json: bool, quiet: bool) -> None:
    from ..runs.folder import RunFolder, resume_command

    folder = RunFolder.open(path)
    if overrides:
        from ..config import settings_of
        from ..federation.start import change_settings

        change_settings(folder, settings_of(overrides))
        if folder.read_facts().elsewhere:
            say(f"changed; continue with: {escape(resume_command(path))}")
            return
    _train(folder.read_config(), folder.path, as_json, quiet, folder)


def _train(
    config: "Config",
    path: Path | None,
    as_json: bool,
    quiet: bool,
    folder: "RunFolder | None",
    nodes: "Sequence[Path]" = (),
) -> None:
    from ..federation.engines.forkserver import open_fork_server

    if config.engine.kind == "in-process":
        open_fork_server()  # imports torch for the workers while this process imports it for itself
    from ..federation.start import prepare, reopen
    from ..report.progress import RunView
    from ..report.tables import Result, results_table

    try:
        with RunView(err, config.name, quiet, shorter=None if as_json else "--rounds 1") as view:
            prepared = prepare(config, path, nodes) if folder is None else reopen(folder)
            if path is None and prepared.continues and not quiet:
                text = f"continuing the unfinished run in {escape(str(prepared.folder.path))}"
                err.print(text, highlight=False, soft_wrap=True)
            path = prepared.folder.path
            folder = prepared.train(view)
    except KeyboardInterrupt:
        _say_how_to_resume(path)
    result = Result.read(folder)
    if as_json:
        print_json({"run": str(folder.path), **result.results})
        return
    if result.results["mean"]:
        out.print(results_table(result))
    else:
        out.print("The data has no labels, so the encoders were not probed.")
    if result.facts["skipped_images"]:
        out.print(f"{result.facts['skipped_images']} bad images were skipped")
    say(f"run folder: {escape(str(folder.path))}")


@contextmanager
def _told_how_to_resume(path: Path | None) -> "Iterator[None]":
    try:
        yield
    except KeyboardInterrupt:
        _say_how_to_resume(path)


def _say_how_to_resume(path: Path | None) -> NoReturn:
    if path and (path / "config.toml").exists():
        from ..runs.folder import resume_command

        text = f"Interrupted. Every finished round is kept; continue with: {resume_command(path)}"
    else:
        text = "Interrupted before training began; nothing was written."
    err.print(escape(text), highlight=False, soft_wrap=True)
    sys.exit(130)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, on the machine of the server.")],
    as_json: Json = False,
) -> None:
    """Show the status of a run and of each participant; for a run that has ended too early, how to continue it.

    Examples:
      hetero-ssfl status runs/a
      watch hetero-ssfl status runs/a
    """
    from ..report.status import read_status, status_table
    from ..runs.folder import RunFolder

    state = read_status(RunFolder.open(run))
    if as_json:
        print_json(state)
        return
    say(escape(state["summary"]))
    out.print(status_table(state))
    if state["last_warning"]:
        out.print(f"last warning: {escape(state['last_warning'])}", highlight=False, soft_wrap=True)


app.command()(demo)


@app.command()
def evaluate(
    run_folder: Run,
    split: Annotated[Literal["validation", "test"], typer.Option(help="The images to test on.")] = "validation",
    images: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Other labeled images to fit probes and test on: a folder, parquet, a name."
        ),
    ] = None,
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

    from ..config import evaluation_config, settings_of
    from ..report.tables import spread
    from ..runs.folder import RunFolder

    folder = RunFolder.open(run_folder)
    results = folder.read_json("results.json")  # of a finished run: probing earlier would invite tuning on the result
    config = evaluation_config(folder.read_config(), settings_of(set_ or []))
    if images is None:
        from ..use.encoders import reevaluate

        clients, classes = reevaluate(folder, config, split), len(folder.read_json("facts.json").get("classes", ()))
    else:
        from ..use.evaluate import evaluate_run_on

        clients, missing, classes = evaluate_run_on(folder, images, config)
        for name, reason in missing.items():
            err.print(f"{name} is left out: {escape(reason)}", highlight=False, soft_wrap=True)
    scores = dict(track(clients, "probing", config.clients.count, console=err, transient=True, disable=quiet))
    if as_json:
        which = {"split": split} if images is None else {"images": images}
        print_json({"run": str(folder.path), **which, "clients": scores})
        return
    for client, values in scores.items():
        out.print(f"{client}  " + "  ".join(f"{key} {value:.1f}" for key, value in values.items()))
    for key in next(iter(scores.values()), {}):
        out.print(f"mean ± sd over clients, {key}: {spread([s[key] for s in scores.values() if key in s])}")
    untrained = results["untrained"] if images is None and split == "test" and not set_ else {}
    for key in results["mean"] if untrained else ():
        out.print(f"the same encoders untrained, {key}: {spread([s[key] for s in untrained.values() if key in s])}")
    if classes:
        out.print(f"chance level: {100 / classes:.1f} (all {classes} classes)")


for command in (compare, report, paper, sweep, audit, theory):
    app.command()(command)
