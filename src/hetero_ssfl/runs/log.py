"""events.jsonl, with a digest that the commit point of each round contains."""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..errors import LostStateError, RunError
from .files import write_atomically
from .schema import SiteKind as SiteKind
from .sealing import COPY, altered


class EventLog:
    """events.jsonl with a running digest. The commit point of a round says how long the file was, and its digest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._digest = 0, sha256()
        self._known = False  # whether size and digest are those of the file

    def append(self, lines: bytes) -> None:
        self._look()
        try:
            with self.path.open("ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write events in '{self.path.parent}': {error.strerror}. Free some disk space and resume."
            ) from None
        self._size += len(lines)
        self._digest.update(lines)

    def mark(self) -> dict[str, Any]:
        """Return the length and digest of the file for a commit point."""
        self._look()
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def read(self, mark: Mapping[str, Any] | None) -> bytes:
        """Return the part of the file that a commit point covers, checked; the whole file without one."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise LostStateError(f"'{self.path}' cannot be read ({error.strerror}). {COPY}") from None
        if mark is None:
            return content
        committed = content[: mark["bytes"]]
        if len(committed) != mark["bytes"] or sha256(committed).hexdigest() != mark["sha256"]:
            raise LostStateError(str(altered(self.path)))
        return committed

    def keep(self, content: bytes) -> None:
        """Replace the file after a crash by what counts of it."""
        write_atomically(self.path, content)
        self._known = False

    def _look(self) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if not self._known or size != self._size:
            content = self.read(None)
            self._size, self._digest, self._known = len(content), sha256(content), True
