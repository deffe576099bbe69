"""Write an HTML page about one or more runs: a single file without scripts that loads nothing from the network."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..errors import ConfigError
from ..runs.files import write_atomically
from . import record, sections
from .gallery import gallery
from .privacy_section import privacy
from .rad_features import FeatureReader, Map
from .reported_run import read_runs
from .studies import studies
from .wording import metric_of


def write_report(paths: Sequence[Path], output: Path, features: FeatureReader, kind: Map = "pca") -> None:
    """Read the runs and write the page atomically. `features` computes the encoders' features if they are available."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"cannot write a page to '{output}': its name must end in .html.")
    # A name from another machine may contain a lone surrogate, which UTF-8 cannot encode.
    write_atomically(output, render(paths, features, kind).encode("utf-8", "replace"))


def render(paths: Sequence[Path], features: FeatureReader, kind: Map = "pca") -> str:
    runs = read_runs(paths)
    metric = metric_of(runs)
    asked = gallery(runs, features, kind)
    likeness, spectrum, neighbours, maps = asked.sections
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(
        made_by="report",
        title=f"{runs[-1].result.config.name}: {', '.join(run.label for run in runs)}",
        summary=sections.summary(runs, metric),
        cards=sections.key_figures(runs, metric),
        pictures=asked.pictures,
        sections=[
            sections.accuracy(runs, metric),
            sections.curves(runs, metric),
            likeness,
            spectrum,
            neighbours,
            maps,
            *privacy(runs),
            *studies(runs),
            record.costs(runs),
            record.faults(runs),
            record.repeat(runs),
        ],
    )
