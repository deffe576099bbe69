"""`hetero-ssfl audit`: parse, call, print. Heavy imports wait until the command runs."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import Json, Quiet, err, print_json, print_section


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a simulated run.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps of each network that the attacker trains.")] = 60,
    shadows: Annotated[int, typer.Option(min=2, help="Clients that the attacker trains on public images.")] = 20,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack the clients of a run from what their server has, and tell what it could learn.

    Examples:
      hetero-ssfl audit runs/a
      hetero-ssfl audit runs/a --steps 20 --shadows 10 --json

    Three attacks: which classes a client holds, whether an image was in its training data, and stealing its encoder.
    Each from the contribution as sent, from sketches, from sums over several clients, and with noise. The figures are
    also written to audit.json in the run folder, where `hetero-ssfl report` finds them.
    """
    from ..report.progress import progress
    from ..runs.folder import RunFolder
    from ..studies.audit.measure import ATTACKER, measure
    from ..studies.audit.tables import section

    folder = RunFolder.open(run)
    with progress(err, "attacking", quiet) as done:
        audited = measure(folder, steps, shadows, workers or os.cpu_count() or 1, done)
    content: dict[str, Any] = {"attacker": list(ATTACKER), "steps": steps, "shadows": shadows, **audited.to_json()}
    shown = section(content)
    folder.write_json("audit.json", {**content, "section": shown.model_dump()})
    if as_json:
        print_json({"run": str(folder.path), **content})
        return
    print_section(shown)
