"""What commands print, and what they say when they are interrupted."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..terminal import Console

# Without a terminal rich assumes 80 columns, which breaks tables in log files.
out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)


def say(text: str) -> None:
    """Print one line without wrapping or highlighting, so that programs can read it. Escape user text first."""
    out.print(text, highlight=False, soft_wrap=True)


def remark(text: str) -> None:
    """Print one line to the standard error, as `say` does to the standard output."""
    err.print(text, highlight=False, soft_wrap=True)


def show(as_json: bool, content: dict[str, Any], *parts: "str | Table") -> None:
    """Print a result as one JSON object, or as lines and tables for people."""
    if as_json:
        print(json.dumps(content, indent=2))
        return
    for part in parts:
        say(part) if isinstance(part, str) else out.print(part)


def save_table(table: Table, csv: Path | None, latex: Path | None, markdown: Path | None) -> None:
    """Write a table as it is shown to files of other formats."""
    if not (csv or latex or markdown):
        return
    from pandas import DataFrame

    from ..runs.files import write_atomically

    head = [" ".join(Text.from_markup(str(column.header)).plain.split()) for column in table.columns]
    columns = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns]
    rows = list(zip(*columns, strict=True))
    lines = [head, ["---"] * len(head), *rows]
    bars = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    frame = DataFrame(rows, columns=head)
    in_latex = frame.to_latex(index=False, escape=True).replace("±", r"$\pm$") if latex else ""
    for path, text in ((csv, frame.to_csv(index=False)), (latex, in_latex), (markdown, "\n".join([*bars, ""]))):
        if path is not None:
            write_atomically(path, text.encode())
            remark(f"table: {escape(str(path))}")


@contextmanager
def resumable(places: Sequence[Path] | None = None) -> Iterator[None]:
    """Say how to continue when the user interrupts, and end with the exit code of an interrupted program.

    The last of `places` is the folder of the only run that the command trains.
    """
    try:
        yield
    except KeyboardInterrupt:
        if places is None:
            remark("Interrupted. What is finished is kept. Run the same command again to continue.")
        elif not places or not (places[-1] / "config.toml").exists():
            remark("Interrupted before training began; nothing was written.")
        else:
            from ..runs.folder import resume_command

            how = escape(resume_command(places[-1]))
            remark(f"Interrupted. Every finished round is kept; continue with: {how}")
        sys.exit(130)
