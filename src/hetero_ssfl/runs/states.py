"""The states of one participant in a run folder: its networks, or its contributions on the server."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import DamagedError, LostStateError, ProtocolError
from .files import COPY, load_state, locked, save_tensors

STATE_FILE = re.compile(r"round-\d{6}\.safetensors")


class StateFolder:
    """The tensors of one participant after its newest rounds: its networks, or its contributions on the server.

    Two rounds are kept because a server that crashes before it saves a round requests that round again. Until the
    server has saved a round, a run folder keeps three, so that the round before can also be repeated.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path, self.keep = path, keep

    def save(self, round_number: int, tensors: Mapping[str, Tensor]) -> None:
        """Save a round. Later ones are deleted: they were not committed, and must not displace the earlier state."""
        save_tensors(self.file(round_number), tensors, self._about(round_number))
        self.forget_after(round_number)
        self.prune(self.keep)

    def prune(self, keep: int = 2) -> None:
        for old in self._saved()[:-keep]:
            self.file(old).unlink(missing_ok=True)  # a leftover worker of a killed run may have deleted it

    def forget_after(self, round_number: int) -> None:
        """Delete the files of unfinished rounds after a crash."""
        for later in (number for number in self._saved() if number > round_number):
            self.file(later).unlink(missing_ok=True)

    def newest(self, limit: int) -> int:
        """Return the newest saved round up to `limit`; 0 for an untrained client."""
        saved = self._saved()
        newest = max((r for r in saved if r <= limit), default=0)
        if not newest and len(saved) > 1:
            raise ProtocolError(
                f"the server asked for networks after round {limit}, but '{self.path.name}' has only rounds {saved}. "
                "The server's run folder may be an old copy: continue with the newest one."
            )
        return newest

    def load(self, round_number: int) -> dict[str, Tensor]:
        tensors, about = load_state(self.file(round_number))
        if about != self._about(round_number):
            found = f"the state of {about.get('name')} after round {about.get('round')}"
            raise LostStateError(f"'{self.file(round_number)}' holds {found}. {COPY}")
        return tensors

    def _about(self, round_number: int) -> dict[str, Any]:
        """Return what a file says about itself, so that a file in another's place is noticed."""
        return {"name": self.path.name, "round": round_number}

    def lock(self) -> AbstractContextManager[None]:
        """Allow one training at a time: after a timeout, the server may ask again while the old training still runs."""
        busy = ProtocolError(f"'{self.path.name}' is still busy with an earlier message. Ask again next round.")
        return locked(self.path / ".lock", busy)

    def _saved(self) -> list[int]:
        files = (file for file in self.path.glob("round-*") if STATE_FILE.fullmatch(file.name))
        return sorted(int(file.stem.removeprefix("round-")) for file in files)

    def named(self, file: str) -> Path:
        """Return the file with this name, which the commit point gives."""
        if not isinstance(file, str) or not STATE_FILE.fullmatch(file):
            raise DamagedError(f"'{self.path}' has no file {str(file)[:40]!r}, expected round-N.safetensors. {COPY}")
        return self.path / file

    def file(self, round_number: int) -> Path:
        return self.path / f"round-{round_number:06d}.safetensors"
