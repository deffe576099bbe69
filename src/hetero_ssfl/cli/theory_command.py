"""`hetero-ssfl theory`: parse, call, print. Heavy imports wait until the command runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..studies.theory.words import FILE, HEAD, as_content, findings, rows
from .terminal import Json, Quiet, err, out, print_json, say


def theory(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="The largest number of gradient steps of a measured round.")] = 8,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the paper's bound on the change of the loss in a round with the measured change.

    Examples:
      hetero-ssfl theory runs/a
      hetero-ssfl theory runs/a --steps 20 --json

    Every client trains a few steps from its untrained and from its saved networks, which stay as they are. The figures
    are also written to theory.json in the run folder, where `hetero-ssfl report` finds them.
    """
    from ..report.progress import progress
    from ..runs.folder import RunFolder
    from ..studies.theory.bound import changed_assumptions
    from ..studies.theory.measure import measure

    folder = RunFolder.open(run)
    with progress(err, "measuring", quiet) as done:
        measured = measure(folder, steps, done)
    content: dict[str, Any] = {
        "rounds": [as_content(each) for each in measured],
        "findings": findings(measured),
        "changed_assumptions": changed_assumptions(folder.config),
    }
    folder.write_json(FILE, content)
    if as_json:
        print_json({"run": str(folder.path), **content})
        return
    for each in content["rounds"]:
        out.print(table_of(each))
    for sentence in content["findings"]:
        say(escape(sentence))
    say("Where the run differs from the theorem:")
    for sentence in content["changed_assumptions"]:
        say(f"- {escape(sentence)}")


def table_of(measured: dict[str, Any]) -> Table:
    everyone = list(measured["clients"].values())
    fewest, most = (choose(f["constants"]["steps"] for f in everyone) for choose in (min, max))
    table = Table(
        title=escape(
            f"round {measured['round']} from the {measured['start']}: "
            f"E = {fewest if fewest == most else f'{fewest} to {most}'} steps, "
            f"eta = {max(f['eta'] for f in everyone):.3g}, mu = {max(f['mu'] for f in everyone):g}, "
            f"L = {everyone[0]['constants']['rows']}"
        ),
        title_justify="left",
    )
    for name in HEAD:
        table.add_column(name, justify="left" if name == "client" else "right")
    for row in rows(measured["clients"]):
        table.add_row(*map(escape, row))
    return table
