"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..config import preset_names


def configs(incomplete: str) -> list[str]:
    """Return the presets that complete a word. If there are none, the shell offers files."""
    return [name for name in preset_names() if name.startswith(incomplete)]


Preset = typer.Argument(metavar="PRESET|FILE.toml", help="A preset or a config file.", autocompletion=configs)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Metric = Annotated[str, typer.Option(help="Accuracy: linear_all, linear_own (own classes), knn_all, finetune_1%, ...")]
Seeds = Annotated[int, typer.Option(min=1, help="Repetitions, seeds 0 to N-1.")]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write the table as CSV.")]
Latex = Annotated[Path | None, typer.Option("--latex", metavar="FILE", help="Also write the table for LaTeX.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the table as Markdown.")]
SKIP = "--on-bad-image skip"
BadImage = Annotated[Literal["error", "skip"] | None, typer.Option("--on-bad-image", help="How to treat bad images.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: alignment.mu=2.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show a live page of the run; its address is printed.")]
LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="On standard error: for people, or one JSON object per event.")
]
