"""The terminal. Text from elsewhere (nodes, run folders, file names) must not control it."""

from collections.abc import Iterator
from typing import Any

import rich.console
from rich.segment import Segment


class Console(rich.console.Console):
    """Rich's console, which prints control characters that are in a text as escapes, such as \\x1b."""

    def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.is_control else segment._replace(text=printable(segment.text))


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
