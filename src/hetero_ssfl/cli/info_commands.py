"""The commands that only inform: `check` (this machine, a run), `data` (before training), `list` and `preset`."""

import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from ..config import preset_names, preset_text
from ..config.reference import Setting, all_settings, section_meanings, settings_named
from ..errors import ConfigError
from ..runs.environment import Finding, diagnose
from .options import SKIP, BadImage, Json, Run, Set, configs
from .terminal import show

Kind = Literal["encoders", "methods", "losses", "presets", "settings"]

app = typer.Typer()
check_app = typer.Typer(help="Check this machine or the files of a run.", no_args_is_help=True)
data_app = typer.Typer(no_args_is_help=True)


@check_app.command()
def machine(as_json: Json = False) -> None:
    """Check this machine: what is installed, which devices are available, what is missing and how to get it.

    The exit code is 1 if something is missing that every run needs.

    Example:
      hetero-ssfl check machine
    """
    _print_findings(diagnose(), "missing", as_json)


@check_app.command()
def run(run: Run, as_json: Json = False) -> None:
    """Check each file of a run, finished or not, against its digest. The exit code is 1 if one is damaged.

    Example:
      hetero-ssfl check run runs/a
    """
    from ..runs.check import check_run

    _print_findings(check_run(run), "damaged", as_json)


def _print_findings(findings: Iterable[Finding], bad: str, as_json: bool) -> None:
    findings, marks = list(findings), {True: "[green]ok[/]     ", False: f"[yellow]{bad}[/]"}
    lines = [f"{marks[finding.ok]} {finding.what:<18} {escape(finding.text)}" for finding in findings]
    show(as_json, {"findings": [vars(finding) for finding in findings]}, *lines)
    if any(finding.level == "stops" for finding in findings):
        sys.exit(1)


@data_app.callback()
def data() -> None:
    """Inspect data before training on it."""


@data_app.command()
def describe(
    source: Annotated[
        str,
        typer.Argument(help="A preset, a config file, or a data source (name, path, hub id).", autocompletion=configs),
    ] = "demo",
    set_: Set = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the classes of each client to this file.")] = None,
    on_bad_image: BadImage = None,
    as_json: Json = False,
) -> None:
    """Count images, sizes and classes; for a preset or a config, show how they are split among the clients.

    Examples:
      hetero-ssfl data describe path/to/images
      hetero-ssfl data describe my.toml --plot who.png
    """
    from ..data import skip_with
    from ..studies.describe import describe_data

    with skip_with(SKIP):
        facts = describe_data(source, [*(set_ or []), *([f"data.on_bad_image={on_bad_image}"] if on_bad_image else [])])
    clients = facts.get("clients", {})
    if plot and clients:
        from ..report.plots import draw_holdings

        draw_holdings(clients, facts["classes"], plot)
    lines = [f"{key:<14} {escape(str(value))}" for key, value in facts.items() if key != "clients"]
    lines += ["images per class of each client:"] if clients else []
    lines += [f"  {name}  {' '.join(f'{count:5d}' for count in counts)}" for name, counts in clients.items()]
    show(as_json, facts, *lines)


@app.command("list")
def list_(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="encoders, methods, losses, presets or settings.")],
    pattern: Annotated[str | None, typer.Argument(metavar="[PATTERN]", help="A name ('*vit*') or a section.")] = None,
    as_json: Json = False,
) -> None:
    """List the names that a config can use, or its settings with default, accepted values and meaning.

    Examples:
      hetero-ssfl list encoders '*vit*'
      hetero-ssfl list settings alignment
      hetero-ssfl list settings optim.lr
    """
    if kind == "settings":
        settings = settings_named(pattern) if pattern else all_settings()
        show(as_json, {kind: [asdict(setting) for setting in settings]}, *_settings_parts(settings))
        return
    known = _names(kind)
    names = [name for name in known if fnmatchcase(name, pattern or "*")]
    if not names:
        near = difflib.get_close_matches(pattern or "", known, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Print all with: hetero-ssfl list {kind}"
        raise ConfigError(f"none of the {kind} matches '{pattern}'. {hint}")
    show(as_json, {kind: names}, *map(escape, names))


@app.command()
def preset(name: Annotated[str, typer.Argument(help="The name of a preset.", autocompletion=configs)]) -> None:
    """Print a preset, to copy it to a file and edit it.

    Examples:
      hetero-ssfl preset smoke > my.toml
    """
    print(preset_text(name), end="")


def _names(kind: Kind) -> list[str]:
    if kind == "presets":
        return preset_names()
    from ..learning.encoders import list_encoders
    from ..learning.losses import LOCAL_LOSSES
    from ..methods import method_names

    return method_names() if kind == "methods" else list(LOCAL_LOSSES) if kind == "losses" else list_encoders()


def _settings_parts(settings: Sequence[Setting]) -> Iterator[str | Table]:
    """Yield lines about a single setting, or a table for each section."""
    if len(settings) == 1:
        (only,) = settings
        yield f"[bold]{escape(only.key)}[/] = {escape(only.default) or 'unset'}"
        yield from (escape(only.meaning), f"values: {escape(only.values or 'text')}")
        return
    meanings = section_meanings()
    for section in dict.fromkeys(setting.section for setting in settings):
        title = f"[{section}]" if section else "top level"
        table = Table(title=escape(f"{title} {meanings.get(section, '')}".strip()), title_justify="left", expand=True)
        for heading, share in (("setting", 2), ("default", 2), ("values", 3), ("meaning", 5)):
            table.add_column(heading, ratio=share, overflow="fold")
        for one in (setting for setting in settings if setting.section == section):
            table.add_row(*map(escape, (one.key.rpartition(".")[2], one.default, one.values, one.meaning)))
        yield table
