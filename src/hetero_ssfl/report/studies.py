"""The sections that studies (`hetero-ssfl audit`, `theory`, or your own) left in a run folder.

A study writes NAME.json with a key "section" (`StudySection` in runs/schema.py): tables, plots and notes as plain data.
"""

from collections.abc import Iterator, Sequence

from ..runs.schema import StudyPlot, StudySection
from . import svg
from .blocks import Block, Figure, Figures, Folded, Rows, Section, Text
from .reported_run import ReportedRun


def studies(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return one section per study, with the blocks of all runs that have it."""
    sections: dict[str, Section] = {}
    for run in runs:
        for name, found in run.folder.read_sections().items():
            before = sections.get(name, Section(name, found.title, found.intro))
            sections[name] = Section(name, before.title, before.intro, [*before.blocks, *_blocks(run.label, found)])
    return list(sections.values())


def _blocks(label: str, section: StudySection) -> Iterator[Block]:
    first, *others = section.tables
    yield Rows(f"{label}: {first.caption}", first.head, first.rows)
    yield from map(Text, section.notes)
    if section.plots:
        yield Figures([_figure(plot) for plot in section.plots])
    yield from (Rows(f"{label}: {table.caption}", table.head, table.rows) for table in others)
    yield from (Folded(title, [Text(text) for text in texts]) for title, texts in section.folded.items())


def _figure(plot: StudyPlot) -> Figure:
    """Draw one mark per value; a second mark shows the limit of chance."""
    lines = []
    for name, value in plot.values.items():
        marks = [("c0", value, f"{name}: {value:.3g}")]
        marks += [] if plot.limit is None else [("c1", plot.limit, f"95 % of random guesses: at most {plot.limit:.3g}")]
        lines.append((name, marks))
    note = "" if plot.limit is None else "Square: 95 % of random guesses are below."
    return Figure(plot.title, svg.dot_plot(lines, plot.title, f"{plot.title} for each view"), note)
