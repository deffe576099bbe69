"""One HTML page about one or more runs: a single file without scripts that asks no network for anything."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..errors import ConfigError
from ..runs import write_atomically
from . import record, sections
from .arms import read_arms
from .gallery import gallery
from .looks import Map
from .phrases import metric_of


def write_report(runs: Sequence[Path], output: Path, kind: Map = "pca") -> None:
    """Read the runs, ask their encoders where they are at hand, and write the page whole or not at all."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"cannot write a page into '{output}': its name must end in .html.")
    # A name from elsewhere may hold half a character, which no encoding has.
    write_atomically(output, render(runs, kind).encode("utf-8", "replace"))


def render(runs: Sequence[Path], kind: Map = "pca") -> str:
    arms = read_arms(runs)
    metric = metric_of(arms)
    asked = gallery(arms, kind)
    likeness, spectrum, neighbours, maps = asked.sections
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(
        made_by="report",
        title=f"{arms[-1].result.config.name}: {', '.join(arm.label for arm in arms)}",
        summary=sections.summary(arms, metric),
        cards=sections.key_figures(arms, metric),
        pictures=asked.pictures,
        sections=[
            sections.accuracy(arms, metric),
            sections.curves(arms, metric),
            likeness,
            spectrum,
            neighbours,
            maps,
            record.costs(arms),
            record.faults(arms),
            record.repeat(arms),
        ],
    )
