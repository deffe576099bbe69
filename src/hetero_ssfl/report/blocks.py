"""The building blocks of a page, as plain data. The template renders them."""

from collections.abc import Container, Sequence
from typing import Literal, NamedTuple, TypeAlias

from markupsafe import Markup

TEXT = range(0)  # for a table without numeric columns


class Figure(NamedTuple):
    title: str
    drawing: Markup
    note: str = ""


class Figures(NamedTuple):
    """Figures side by side, if there is room."""

    figures: Sequence[Figure]
    size: Literal["small", "medium", "large"] = "medium"


class Rows(NamedTuple):
    """A table."""

    caption: str | Markup
    head: Sequence[str]
    rows: Sequence[Sequence[str | Markup]]
    numeric: Container[int] = range(1, 1000)  # the indices of numeric columns
    foot: Sequence[Sequence[str]] = ()


class Tiles(NamedTuple):
    """Tables side by side, if there is room."""

    tables: Sequence[Rows]


class Legend(NamedTuple):
    entries: Sequence[tuple[str, str, str]]  # colour, mark and text


class Text(NamedTuple):
    text: str
    code: bool = False


class Folded(NamedTuple):
    """Blocks that are hidden until the reader opens them."""

    title: str
    blocks: Sequence[Figures | Rows | Text]


Block: TypeAlias = Figures | Rows | Tiles | Legend | Text | Folded


class Section(NamedTuple):
    anchor: str
    title: str
    intro: str
    blocks: Sequence[Block] = ()
