"""The command `hetero-ssfl run`, and the tree of all commands: parse, call, print.

Imports of torch wait until a command needs them, here and in the other modules.
"""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from ..config import load_config, settings_of
from ..errors import ConfigError, HeteroSSFLError
from . import deploy_commands, info_commands, report_commands, study_commands, use_commands
from .options import SKIP, BadImage, Json, LogFormat, Preset, Quiet, Set, Watch
from .terminal import err, remark, resumable, say, show

if TYPE_CHECKING:
    from ..runs.folder import RunFolder

app = typer.Typer(
    name="hetero-ssfl",
    help="Learn image encoders together from unlabeled data, each participant with its own architecture.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click already names the nearest command
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (report_commands, study_commands, use_commands, info_commands):
    app.add_typer(group.app)
app.add_typer(info_commands.check_app, name="check")
app.add_typer(info_commands.data_app, name="data")
app.add_typer(deploy_commands.app, name="deploy")


def main() -> None:
    """Entry point. An error that the user can fix is printed without a traceback, with exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for Ctrl-C: KeyboardInterrupt
    sys.path.append(str(Path.cwd()))  # finds `my_module:MyEncoder` beside the config; last, so that it hides nothing
    try:
        app()
    except HeteroSSFLError as error:
        remark(f"[red]error:[/] {escape(str(error))}")
        sys.exit(2)
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        if error.filename is None:  # not about a file
            raise
        reason = f"cannot use '{error.filename}': {error.strerror}. Check the path and who may read and write there."
        remark(f"[red]error:[/] {escape(reason)}")
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"hetero-ssfl {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    """Options that every command has."""


@app.command()
def run(
    config: Annotated[str | None, Preset] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run folder; by default a new one in runs/.")] = None,
    set_: Set = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="All rounds of the run, including finished ones.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue a run, or extend it: --rounds.")] = None,
    engine: Annotated[
        Literal["in-process", "simulation"] | None, typer.Option(help="Worker processes, or Flower's simulation (Ray).")
    ] = None,
    node: Annotated[list[Path] | None, typer.Option(metavar="NODE.toml", help="A participant's file; repeat.")] = None,
    on_bad_image: BadImage = None,
    watch: Watch = False,
    log_format: LogFormat = "text",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a federation on this machine; without a config, the preset `demo`.

    Examples:
      hetero-ssfl run smoke
      hetero-ssfl run my.toml --set seed=1 --run-dir runs/a
      hetero-ssfl run --resume runs/a --rounds 30
      hetero-ssfl run federation.toml --node a/node.toml --node b/node.toml
    """
    places = [path for path in (run_dir, resume) if path]
    with resumable(places):
        nodes = [path / "node.toml" if path.is_dir() else path for path in node or ()]
        overrides = [*(set_ or []), *([f"rounds={rounds}"] if rounds else [])]
        if resume is None:
            own = {"data.on_bad_image": on_bad_image, "engine.kind": engine, "clients.count": len(nodes)}
            overrides += [f"{key}={value}" for key, value in own.items() if value]
            loaded, folder = load_config(config or "demo", overrides), None
        elif config or run_dir or on_bad_image or engine or node:
            raise ConfigError("--resume takes the config of its run. Remove all other arguments but --rounds, --set.")
        else:
            folder = _open(resume, overrides)
            if folder is None:
                return
            loaded = folder.read_config()
        if loaded.engine.kind == "in-process":
            from ..federation.engines.forkserver import open_fork_server

            open_fork_server()  # imports torch for the workers while this process imports it for itself
        from ..data import skip_with
        from ..federation.logs import log_event, log_to_stderr
        from ..federation.start import prepare, reopen
        from ..report.progress import RunView

        in_json = log_format == "json"
        if in_json:
            log_to_stderr("run")
        with RunView(err, loaded.name, quiet or in_json, shorter=None if as_json else "--rounds 1") as view:
            with skip_with(None if folder else SKIP):
                prepared = reopen(folder) if folder else prepare(loaded, run_dir, nodes)
            if prepared.continues and not places and not quiet:
                remark(f"continuing the unfinished run in {escape(str(prepared.folder.path))}")
            places.append(prepared.folder.path)
            done = prepared.train(log_event if in_json else view, watch)
        _print_results(done, as_json)


def _open(path: Path, overrides: list[str]) -> "RunFolder | None":
    """Open a run and change its settings. Return None if it has to be continued on another machine."""
    from ..runs.folder import RunFolder, resume_command

    folder = RunFolder.open(path)
    if not overrides:
        return folder
    from ..federation.start import change_settings

    change_settings(folder, settings_of(overrides))
    if not folder.read_facts().elsewhere:
        return folder
    say(f"changed; continue with: {escape(resume_command(path))}")
    return None


def _print_results(folder: "RunFolder", as_json: bool) -> None:
    from ..report.tables import Result, results_table

    result = Result.read(folder)
    unlabeled = "The data has no labels, so the encoders were not probed."
    parts = [results_table(result) if result.results["mean"] else unlabeled]
    if result.facts["skipped_images"]:
        parts.append(f"{result.facts['skipped_images']} bad images were skipped")
    show(as_json, {"run": str(folder.path), **result.results}, *parts, f"run folder: {escape(str(folder.path))}")
