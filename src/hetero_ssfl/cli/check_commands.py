"""`hetero-ssfl check ...`: parse, call, print. Heavy imports wait until a command needs them."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from .terminal import Json, out, print_json

if TYPE_CHECKING:
    from ..runs.environment import Finding

app = typer.Typer(help="Check this machine or the files of a run.", no_args_is_help=True)


@app.command()
def machine(as_json: Json = False) -> None:
    """Check this machine: what is installed, which devices are available, what is missing and how to get it.

    The exit code is 1 if something is missing that every run needs.

    Examples:
      hetero-ssfl check machine
      hetero-ssfl check machine --json
    """
    from ..runs.environment import diagnose

    _print_findings(diagnose(), "missing", as_json)


@app.command()
def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    as_json: Json = False,
) -> None:
    """Check each file of a run against its digest. The exit code is 1 if one is damaged.

    Examples:
      hetero-ssfl check run runs/a
      hetero-ssfl check run runs/a --json
    """
    from ..runs.check import check_run

    _print_findings(check_run(run), "damaged", as_json)


def _print_findings(findings: "Iterable[Finding]", bad: str, as_json: bool) -> None:
    findings = list(findings)
    if as_json:
        print_json({"findings": [vars(finding) for finding in findings]})
    for finding in () if as_json else findings:
        mark = "[green]ok[/]     " if finding.ok else f"[yellow]{bad}[/]"
        out.print(f"{mark} {finding.what:<18} {escape(finding.text)}", highlight=False, soft_wrap=True)
    if any(finding.required and not finding.ok for finding in findings):
        sys.exit(1)
