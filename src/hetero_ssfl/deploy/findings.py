"""What `deploy check` found: one line per finding, which names the machine and the part it is about."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import HeteroSSFLError

Level = Literal["ok", "warning", "stops"]
"""`stops`: a run cannot start, or this machine cannot take part in it."""
Part = tuple[Level, str]


@dataclass(frozen=True)
class Finding:
    who: str
    """"server", or the name of a node."""
    what: str
    level: Level
    text: str


def collect(who: str, what: str, parts: Iterable[Part]) -> Iterator[Finding]:
    """Yield the findings of one check. An error of ours ends that check, and is a finding itself."""
    try:
        for level, text in parts:
            yield Finding(who, what, level, text)
    except HeteroSSFLError as error:
        yield Finding(who, what, "stops", str(error))
    except OSError as error:
        yield Finding(who, what, "stops", f"'{error.filename}' cannot be read: {error.strerror}.")
