"""What all commands have in common: where they print, and the options that several of them take."""

import json
import sys
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

# Without a terminal rich assumes 80 columns, which breaks tables in log files.
out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
BadImage = Annotated[
    Literal["error", "skip"] | None, typer.Option("--on-bad-image", help="What to do with images that cannot be used.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. alignment.mu=2.")
]


def say(text: str) -> None:
    """One line, never wrapped or coloured: it may be read by a program. Escape what is not ours."""
    out.print(text, highlight=False, soft_wrap=True)


def configs(incomplete: str) -> list[str]:
    """What a shell offers; where no preset begins so, it offers files by itself."""
    from ..config import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2))
