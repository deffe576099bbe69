"""Small charts as SVG. Colours are classes of the page's style sheet, so that they follow light and dark mode.

All text goes through `tag`, which escapes it: names come from other machines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH = 360  # about the width of a phone; a wide screen shows several charts side by side
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 38
LARGEST = 1e30  # figures beyond this are not drawn: differences of larger ones overflow
MOST_MARKS = 60
VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")


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
    shapes = (
        "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
        "M-3.6,-3.6h7.2v7.2h-7.2z",
        "M0,-4.8L4.4,3.4H-4.4z",
        "M0,-5L5,0L0,5L-5,0z",
    )
    number = int(style[1]) if style[1].isdigit() else 0
    where = f"translate({_short(x)} {_short(y)})"
    return tag("path", tag("title", words), d=shapes[number % len(shapes)], transform=where, class_=f"mark {style}")


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
    across = _Scale(min(xs), max(xs), LEFT, width - RIGHT)
    up = _Scale(min(ys), max(ys), height - BOTTOM, TOP, log)
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
        parts += [mark(line.style, across(x), up(y), words) for x, y, words in told[:: 1 + len(told) // MOST_MARKS]]
    return picture(width, height, label, *parts)


def dot_plot(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], x_label: str, label: str) -> Markup:
    """Draw a row per name with a mark for each series: (name, [(style, value, tooltip)])."""
    values = [value for _, marks in rows for _, value, _ in marks]
    if not values:
        return Markup("")
    step, height = 38, 38 * len(rows) + TOP + BOTTOM
    across = _Scale(min(values), max(values), 12, WIDTH - 12)
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
    left = 108 if count <= 24 else 4
    cell = min(34.0, (WIDTH - left - 4) / max(1, count))
    parts: list[Markup] = []
    for i, (name, row) in enumerate(zip(names, matrix, strict=True)):
        y = 20 + i * cell
        if count <= 24:
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
    columns = max([len(classes), *(len(row) for _, row in counts)])
    left, top = 108, 12 + 6.2 * min(12, max((len(name) for name in classes), default=1)) if len(classes) <= 24 else 12
    across, down = (WIDTH - left - 8) / max(1, columns), max(18.0, min(34.0, (WIDTH - left - 8) / max(1, columns)))
    largest = max([1, *(n for _, row in counts for n in row)])
    parts: list[Markup] = []
    for j, name in enumerate(classes if len(classes) <= 24 else ()):
        x = left + (j + 0.5) * across
        turn = f"rotate(-90 {_short(x + 4)} {_short(top - 6)})" if max(map(len, classes)) > 2 else "rotate(0)"
        anchor = "start" if max(map(len, classes)) > 2 else "middle"
        words = tag(
            "text", clip(name, 12), x=x + 4 * (anchor == "start"), y=top - 6, transform=turn, text_anchor=anchor
        )
        parts.append(words)
    for i, (owner, row) in enumerate(counts):
        y = top + (i + 0.5) * down
        parts.append(_text(clip(owner, 15), left - 8, y + 4, "end"))
        parts.append(tag("line", x1=left, x2=WIDTH - 8, y1=y, y2=y, class_="grid"))
        for j, number in enumerate(row):
            if number:
                radius = max(0.8, math.sqrt(number / largest) * min(down, max(across, 6.0)) * 0.46)
                named = classes[j] if j < len(classes) else str(j)
                words = tag("title", f"{owner}, class {named}: {number}")
                parts.append(tag("circle", words, cx=left + (j + 0.5) * across, cy=y, r=radius, class_=f"mark {style}"))
    return picture(WIDTH, top + len(counts) * down + 6, label, *parts)


def scatter(points: Sequence[tuple[float, float, str]], pictures: Sequence[str], style: str, label: str) -> Markup:
    """Draw points (x, y, tooltip) as the pictures with the given ids, or as dots if there are none."""
    half = 8.0
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    across = _Scale(min(xs), max(xs), half + 2, WIDTH - half - 2, tight=True)
    up = _Scale(min(ys), max(ys), WIDTH - half - 2, half + 2, tight=True)
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
    place = min(1.0, max(0.0, value)) * (len(VIRIDIS) - 1)
    low = min(int(place), len(VIRIDIS) - 2)
    ends = [[int(VIRIDIS[k][i : i + 2], 16) for i in (0, 2, 4)] for k in (low, low + 1)]
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def luminance(colour: str) -> float:
    """Return the relative luminance of '#rrggbb' (WCAG)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`."""
    rough = (high - low) / wanted or 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.10g}") for k in range(first, last + 1)]


def clip(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


class _Scale:
    """Maps values to positions, with a margin at both ends; `log` is for positive values."""

    def __init__(
        self, low: float, high: float, start: float, end: float, log: bool = False, tight: bool = False
    ) -> None:
        self.start, self.end, self.log = start, end, log
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)
        if self.high - self.low <= 1e-9 * max(abs(self.high), abs(self.low)):
            room = abs(self.low) * 0.1 or 1.0
        else:
            room = 0.0 if tight else (self.high - self.low) * 0.04
        self.low, self.high = self.low - room, self.high + room

    def __call__(self, value: float) -> float:
        fraction = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.start + fraction * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.floor(self.low), math.floor(self.high) + 1)
            steps = (1, 2, 5) if len(powers) <= 3 else (1,)
            return [step * 10.0**k for k in powers for step in steps if self.low <= k + math.log10(step) <= self.high]
        return ticks(self.low, self.high)


def _drawable(line: Line, log: bool) -> Line:
    def good(*values: float) -> bool:
        return all(math.isfinite(v) and abs(v) < LARGEST and (v > 0 or not log) for v in values)

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
