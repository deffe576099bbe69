"""Words, legends and sums that several sections of a page use."""

from collections.abc import Sequence

from markupsafe import Markup

from . import svg
from .blocks import Block, Legend
from .reported_run import ReportedRun
from .tables import metric_names

MOST_ROWS = 100
UNTRAINED = "cu"


def metric_of(runs: Sequence[ReportedRun]) -> str | None:
    """Return the accuracy that the page shows: that of the linear probe on all classes, if there is one."""
    known = sorted({name for run in runs for name in metric_names(run.result)})
    return "linear_all" if "linear_all" in known else next(iter(known), None)


def metric_words(metric: str) -> str:
    probe, _, over = metric.partition("_")
    kind = {"linear": "linear probe", "knn": "nearest neighbours", "finetune": "fine-tuned"}.get(probe, probe)
    over = {"all": "all classes", "own": "own classes"}.get(over, f"{over} of the labels" if "%" in over else over)
    return f"{kind}, {over}" if over else kind


def probed_on(runs: Sequence[ReportedRun]) -> str:
    return f"{'test' if all(run.finished for run in runs) else 'validation'} {runs[-1].things}"


def names_of(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the runs' labels, or "trained" for a single run, which is compared with its untrained encoders."""
    return [run.label for run in runs] if len(runs) > 1 else ["trained"]


def legend(runs: Sequence[ReportedRun], untrained: bool = False) -> list[Block]:
    """Return a legend, or nothing if there is only one entry."""
    entries = [(run.style, name) for run, name in zip(runs, names_of(runs), strict=True)]
    entries = [(UNTRAINED, "untrained"), *entries] if untrained else entries
    return [Legend([(_swatch(style, label), label) for style, label in entries])] if len(entries) > 1 else []


def _swatch(style: str, label: str) -> Markup:
    return svg.tag("svg", svg.mark(style, 7, 7, label), viewBox="0 0 14 14", class_="swatch", aria_hidden="true")


def volume(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def bytes_of(run: ReportedRun, key: str) -> dict[str, float]:
    return {client: sum(count for _, count in points) for client, points in run.series(key).items()}
