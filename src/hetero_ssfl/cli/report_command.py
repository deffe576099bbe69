"""`hetero-ssfl report`: parse, call, print. Heavy imports wait until the command runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from .terminal import say


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; the first is the baseline for differences.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    map_: Annotated[
        Literal["pca", "tsne"], typer.Option("--map", help="How to project the RAD images to a plane.")
    ] = "pca",
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
