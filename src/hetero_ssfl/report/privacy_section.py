"""The section about noise with a privacy budget: what each run has spent."""

from collections.abc import Sequence

from .blocks import WORDS, Rows, Section
from .reported_run import ReportedRun

HEAD = ["run", "epsilon spent", "of", "delta", "contributions of a client", "largest norm", "noise added to"]


def privacy(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the section, or nothing if none of the runs has noise."""
    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        return []
    intro = (
        "The noise hides the whole of what one client contributed in all rounds together. Accuracies of probes and the "
        "clients' own models have no noise. A client that was asked for a round twice has spent more: its own count is "
        "in the card of its model. docs/privacy.md explains the guarantee."
    )
    return [Section("privacy", "Privacy budget", intro, [Rows("Spent so far", HEAD, rows, WORDS)])]


def _rows(run: ReportedRun) -> list[list[str]]:
    asked, spent = run.result.config.privacy, run.server_series("epsilon")
    if asked.epsilon is None or not spent:
        return []
    number, epsilon = spent[-1]
    seen = "sums (secure)" if asked.secure else "each contribution"
    return [
        [
            run.label,
            f"{epsilon:.3g}",
            f"{asked.epsilon:g}",
            f"{asked.delta:g}",
            str(number + 1),
            f"{asked.clip:g}",
            seen,
        ]
    ]
