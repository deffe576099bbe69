"""Consoles and options that several commands use."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from ..terminal import Console

if TYPE_CHECKING:
    from ..runs.schema import StudySection

# Without a terminal rich assumes 80 columns, which breaks tables in log files.
out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
BadImage = Annotated[
    Literal["error", "skip"] | None, typer.Option("--on-bad-image", help="What to do with images that cannot be used.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. alignment.mu=2.")
]


def say(text: str) -> None:
    """Print one line without wrapping or highlighting, so that programs can read it. Escape user text first."""
    out.print(text, highlight=False, soft_wrap=True)


def configs(incomplete: str) -> list[str]:
    """Return the presets that complete a word. If there are none, the shell offers files."""
    from ..config import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def print_section(section: "StudySection") -> None:
    """Print what a study found, as a report shows it."""
    for part in section.tables:
        table = Table(title=escape(part.caption), title_justify="left")
        for number, name in enumerate(part.head):
            table.add_column(name, justify="right" if number else "left")
        for row in part.rows:
            table.add_row(*map(escape, row))
        out.print(table)
    for text in section.notes:
        say(escape(text))
    for title, texts in section.folded.items():
        say(f"{escape(title)}:")
        for text in texts:
            say(f"- {escape(text)}")


def print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2))
