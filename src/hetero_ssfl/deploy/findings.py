"""What `deploy check` found: one line per finding, which names the machine and the part it is about."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import HeteroSSFLError

Level = Literal["ok", "warning", "stops"]
"""`stops`: a run cannot start, or this machine cannot take part in it."""
Part = tuple[Level, str]
UNCHECKED = "was not checked"


@dataclass(frozen=True)
class Finding:
    who: str
    """"server", or the name of a node."""
    what: str
    level: Level
    text: str

    @property
    def unchecked(self) -> bool:
        """Whether it says that a part was left out."""
        return UNCHECKED in self.text


def merged(found: Iterable[Finding]) -> list[Finding]:
    """Combine warnings that are the same on several machines into one, which names all of them."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for number, it in enumerate(found):
        own = (it.what, it.text) if it.level == "warning" else (it.what, it.text, str(number))
        groups.setdefault(own, []).append(it)
    return [replace(same[0], who=", ".join(dict.fromkeys(it.who for it in same))) for same in groups.values()]


def collect(who: str, what: str, parts: Iterable[Part]) -> Iterator[Finding]:
    """Yield the findings of one check. An error of ours ends that check, and is a finding itself."""
    try:
        for level, text in parts:
            yield Finding(who, what, level, text)
    except HeteroSSFLError as error:
        yield Finding(who, what, "stops", str(error))
    except OSError as error:
        yield Finding(who, what, "stops", f"'{error.filename}' cannot be read: {error.strerror}.")
