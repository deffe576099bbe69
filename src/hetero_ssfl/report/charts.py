"""The charts of a page as SVG. Colours are classes of its style sheet, so that they follow light and dark mode.

All text goes through `tag`, which escapes it: names come from other machines. matplotlib chooses ticks and colours,
but does not draw: its SVG has no tooltips, fixed colours, and identifiers that repeat in every chart of a page.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.ticker import LogLocator, MaxNLocator

WIDTH = 360  # about the width of a phone; a wide screen shows several charts side by side
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 38
MAX_VALUE = 1e30  # larger values are not drawn: their differences overflow
MAX_MARKS = 60
MAX_NAMES = 24  # more rows or columns have no names
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.8L4.4,3.4H-4.4z",
    "M0,-5L5,0L0,5L-5,0z",
)


@dataclass(frozen=True)
class Line:
    """A curve with points (x, y, tooltip); `band` gives (x, lowest y, highest y)."""

    style: str
    points: Sequence[tuple[float, float, str]]
    band: Sequence[tuple[float, float, float]] = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element with everything escaped. `class_` becomes class, `stroke_width` becomes stroke-width."""
    given = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _short(value)) for key, value in attributes.items()
    )
    return Markup("<{}{}>{}</{}>").format(name, given, Markup("").join(children), name)  # type: ignore[arg-type]


def picture(width: float, height: float, label: str, *children: object, style: str = "chart") -> Markup:
    """Return a complete drawing with a label for screen readers."""
    box = f"0 0 {_short(width)} {_short(height)}"
    return tag("svg", *children, viewBox=box, role="img", aria_label=label, class_=style)


def mark(style: str, x: float, y: float, words: str) -> Markup:
    """Return a point of a series. Series differ in shape as well as in colour."""
    number = int(style[1]) if style[1].isdigit() else 0
    where = f"translate({_short(x)} {_short(y)})"
    return tag("path", tag("title", words), d=SHAPES[number % len(SHAPES)], transform=where, class_=f"mark {style}")


def line_chart(
    lines: Sequence[Line],
    x_label: str,
    label: str,
    log: bool = False,
    span: tuple[float, float] | None = None,
    width: float = WIDTH,
) -> Markup:
    """Draw curves over rounds or another whole number; the x axis includes `span`."""
    height = width * 0.61
    lines = [_drawable(line, log) for line in lines]
    xs = [x for line in lines for x, _, _ in line.points]
    ys = [y for line in lines for _, y, _ in line.points] + [y for line in lines for _, *b in line.band for y in b]
    if not xs:
        return Markup("")
    xs += span or ()
    across = _Scale(xs, LEFT, width - RIGHT)
    up = _Scale(ys, height - BOTTOM, TOP, log)
    parts = [*_y_axis(up, across), *_x_axis(across, height, whole=True)]
    parts.append(_text(x_label, (LEFT + width) / 2, height - 4, "middle"))
    for line in lines:
        if len(line.band) > 1:
            there = [(across(x), up(high)) for x, _, high in line.band]
            back = [(across(x), up(low)) for x, low, _ in reversed(line.band)]
            parts.append(tag("path", d=_path([*there, *back]) + "Z", class_=f"band {line.style}"))
    for line in lines:
        parts.append(tag("path", d=_path([(across(x), up(y)) for x, y, _ in line.points]), class_=f"line {line.style}"))
        told = [point for point in line.points if point[2]]
        parts += [mark(line.style, across(x), up(y), words) for x, y, words in told[:: 1 + len(told) // MAX_MARKS]]
    return picture(width, height, label, *parts)


def dot_plot(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], x_label: str, label: str) -> Markup:
    """Draw a row per name with a mark for each series: (name, [(style, value, tooltip)])."""
    values = [value for _, marks in rows for _, value, _ in marks]
    if not values:
        return Markup("")
    step, height = 38, 38 * len(rows) + TOP + BOTTOM
    across = _Scale(values, 12, WIDTH - 12)
    parts = _x_axis(across, height)
    for number, (name, marks) in enumerate(rows):
        y = TOP + number * step + 26
        here = [across(value) for _, value, _ in marks]
        parts.append(_text(clip(name, 48), 2, y - 12))
        parts.append(tag("line", x1=across.start, x2=across.end, y1=y, y2=y, class_="grid"))
        if here:
            parts.append(tag("line", x1=min(here), x2=max(here), y1=y, y2=y, class_="reach"))
        parts += [mark(style, across(value), y, words) for style, value, words in marks]
    parts.append(_text(x_label, WIDTH / 2, height - 4, "middle"))
    return picture(WIDTH, height, label, *parts)


def heat_map(matrix: Sequence[Sequence[float]], names: Sequence[str], label: str) -> Markup:
    """Draw a matrix of values between 0 and 1. Rows have names; columns have the numbers of the rows."""
    count = len(names)
    left = 108 if count <= MAX_NAMES else 4
    cell = min(34.0, (WIDTH - left - 4) / max(1, count))
    parts: list[Markup] = []
    for i, (name, row) in enumerate(zip(names, matrix, strict=True)):
        y = 20 + i * cell
        if count <= MAX_NAMES:
            parts.append(_text(f"{i + 1} {clip(name, 13)}", left - 6, y + cell / 2 + 4, "end"))
            parts.append(_text(str(i + 1), left + (i + 0.5) * cell, 14, "middle"))
        for j, value in enumerate(row):
            x, fill = left + j * cell, ramp(value)
            words = tag("title", f"{name}, {names[j]}: {value:.3f}")
            parts.append(tag("rect", words, x=x, y=y, width=cell - 1, height=cell - 1, fill=fill))
            if cell >= 24:
                ink = "black" if luminance(fill) > 0.179 else "white"  # the colour with more contrast
                middle = x + (cell - 1) / 2
                parts.append(tag("text", f"{value:.2f}", x=middle, y=y + cell / 2 + 4, class_=f"cell {ink}"))
    return picture(left + count * cell + 4, 24 + count * cell, label, *parts, style="chart heat")


def bubbles(counts: Sequence[tuple[str, Sequence[int]]], classes: Sequence[str], style: str, label: str) -> Markup:
    """Draw a table of counts; the area of a circle is the count."""
    columns = max([1, len(classes), *(len(row) for _, row in counts)])
    longest = max(map(len, classes), default=1) if len(classes) <= MAX_NAMES else 0
    left, top = 108, 12 + 6.2 * min(12, longest)
    across = (WIDTH - left - 8) / columns
    down = max(18.0, min(34.0, across))
    largest = max([1, *(n for _, row in counts for n in row)])
    parts: list[Markup] = []
    for j, name in enumerate(classes if longest else ()):
        x, shift = left + (j + 0.5) * across, 4 if longest > 2 else 0  # long names are turned
        turn = f"rotate({-90 if shift else 0} {_short(x + shift)} {_short(top - 6)})"
        anchor = "start" if shift else "middle"
        parts.append(tag("text", clip(name, 12), x=x + shift, y=top - 6, transform=turn, text_anchor=anchor))
    for i, (owner, row) in enumerate(counts):
        y = top + (i + 0.5) * down
        parts.append(_text(clip(owner, 15), left - 8, y + 4, "end"))
        parts.append(tag("line", x1=left, x2=WIDTH - 8, y1=y, y2=y, class_="grid"))
        for j, number in enumerate(row):
            if number:
                radius = max(0.8, math.sqrt(number / largest) * min(down, max(across, 6.0)) * 0.46)
                words = tag("title", f"{owner}, class {classes[j] if j < len(classes) else j}: {number}")
                parts.append(tag("circle", words, cx=left + (j + 0.5) * across, cy=y, r=radius, class_=f"mark {style}"))
    return picture(WIDTH, top + len(counts) * down + 6, label, *parts)


def scatter(points: Sequence[tuple[float, float, str]], pictures: Sequence[str], style: str, label: str) -> Markup:
    """Draw points (x, y, tooltip) as the pictures with the given ids, or as dots if there are none."""
    half = 8.0
    across = _Scale([x for x, _, _ in points], half + 2, WIDTH - half - 2, margin=0)
    up = _Scale([y for _, y, _ in points], WIDTH - half - 2, half + 2, margin=0)
    parts = [
        use(pictures[k], across(x) - half, up(y) - half, 2 * half, words)
        if pictures
        else tag("circle", tag("title", words), cx=across(x), cy=up(y), r=3.5, class_=f"mark {style}", opacity=0.7)
        for k, (x, y, words) in enumerate(points)
    ]
    return picture(WIDTH, WIDTH, label, *parts, style="chart plane")


def use(picture_id: str, x: float, y: float, side: float, words: str) -> Markup:
    """Show a picture that is stored once in the page."""
    place = f"translate({_short(x)} {_short(y)}) scale({side:g})"
    return tag("use", tag("title", words), href=f"#{picture_id}", transform=place)


def ramp(value: float) -> str:
    """Return the viridis colour of a value from 0 to 1. It is safe for colour-blind readers."""
    return to_hex(colormaps["viridis"](min(1.0, max(0.0, float(value)))))


def luminance(colour: str) -> float:
    """Return the relative luminance of '#rrggbb' (WCAG)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`."""
    values = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(f"{value:.10g}") for value in values if low - 1e-9 <= value <= high + 1e-9]


def clip(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


class _Scale:
    """Maps values to positions, with a margin at both ends; `log` is for positive values."""

    def __init__(
        self, values: Iterable[float], start: float, end: float, log: bool = False, margin: float = 0.04
    ) -> None:
        self.start, self.end, self.log = start, end, log
        scaled = [math.log10(value) if log else value for value in values]
        low, high = min(scaled), max(scaled)
        flat = high - low <= 1e-9 * max(abs(high), abs(low))
        room = abs(low) * 0.1 or 1.0 if flat else (high - low) * margin
        self.low, self.high = low - room, high + room

    def __call__(self, value: float) -> float:
        fraction = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.start + fraction * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high)
        steps = (1, 2, 5) if self.high - self.low < 2 else (1,)
        values = LogLocator(subs=steps).tick_values(10**self.low, 10**self.high)
        return [float(value) for value in values if self.low <= math.log10(value) <= self.high]


def _drawable(line: Line, log: bool) -> Line:
    def good(*values: float) -> bool:
        return all(math.isfinite(v) and abs(v) < MAX_VALUE and (v > 0 or not log) for v in values)

    points = [(x, y, words) for x, y, words in line.points if good(y)]
    return Line(line.style, points, [(x, low, high) for x, low, high in line.band if good(low, high)])


def _y_axis(up: _Scale, across: _Scale) -> list[Markup]:
    parts = []
    for value in up.ticks():
        y = up(value)
        parts.append(tag("line", x1=across.start, x2=across.end, y1=y, y2=y, class_="grid"))
        parts.append(_text(f"{value:g}", across.start - 6, y + 4, "end"))
    return parts


def _x_axis(across: _Scale, height: float, whole: bool = False) -> list[Markup]:
    base = height - BOTTOM
    parts = [tag("line", x1=across.start, x2=across.end, y1=base, y2=base, class_="axis")]
    shown = [v for v in across.ticks() if not whole or v == int(v)]
    return parts + [_text(f"{value:g}", across(value), base + 16, "middle") for value in shown]


def _text(words: str, x: float, y: float, anchor: str = "start") -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if k else 'M'}{_short(x)},{_short(y)}" for k, (x, y) in enumerate(points))


def _short(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
