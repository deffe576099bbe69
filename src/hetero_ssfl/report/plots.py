"""Plots of runs. Each function draws on the axes it is given, so the same plots go to files and into pages.

`save` writes .png, .svg or .pdf. `chart` returns SVG for a page: colours become variables of its style sheet, so that
they follow light and dark mode, and `tips` become tooltips.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.style import context as page_style
from matplotlib.ticker import LogLocator, MaxNLocator

from ..errors import ConfigError
from ..learning.floors import FULL_WIDTH
from ..runs.events import Evaluated, Event, FloorProbed
from ..runs.files import write_atomically

TEMPLATES = Path(__file__).parent / "templates"
LIGHT = (TEMPLATES / "page.css").read_text().partition("@media")[0]
COLOURS = dict(re.findall(r"--(c\w|quiet|rule): (#\w{6})", LIGHT))
"""The palette of pages: cu and c0 to c7 are for series. The style sheet has another set for dark mode."""
GREY, BLUE, ORANGE = (COLOURS[style] for style in ("cu", "c0", "c1"))
MARKERS = {"cu": "o", **{f"c{k}": "os^D"[k % 4] for k in range(8)}}  # series differ in shape as well as in colour
WIDTH = 360  # of a chart in a page, about that of a phone
MAX_VALUE = 1e30  # larger values are not drawn: their differences overflow
MAX_MARKS = 60
SPACE = (48, 38, 12, 10)  # of a chart: left, bottom, right and top
MAX_NAMES = 24  # more rows or columns have no names
MAX_NAME = 28  # characters of a name

Dots = tuple[str, Sequence[tuple[str, float, str]]]
"""A name and its marks: (name, [(style, value, tooltip)])."""


class Line(NamedTuple):
    """A curve with points (x, y, tooltip); `band` gives (x, lowest y, highest y)."""

    style: str
    points: Sequence[tuple[float, float, str]]
    band: Sequence[tuple[float, float, float]] = ()
    look: Mapping[str, Any] = {}  # options of matplotlib, such as alpha
    name: str = ""  # written at its end


def mean_line(style: str, label: str, values: Sequence[tuple[int, Sequence[float]]]) -> Line:
    """Return the mean of the values of each round, and a band from the lowest to the highest."""
    points = [(r, mean(v), f"{label}, round {r}: {mean(v):.3g} ({min(v):.3g} to {max(v):.3g})") for r, v in values]
    return Line(style, points, [(r, min(v), max(v)) for r, v in values], {"label": label})


# --- plots -----------------------------------------------------------------------------------------


def lines(axes: Axes, given: Sequence[Line], x_label: str, log: bool = False) -> None:
    """Plot curves over rounds or another whole number."""
    lowest = 0 if log else -MAX_VALUE
    for line in given:
        points = [point for point in line.points if lowest < point[1] < MAX_VALUE]
        if not points:
            continue
        band = [each for each in line.band if lowest < each[1] <= each[2] < MAX_VALUE]
        if len(band) > 1:
            at, low, high = zip(*band, strict=True)
            axes.fill_between(at, low, high, color=COLOURS[line.style], alpha=0.13, linewidth=0)
        told = [k for k, point in enumerate(points) if point[2]]
        told = told[:: 1 + len(told) // MAX_MARKS]
        marker = {"marker": MARKERS[line.style], "markersize": 6, "markevery": told} if told else {}
        xs, ys, words = zip(*points, strict=True)
        look = {"linewidth": 2, "color": COLOURS[line.style], **marker, **line.look}
        tips(axes.plot(xs, ys, **look)[0], [words[k] for k in told])
    _name_ends(axes, given)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if log and axes.has_data():
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * bottom else (1,)))
        axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.6g}")
    axes.set_xlabel(x_label)
    axes.grid(axis="y")


def _name_ends(axes: Axes, given: Sequence[Line]) -> None:
    """Write the names of lines above their ends, if there is room; tooltips have all names."""
    ends = sorted((line.points[-1][1], line.points[-1][0], line.name) for line in given if line.name and line.points)
    bottom, top = axes.get_ylim()
    free = bottom
    for y, x, name in ends:
        if bottom <= y <= top and y >= free:
            axes.annotate(clip(name, MAX_NAME), (x, y), (-2, 2), textcoords="offset points", fontsize=8, ha="right")
            free = y + 0.07 * (top - bottom)


def curves(axes: Axes, runs: Mapping[str, Sequence[Event]], metric: str) -> None:
    """Plot validation accuracy over rounds: mean over clients, and a band from the lowest to the highest client."""
    for (label, events), style in zip(runs.items(), ("cu", "c1", "c0", "c2"), strict=False):
        seen = [e for e in events if isinstance(e, Evaluated) and e.split == "validation"]
        values = [(e.round, [s[metric] for s in e.clients.values() if metric in s]) for e in seen]
        lines(axes, [mean_line(style, label, [(r, v) for r, v in values if v])], "round")
    floors = [e for events in runs.values() for e in events if isinstance(e, FloorProbed) and e.split == "validation"]
    for name, value in {e.name: e.mean[metric] for e in floors if metric in e.mean}.items():
        floor(axes, name, value)
    axes.set_ylabel(f"validation accuracy (%)\n{metric.replace('_', ', ')}")
    axes.legend(frameon=False)


def floor(axes: Axes, name: str, value: float) -> None:
    """Draw what features reach that nobody trained."""
    axes.axhline(value, color="black", linewidth=0.8, linestyle=":" if name.endswith(FULL_WIDTH) else "--")
    axes.annotate(name, (0, value), (2, 2), textcoords="offset points", fontsize=7)


def dots(axes: Axes, rows: Sequence[Dots], x_label: str) -> None:
    for y, (name, marks) in enumerate(rows):
        axes.text(0, y - 0.2, clip(name, 48), transform=axes.get_yaxis_transform())
        axes.axhline(y, color=COLOURS["rule"], linewidth=1)
        if marks:
            values = [value for _, value, _ in marks]
            axes.plot([min(values), max(values)], [y, y], color=COLOURS["cu"], alpha=0.45, linewidth=2)
        for style, value, words in marks:
            (mark,) = axes.plot(value, y, color=COLOURS[style], marker=MARKERS[style], markersize=7)
            tips(mark, [words])
    axes.set(xlabel=clip(x_label, 60), yticks=[], ylim=(len(rows) - 0.7, -0.7))
    axes.spines["left"].set_visible(False)


def comparison(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot runs side by side: a large mark for the mean, a small one for each seed."""
    dots(axes, [(row["run"], [("c0", row["mean"], "")] if row["per_seed"] else []) for row in rows], "")
    for y, row in enumerate(rows):
        axes.plot(list(row["per_seed"].values()), [y] * len(row["per_seed"]), "k.", markersize=4)
    axes.set_xlabel(f"test accuracy (%), {rows[0]['metric'].replace('_', ', ')}")


def heat_map(axes: Axes, matrix: Any, title: str, names: Sequence[str], longest: int = 13) -> None:
    """Plot the mutual CKA of the clients. Rows have names; columns have the numbers of the rows."""
    count, matrix = len(names), np.asarray(matrix, dtype=float)
    cells = axes.pcolormesh(matrix, vmin=0, vmax=1, cmap="viridis")
    tips(cells, [f"{names[i]}, {names[j]}: {value:.3f}" for (i, j), value in np.ndenumerate(matrix)])
    for (i, j), value in np.ndenumerate(matrix) if count <= 8 else ():
        ink = "black" if value > 0.437 else "white"  # the colour with more contrast
        axes.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=8 if title else 11)
    numbers = [str(k + 1) for k in range(count)]
    _frame(axes, numbers, [f"{k} {clip(name, longest)}" for k, name in zip(numbers, names, strict=True)], 0.5)
    axes.set(ylim=(count, 0), aspect="equal")
    average = mean_off_diagonal(matrix.tolist())
    if title:
        axes.set_title(title if average is None else f"{title}\nmean {average:.2f}", fontsize=9)


def holdings(axes: Axes, counts: Mapping[str, Sequence[int]], classes: Sequence[str], style: str = "c0") -> None:
    """Plot how many images of each class each client has; the area of a circle is the number of images."""
    columns = max([1, len(classes), *map(len, counts.values())])
    table = np.array([[*row, *[0] * (columns - len(row))] for row in counts.values()])
    clients, labels = np.nonzero(table)
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    side = 0.92 * 72 * min(box.height / len(table), max(box.width / columns, 0.08))
    areas = np.maximum(1.6, side * np.sqrt(table[clients, labels] / max(1, table.max()))) ** 2
    circles = axes.scatter(labels, clients, s=areas, color=COLOURS[style], lw=0)
    names = [*classes, *map(str, range(len(classes), columns))]
    tips(circles, [f"{list(counts)[i]}, class {names[j]}: {table[i, j]}" for i, j in zip(clients, labels, strict=True)])
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(table) - 0.5, -0.5))
    _frame(axes, [clip(name, 12) for name in names if classes], [clip(name, MAX_NAME) for name in counts])
    axes.grid(axis="y")


def scatter(axes: Axes, points: Sequence[tuple[float, float, str]], pictures: Sequence[str], style: str) -> None:
    """Plot points (x, y, tooltip); in a page as the pictures with the given ids, if there are any."""
    xs, ys, words = zip(*points, strict=True)
    tips(axes.scatter(xs, ys, s=49, color=COLOURS[style], alpha=0.7, lw=0), words, pictures)
    axes.set_axis_off()


def _frame(axes: Axes, columns: Sequence[str], rows: Sequence[str], middle: float = 0.0) -> None:
    """Write the names of a table's columns above it, and those of its rows beside it, if they are not too many."""
    for names, axis in ((columns, axes.xaxis), (rows, axes.yaxis)):
        shown = names if len(names) <= MAX_NAMES else ()
        axis.set_ticks([k + middle for k in range(len(shown))], shown)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", rotation=90 if max(map(len, columns), default=0) > 2 else 0)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def mean_off_diagonal(matrix: Sequence[Sequence[float]]) -> float | None:
    values = [value for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j]
    return mean(values) if values else None


def clip(text: str, length: int) -> str:
    """Shorten a text, and replace what cannot be drawn: names come from other machines."""
    text = text if len(text) <= length else text[: length - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# --- files -----------------------------------------------------------------------------------------


def subplots(*shape: int, figsize: tuple[float, float]) -> tuple[Figure, Any]:
    """Create a figure without pyplot, so that the user's backend is not changed."""
    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}):
        figure = Figure(figsize=figsize)
        return figure, figure.subplots(*shape)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically. The same figure gives the same .svg file, without date and random names."""
    buffer, kind = io.BytesIO(), path.suffix.lstrip(".") or "png"
    metadata = {"Date": None} if kind == "svg" else None
    try:
        with rc_context({"svg.hashsalt": "hetero-ssfl"}):
            figure.savefig(buffer, format=kind, dpi=150, bbox_inches="tight", metadata=metadata)
    except ValueError as error:
        raise ConfigError(
            f"cannot save a plot to '{path}': {error}. Use a name that ends in .png, .svg or .pdf."
        ) from None
    write_atomically(path, buffer.getvalue())


def draw_holdings(counts: Mapping[str, Sequence[int]], classes: Sequence[str], path: Path) -> None:
    figure, axes = subplots(figsize=(7, 4.5))
    holdings(axes, counts, classes)
    axes.set(xlabel="images of each class", ylabel="client")
    save(figure, path)


# --- pages -----------------------------------------------------------------------------------------


def tips(artist: Artist, words: Sequence[str], pictures: Sequence[str] = ()) -> None:
    """Give each mark of an artist a tooltip; in a page, pictures with these ids take the place of the marks."""
    artist.tooltips = ([clip(text, 200) for text in words], pictures)  # type: ignore[attr-defined]


def chart(
    label: str, draw: Callable[[Axes], None], size: Sequence[float], margins: Sequence[int] = SPACE, kind: str = "chart"
) -> Markup:
    """Return a drawing for a page, or nothing if nothing was drawn."""
    (width, height), (left, bottom, right, top) = size, margins
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    with page_style(TEMPLATES / "page.mplstyle", after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a browser has letters that matplotlib's font lacks
        figure = Figure(figsize=(width / 72, height / 72))
        draw(axes := figure.add_axes(place))
        return _for_page(figure, label, kind) if axes.has_data() else Markup("")


def line_chart(given: Sequence[Line], x_label: str, label: str, log: bool = False, width: float = WIDTH) -> Markup:
    return chart(label, lambda axes: lines(axes, given, x_label, log), (width, 0.61 * width))


def dot_chart(rows: Sequence[Dots], x_label: str, label: str) -> Markup:
    if not any(marks for _, marks in rows):
        return Markup("")
    return chart(label, lambda axes: dots(axes, rows, x_label), (WIDTH, 38 * len(rows) + 48), (12, 38, 12, 10))


def heat_chart(matrix: Sequence[Sequence[float]], names: Sequence[str], label: str) -> Markup:
    left = _room(names, 3) if len(names) <= MAX_NAMES else 4
    side = min(34 * len(names), WIDTH - left - 4)
    size = (left + side + 4, side + 24)
    return chart(label, lambda axes: heat_map(axes, matrix, "", names, MAX_NAME), size, (left, 4, 4, 20))


def _room(names: Sequence[str], more: int = 0) -> int:
    """Return the width of a column of names."""
    return 12 + round(6.4 * (more + min(MAX_NAME, max(map(len, names), default=1))))


def holdings_chart(counts: Mapping[str, Sequence[int]], classes: Sequence[str], style: str, label: str) -> Markup:
    longest = max(map(len, classes), default=1) if len(classes) <= MAX_NAMES else 0
    width = WIDTH - 8 - _room(list(counts))
    rows, top = max(18, min(34, width / max(1, len(classes)))) * len(counts), 12 + 7 * min(12, longest)
    left = _room(list(counts)) if len(counts) <= MAX_NAMES else 4
    size = (WIDTH, rows + top + 6)
    return chart(label, lambda axes: holdings(axes, counts, classes, style), size, (left, 6, 8, top))


def _for_page(figure: Figure, label: str, style: str) -> Markup:
    """Return a figure as SVG without identifiers, which would repeat in every chart, and without addresses."""
    told: dict[str, Any] = {}
    for artist in [child for axes in figure.axes for child in axes.get_children() if hasattr(child, "tooltips")]:
        artist.set_gid(f"tips{len(told)}")
        told[f"tips{len(told)}"] = artist.tooltips
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor="none")
    text = re.sub(r"<metadata>.*</metadata>| xmlns(:\w+)?=\"[^\"]*\"", "", buffer.getvalue(), flags=re.DOTALL)
    root = ElementTree.fromstring(text.replace("xlink:href=", "href="))
    shapes = {f"#{path.get('id')}": path.get("d", "") for path in root.iter("path")}
    variables = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
    for element in list(root.iter()):
        for definitions in element.findall("defs"):
            element.remove(definitions)
        words, pictures = told.get(element.attrib.pop("id", ""), ((), ()))
        marks = list(element.iter("use")) or list(element.iter("path"))
        for k, tooltip in enumerate(words):
            ElementTree.SubElement(marks[k], "title").text = tooltip
            if pictures:
                marks[k].set("href", f"#{pictures[k]}")
        element.attrib.pop("clip-path", None)
        if element.tag == "use":
            _place(element, shapes)
        given = re.sub(r"font(-family)?: [^;]*;?", "", element.get("style", ""))
        element.set("style", re.sub(r"#\w{6}", lambda found: variables.get(found[0], found[0]), given))
        for key in {"d", "x", "y", "transform"} & set(element.attrib):
            element.set(key, _short(element.attrib[key]))
    root.attrib = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": clip(label, 200), "class": style}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _place(use: ElementTree.Element, shapes: Mapping[str, str]) -> None:
    """Turn a reference to the shape of a mark into the shape itself, or into a picture of 16 pixels."""
    x, y = (float(use.attrib.pop(key)) for key in ("x", "y"))
    if use.attrib["href"] in shapes:
        use.tag, use.attrib["d"] = "path", shapes[use.attrib.pop("href")]
        use.set("transform", f"translate({x} {y})")
    else:
        use.set("transform", f"translate({x - 8} {y - 8}) scale(16)")


def _short(numbers: str) -> str:
    """Round the numbers of a path to a tenth of a pixel."""
    return " ".join(re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}", numbers).split())
