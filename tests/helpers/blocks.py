"""The code blocks of the documentation."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")
FILE = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Line number of its first line of code."""
    language: str
    text: str
    not_run: str | None
    """Why it is not run, if a comment before the block says so."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file name to save the block as, if its first line has one."""
        found = FILE.match(self.text)
        return found[1] if found else None

    @property
    def commands(self) -> Iterator[str]:
        """Return the shell commands, without comments and variable assignments."""
        for line in self.text.replace("\\\n", " ").splitlines():
            for part in re.sub(r"\s#\s.*|^#.*", "", line).split("&&"):
                if part.strip():
                    yield re.sub(r"^(\w+=\S+ +)*", "", part.strip())


def blocks_of(path: Path) -> list[Block]:
    text, found = path.read_text(), []
    for match in FENCE.finditer(text):
        reason = NOT_RUN.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 2
        code = textwrap.dedent(match["text"])
        found.append(Block(str(path.relative_to(ROOT)), line, match["language"], code, reason[1] if reason else None))
    return found


def shortened(script: str) -> str:
    """Return the README's script with two passes per round; the default, 100 steps, is for real data."""
    settings = 'settings={"data.side": 32'
    assert settings in script
    return script.replace(settings, f'{settings}, "local_epochs": 2')
