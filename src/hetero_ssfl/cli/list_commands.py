"""`hetero-ssfl list` and `hetero-ssfl preset`: what a config can name. Parse, call, print."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from .terminal import Json, configs, out, print_json, say

if TYPE_CHECKING:
    from ..config.reference import Setting

Kind = Literal["encoders", "methods", "losses", "presets", "settings"]

app = typer.Typer()


@app.command("list")
def list_(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="encoders, methods, losses, presets or settings.")],
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="[PATTERN]", help="A name, with wildcards such as '*vit*'; a section of settings."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the names that a config can use, or its settings with default, accepted values and meaning.

    Examples:
      hetero-ssfl list encoders '*vit*'
      hetero-ssfl list methods
      hetero-ssfl list settings
      hetero-ssfl list settings alignment
      hetero-ssfl list settings optim.lr
    """
    if kind == "settings":
        from ..config.reference import all_settings, settings_named

        settings = settings_named(pattern) if pattern else all_settings()
        if as_json:
            print_json({kind: [asdict(setting) for setting in settings]})
        else:
            _print_settings(settings)
        return
    known = list(_names(kind))
    names = [name for name in known if fnmatchcase(name, pattern or "*")]
    if not names:
        from ..errors import ConfigError

        near = difflib.get_close_matches(pattern or "", known, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Print all with: hetero-ssfl list {kind}"
        raise ConfigError(f"none of the {kind} matches '{pattern}'. {hint}")
    if as_json:
        print_json({kind: names})
        return
    for name in names:
        say(escape(name))


@app.command()
def preset(
    name: Annotated[str, typer.Argument(help="The name of a preset.", autocompletion=configs)],
) -> None:
    """Print a preset, to copy it to a file and edit it.

    Examples:
      hetero-ssfl preset smoke > my.toml
    """
    from ..config import preset_text

    print(preset_text(name), end="")


def _names(kind: Kind) -> Iterable[str]:
    if kind == "presets":
        from ..config import preset_names

        return preset_names()
    if kind == "methods":
        from ..methods import method_names

        return method_names()
    if kind == "losses":
        from ..learning.losses import LOCAL_LOSSES

        return LOCAL_LOSSES
    from ..learning.encoders import list_encoders

    return list_encoders()


def _print_settings(settings: "Sequence[Setting]") -> None:
    from ..config.reference import section_meanings

    if len(settings) == 1:
        (only,) = settings
        say(f"[bold]{escape(only.key)}[/] = {escape(only.default) or 'unset'}")
        say(escape(only.meaning))
        say(f"values: {escape(only.values or 'text')}")
        return
    meanings = section_meanings()
    for section in dict.fromkeys(setting.section for setting in settings):
        title = f"[{section}]" if section else "top level"
        table = Table(title=escape(f"{title} {meanings.get(section, '')}".strip()), title_justify="left", expand=True)
        for heading, share in (("setting", 2), ("default", 2), ("values", 3), ("meaning", 5)):
            table.add_column(heading, ratio=share, overflow="fold")
        for one in (setting for setting in settings if setting.section == section):
            table.add_row(*map(escape, (one.key.rpartition(".")[2], one.default, one.values, one.meaning)))
        out.print(table)
