"""Write an HTML page about one or more runs: a single file without scripts that loads nothing from the network."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..errors import ConfigError
from ..runs.files import write_atomically
from . import record, sections
from .gallery import gallery
from .rad_features import FeatureReader, Map
from .reported_run import metric_of, read_runs

TEMPLATES = Path(__file__).parent / "templates"
MAX_TEXT = 2000  # characters of a cell, caption or paragraph


def write_report(paths: Sequence[Path], output: Path, features: FeatureReader, kind: Map = "pca") -> None:
    """Read the runs and write the page. `features` computes the encoders' features if they are available."""
    write_page(output, lambda: render(paths, features, kind))


def render(paths: Sequence[Path], features: FeatureReader, kind: Map = "pca") -> str:
    runs = read_runs(paths)
    metric = metric_of(runs)
    of_features, pictures, agreement = gallery(runs, features, kind)
    first = [sections.accuracy(runs, metric), sections.curves(runs, metric), *of_features]
    if metric is None:  # then whether the clients agree, and on what, answers whether it worked
        first = [*of_features, *([first[0]] if first[0].blocks else []), first[1]]
    last = [record.costs(runs), record.faults(runs), record.repeat(runs)]
    return fill_template(
        "page.html",
        made_by="report",
        title=f"{runs[-1].config.name}: {', '.join(run.label for run in runs)}",
        summary=sections.summary(runs, metric),
        cards=[*([] if metric else agreement), *sections.key_metrics(runs, metric)],
        pictures=pictures,
        sections=[*first, *record.privacy(runs), *record.studies(runs), *last],
    )


def write_page(output: Path, make: Callable[[], str]) -> None:
    """Write a page atomically, after its name has been checked."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"cannot write a page to '{output}': its name must end in .html.")
    # A name from another machine may contain a lone surrogate, which UTF-8 cannot encode.
    write_atomically(output, make().encode("utf-8", "replace"))


def fill_template(template: str, *folders: Path, **values: object) -> str:
    return _templates(*folders).get_template(template).render(**values)


def fill_block(macro: str, **values: object) -> str:
    """Return one part of a page: what a macro of blocks.html makes."""
    return str(getattr(_templates().get_template("blocks.html").module, macro)(**values))


@lru_cache(maxsize=8)
def _templates(*folders: Path) -> Environment:
    loader = FileSystemLoader([*folders, TEMPLATES])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_bounded
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment


def _bounded(value: object) -> object:
    """Shorten a text, and replace what cannot be shown: names and reasons come from other machines."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    text = value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 1]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
