"""The section about what the server could learn, from the audit.json of `hetero-ssfl audit` in a run folder."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RunError
from ..studies.audit.words import CLIENT_HEAD, EXPLAINED, FILE, HEAD, client_rows, rows
from . import svg
from .blocks import Block, Figure, Figures, Folded, Rows, Section, Text
from .reported_run import ReportedRun


def audit(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the section, or nothing if none of the runs has been audited."""
    audited = [run for run in runs if (run.folder.path / FILE).exists()]
    if not audited:
        return []
    intro = (
        "Attacks on the clients from what their server has: as sent, and as it would have with sketches, secure sums "
        "or noise. They are attacks, not bounds. docs/privacy.md explains them."
    )
    return [
        Section("audit", "What the server could learn", intro, [block for run in audited for block in _blocks(run)])
    ]


def _blocks(run: ReportedRun) -> list[Block]:
    try:
        content = run.folder.read_json(FILE)
        return [
            Rows(f"{run.label}: round {int(content['round'])}, all clients", HEAD, rows(content)),
            Text(EXPLAINED),
            Figures([_figure(content, *words) for words in FIGURES]),
            Rows(f"{run.label}: each client, as sent", CLIENT_HEAD, client_rows(content, "as sent")),
            *(Text(str(sentence)) for sentence in content["findings"]),
            Folded("What the attacker knows", [Text(str(sentence)) for sentence in content["attacker"]]),
        ]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise RunError(
            f"'{run.folder.path / FILE}' is not what `hetero-ssfl audit` writes. Delete it and audit the run again."
        ) from None


FIGURES = (
    ("Classes guessed right (%)", "class_hits", 100),
    ("Members found at 1 % false positives (%)", "members_found", 100),
    ("CKA of the stolen encoder", "cka", 1),
    ("Linear probe of the stolen encoder (%)", "probe", 1),
)


def _figure(content: Mapping[str, Any], title: str, key: str, scale: float) -> Figure:
    """Draw one figure of every view; a second mark shows what chance reaches in 95 % of cases."""
    limit = content["chance"].get(f"{key}_95")
    lines = []
    for row in content["views"]:
        if row[key] is not None:
            value = scale * float(row[key])
            marks = [("c0", value, f"{row['view']}: {value:.3g}")]
            if limit is not None:
                marks.append(("c1", scale * float(limit), f"95 % of random guesses: at most {scale * limit:.3g}"))
            lines.append((str(row["view"]), marks))
    note = "" if limit is None else "Square: 95 % of random guesses are below."
    return Figure(title, svg.dot_plot(lines, title, f"{title} for each view"), note)
