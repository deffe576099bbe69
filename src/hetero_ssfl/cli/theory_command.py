"""`hetero-ssfl theory`: parse, call, print. Heavy imports wait until the command runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import Json, Quiet, err, print_json, print_section


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
    from ..studies.theory.assumptions import changed_assumptions
    from ..studies.theory.measure import measure
    from ..studies.theory.tables import section

    folder = RunFolder.open(run)
    with progress(err, "measuring", quiet) as done:
        rounds = measure(folder, steps, done)
    changed = changed_assumptions(folder.config)
    content: dict[str, Any] = {"rounds": rounds, "changed_assumptions": changed}
    shown = section(rounds, changed)
    folder.write_json("theory.json", {**content, "section": shown.model_dump()})
    if as_json:
        print_json({"run": str(folder.path), **content})
        return
    print_section(shown)
