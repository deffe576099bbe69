"""The building blocks of a page, as plain data. The template renders them."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from markupsafe import Markup

TEXT = range(0)  # for a table without numeric columns


@dataclass(frozen=True)
class Figure:
    title: str
    drawing: Markup
    note: str = ""


@dataclass(frozen=True)
class Figures:
    """Figures side by side, if there is room."""

    figures: Sequence[Figure]
    size: Literal["small", "medium", "large"] = "medium"


@dataclass(frozen=True)
class Rows:
    """A table. `numeric` contains the indices of numeric columns, by default all but the first."""

    caption: str | Markup
    head: Sequence[str]
    rows: Sequence[Sequence[str | Markup]]
    numeric: Container[int] = range(1, 1000)
    foot: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Tiles:
    """Tables side by side, if there is room."""

    blocks: Sequence["Block"]


@dataclass(frozen=True)
class Legend:
    entries: Sequence[tuple[Markup, str]]


@dataclass(frozen=True)
class Text:
    text: str
    code: bool = False


@dataclass(frozen=True)
class Folded:
    """Blocks that are hidden until the reader opens them."""

    title: str
    blocks: Sequence["Block"]


Block: TypeAlias = Figures | Rows | Tiles | Legend | Text | Folded


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    intro: str
    blocks: Sequence[Block] = ()
