"""The section about the paper's theorem, from the theory.json that `hetero-ssfl theory` leaves in a run folder."""

from collections.abc import Sequence

from ..errors import RunError
from ..studies.theory.words import FILE, HEAD, rows
from .blocks import Block, Folded, Rows, Section, Text
from .reported_run import ReportedRun


def theory(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the section, or nothing if the theorem has not been measured on any of the runs."""
    measured = [run for run in runs if (run.folder.path / FILE).exists()]
    if not measured:
        return []
    intro = (
        "The paper bounds the change of a client's loss in one round. Beside the bound stands the change that was "
        "measured over a few steps. docs/theory.md explains the constants."
    )
    return [Section("theory", "The convergence bound", intro, [block for run in measured for block in _blocks(run)])]


def _blocks(run: ReportedRun) -> list[Block]:
    try:
        content = run.folder.read_json(FILE)
        tables: list[Block] = [
            Rows(
                f"{run.label}: round {int(measured['round'])}, from the {measured['start']}",
                HEAD,
                rows(measured["clients"]),
            )
            for measured in content["rounds"]
        ]
        findings = [Text(str(sentence)) for sentence in content["findings"]]
        changes = [Text(str(sentence)) for sentence in content["changed_assumptions"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RunError(
            f"'{run.folder.path / FILE}' is not what `hetero-ssfl theory` writes. Delete it and measure again."
        ) from None
    return [*tables, *findings, Folded("Where the run differs from the theorem", changes)]
