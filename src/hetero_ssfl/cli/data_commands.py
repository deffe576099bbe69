"""`hetero-ssfl data ...`: parse, call, print. Heavy imports wait until a command needs them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .terminal import BadImage, Json, Set, configs, out, print_json, say

app = typer.Typer(help="Inspect data before training on it.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Inspect data before training on it."""


@app.command()
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
    from ..studies.describe import describe_data

    facts = describe_data(source, [*(set_ or []), *([f"data.on_bad_image={on_bad_image}"] if on_bad_image else [])])
    if plot and "clients" in facts:
        from ..report.plots import draw_holdings

        draw_holdings(facts["clients"], facts["classes"], plot)
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        if key == "clients":
            out.print("images per class of each client:")
            for name, counts in value.items():
                say(f"  {name}  {' '.join(f'{c:5d}' for c in counts)}")
        else:
            say(f"{key:<14} {escape(str(value))}")
