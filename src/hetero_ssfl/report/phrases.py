"""Words, legends and sums that several sections of a page share."""

from collections.abc import Sequence

from markupsafe import Markup

from . import svg
from .arms import Arm
from .blocks import Block, Legend
from .tables import metric_names

MOST_ROWS = 100
UNTRAINED = "cu"
METHODS = {  # in which weights stay where they are
    "hetero-ssfl": "learned together: each aligned its view of {rad} shared {things} (the RAD) with that of all",
    "local": "learned alone",
}


def metric_of(arms: Sequence[Arm]) -> str | None:
    """The accuracy the page is about: of the linear probe on all classes, where there is one."""
    known = sorted({name for arm in arms for name in metric_names(arm.result)})
    return "linear_all" if "linear_all" in known else next(iter(known), None)


def metric_words(metric: str) -> str:
    probe, _, over = metric.partition("_")
    kind = {"linear": "linear probe", "knn": "nearest neighbours", "finetune": "fine-tuned"}.get(probe, probe)
    over = {"all": "all classes", "own": "own classes"}.get(over, f"{over} of the labels" if "%" in over else over)
    return f"{kind}, {over}" if over else kind


def probed_on(arms: Sequence[Arm]) -> str:
    return f"{'test' if all(arm.finished for arm in arms) else 'validation'} {arms[-1].things}"


def names_of(arms: Sequence[Arm]) -> list[str]:
    """One run is compared with its own beginning."""
    return [arm.label for arm in arms] if len(arms) > 1 else ["trained"]


def legend(arms: Sequence[Arm], untrained: bool = False) -> list[Block]:
    """Nothing where there is nothing to tell apart."""
    entries = [(arm.style, name) for arm, name in zip(arms, names_of(arms), strict=True)]
    entries = [(UNTRAINED, "untrained"), *entries] if untrained else entries
    return [Legend([(_swatch(style, label), label) for style, label in entries])] if len(entries) > 1 else []


def _swatch(style: str, label: str) -> Markup:
    return svg.tag("svg", svg.mark(style, 7, 7, label), viewBox="0 0 14 14", class_="swatch", aria_hidden="true")


def volume(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def bytes_of(arm: Arm, key: str) -> dict[str, float]:
    return {client: sum(count for _, count in points) for client, points in arm.series(key).items()}
