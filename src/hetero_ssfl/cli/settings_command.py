"""`hetero-ssfl settings`: every setting of a config. Parse, call, print."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from .terminal import Json, out, print_json, say


def settings(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A setting (alignment.mu) or a section (alignment).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print settings with their default, the values they accept and their meaning.

    Examples:
      hetero-ssfl settings
      hetero-ssfl settings alignment
      hetero-ssfl settings optim.lr
    """
    from ..config.reference import all_settings, section_meanings, settings_named

    chosen = settings_named(key) if key else all_settings()
    if as_json:
        print_json({"settings": [asdict(setting) for setting in chosen]})
        return
    if len(chosen) == 1:
        (only,) = chosen
        say(f"[bold]{escape(only.key)}[/] = {escape(only.default) or 'unset'}")
        say(escape(only.meaning))
        say(f"values: {escape(only.values or 'text')}")
        return
    meanings = section_meanings()
    for section in dict.fromkeys(setting.section for setting in chosen):
        title = f"[{section}]" if section else "top level"
        table = Table(title=escape(f"{title} {meanings.get(section, '')}".strip()), title_justify="left", expand=True)
        for name, share in (("setting", 2), ("default", 2), ("values", 3), ("meaning", 5)):
            table.add_column(name, ratio=share, overflow="fold")
        for one in (setting for setting in chosen if setting.section == section):
            words = (one.key.rpartition(".")[2], one.default, one.values, one.meaning)
            table.add_row(*map(escape, words))
        out.print(table)
