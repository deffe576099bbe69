"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.markup import escape

from .deploy.commands import app as deploy_app
from .errors import HeteroSSFLError
from .report.commands import report
from .studies import compare, demo, paper, sweep
from .terminal import Json, Quiet, Set, configs, err, out, print_json
from .use.commands import app as use_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .config import Config
    from .runs import RunFolder

app = typer.Typer(
    name="hetero-ssfl",
    help="Learn image encoders together from unlabeled data, each participant with its own architecture.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at data before training on it.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.add_typer(use_app)  # embed, export, neighbours

Run = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]
BadImage = Annotated[
    Literal["error", "skip"] | None, typer.Option("--on-bad-image", help="What to do with images that cannot be used.")
]


def main() -> None:
    """Entry point: what a user can mend is one sentence and exit code 2, never a traceback."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.path.append(str(Path.cwd()))  # `my_module:MyEncoder` beside the config; last, so that it hides nothing
    try:
        app()
    except HeteroSSFLError as error:
        err.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _show_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

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
        typer.Argument(metavar="PRESET|FILE.toml", help="`demo` if left out.", autocompletion=configs),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where to keep it; by default runs/NAME-METHOD-seedN.")] = None,
    set_: Set = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run.")] = None,
    engine: Annotated[
        Literal["in-process", "simulation"] | None, typer.Option(help="Worker processes, or Flower's simulation (Ray).")
    ] = None,
    node: Annotated[
        list[Path] | None, typer.Option(metavar="NODE.toml", help="A participant's own settings file; one for each.")
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
      hetero-ssfl run federation.toml --node a/node.toml --node b/node.toml
    """
    from .config import load_config
    from .errors import ConfigError

    if resume is not None:
        if config or set_ or run_dir or on_bad_image or engine or node:
            raise ConfigError("--resume goes on with the run as it was: name nothing else than its folder.")
        from .runs import RunFolder

        folder = RunFolder.open(resume)
        _train(folder.config, folder.path, as_json, quiet, folder)
        return
    overrides = [*(set_ or []), *([f"data.on_bad_image={on_bad_image}"] if on_bad_image else [])]
    overrides += [f"engine.kind={engine}"] if engine else []
    overrides += [f"clients.count={len(node)}"] if node else []
    settings = load_config(config or "demo", overrides)
    path = run_dir or Path("runs", f"{settings.name}-{settings.method}-seed{settings.seed}")
    _train(settings, path, as_json, quiet, None, node or ())


def _train(
    config: "Config",
    path: Path,
    as_json: bool,
    quiet: bool,
    folder: "RunFolder | None",
    nodes: "Sequence[Path]" = (),
) -> None:
    from .federation.nursery import open_nursery

    if config.engine.kind == "in-process":
        open_nursery()  # it imports torch for the workers while this process does so for itself
    from .federation import resume, start
    from .progress import RunView
    from .report.tables import Result, results_table

    try:
        with RunView(err, config.name, quiet) as view:
            folder = start(config, path, view, nodes) if folder is None else resume(folder, view)
    except KeyboardInterrupt:
        _say_how_to_resume(path)
    assert folder is not None
    result = Result.read(folder)
    if as_json:
        print_json({"run": str(folder.path), **result.results})
        return
    if result.results["mean"]:
        out.print(results_table(result))
    else:
        out.print("No labels: nothing to probe.")
    if result.facts["skipped_images"]:
        out.print(f"{result.facts['skipped_images']} bad images were skipped")
    out.print(f"run folder: {escape(str(folder.path))}", highlight=False, soft_wrap=True)


def _say_how_to_resume(path: Path) -> NoReturn:
    if (path / "config.toml").exists():
        from .runs import resume_command

        text = f"Interrupted. Every finished round is kept; go on with: {resume_command(path)}"
    else:
        text = "Interrupted before training began; nothing was written."
    err.print(escape(text), highlight=False, soft_wrap=True)
    sys.exit(130)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, on the machine of the server.")],
    as_json: Json = False,
) -> None:
    """Say what a run is doing, and how each participant fares.

    Examples:
      hetero-ssfl status runs/a
      watch hetero-ssfl status runs/a
    """
    from .report.status import read_status, status_table
    from .runs import RunFolder

    found = read_status(RunFolder.open(run))
    if as_json:
        print_json(found)
        return
    out.print(found["summary"], highlight=False)
    out.print(status_table(found))
    if found["last_warning"]:
        out.print(f"last warning: {escape(found['last_warning'])}", highlight=False, soft_wrap=True)


app.command()(demo)


@app.command()
def evaluate(
    run_folder: Run,
    split: Annotated[Literal["validation", "test"], typer.Option(help="Which images.")] = "validation",
    set_: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Probe a run's encoders again, with other settings if wanted.

    Examples:
      hetero-ssfl evaluate runs/a
      hetero-ssfl evaluate runs/a --split test --set evaluation.labels_per_class=10
    """
    from rich.progress import track

    from .config import parse_config
    from .errors import ConfigError
    from .federation import reevaluate
    from .report.tables import spread
    from .runs import RunFolder

    folder = RunFolder.open(run_folder)
    folder.read_json("results.json")  # only a finished run: probing in between would be tuning on what comes out
    for override in set_ or []:
        if not override.startswith("evaluation."):
            raise ConfigError(f"'{override}' is not about evaluation: only evaluation.* can change for a finished run.")
    config = parse_config(folder.config.to_toml(), set_ or [])
    clients = reevaluate(folder, config, split)
    scores = dict(track(clients, "probing", config.clients.count, console=err, transient=True, disable=quiet))
    if as_json:
        print_json({"run": str(folder.path), "split": split, "clients": scores})
        return
    for client, values in scores.items():
        out.print(f"{client}  " + "  ".join(f"{key} {value:.1f}" for key, value in values.items()))
    for key in next(iter(scores.values()), {}):
        out.print(f"mean ± sd over clients, {key}: {spread([s[key] for s in scores.values()])}")


for command in (compare, report, paper, sweep):
    app.command()(command)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which devices there are, what is missing and how to get it.

    Examples:
      hetero-ssfl doctor
      hetero-ssfl doctor --json
    """
    from .doctor import diagnose

    findings = diagnose()
    if as_json:
        print_json({"findings": [vars(f) for f in findings]})
    else:
        for finding in findings:
            mark = "[green]ok[/]     " if finding.ok else "[yellow]missing[/]"
            out.print(f"{mark} {finding.what:<18} {escape(finding.text)}", highlight=False, soft_wrap=True)
    if any(f.required and not f.ok for f in findings):
        sys.exit(1)


@data_app.command()
def describe(
    source: Annotated[
        str,
        typer.Argument(help="A preset, a config file, or a data source (name, path, hub id).", autocompletion=configs),
    ] = "demo",
    set_: Set = None,
    plot: Annotated[Path | None, typer.Option(help="Draw who holds what into this file.")] = None,
    on_bad_image: BadImage = None,
    as_json: Json = False,
) -> None:
    """Count images, sizes and classes; for a preset or a config, show how the clients share them.

    Examples:
      hetero-ssfl data describe path/to/images
      hetero-ssfl data describe my.toml --plot who.png
    """
    from .config import load_config, parse_config, preset_names
    from .data import load_images
    from .federation.simulated import set_up

    overrides = [*(set_ or []), *([f"data.on_bad_image={on_bad_image}"] if on_bad_image else [])]
    shared = source in preset_names() or source.endswith(".toml")
    config = load_config(source, overrides) if shared else parse_config("", [f"data.source='{source}'", *overrides])
    train, test = load_images(config.data, "train"), load_images(config.data, "test")
    facts: dict[str, Any] = {
        "source": config.data.source,
        "train_images": len(train),
        "test_images": len(test),
        "shape": list(train.pixels.shape[1:]),
        "classes": list(train.classes),
        "labels": train.labels is not None,
        "skipped": train.skipped + test.skipped,
    }
    if train.labels is not None and not shared:
        facts["images_per_class"] = train.labels.bincount().tolist()
    elif train.labels is not None:
        setup = set_up(config)
        facts |= {
            "rad_images": len(setup.rad),
            "rad_digest": setup.facts["rad_digest"],
            "clients": setup.facts["holdings"],
        }
    if plot and "clients" in facts:
        from .report import plots

        figure, axes = plots.subplots(figsize=(7, 4.5))
        plots.holdings(axes, facts["clients"], facts["classes"])
        plots.save(figure, plot)
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        if key == "clients":
            out.print("images per class of each client:")
            for name, counts in value.items():
                out.print(f"  {name}  {' '.join(f'{c:5d}' for c in counts)}", highlight=False, soft_wrap=True)
        else:
            out.print(f"{key:<14} {escape(str(value))}", highlight=False, soft_wrap=True)
