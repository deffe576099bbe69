"""What a participant says about a failure.

On the user's own machine the server gets the whole text, with the last frames of the user's code. A node sends a code
and a sentence without names, paths or values of its data. The full text stays in the node's own log and in
`faults.log` in its home, under an id that both sides show.
"""

import json
import logging
import time
import traceback
import uuid
from pathlib import Path

import torch

from ...errors import ConfigError, DataError, HeteroSSFLError, NotFiniteError, ProtocolError, RunError
from ...plugins import own_frames, place
from ...runs.files import append_line
from ...runs.folder import FAULTS

log = logging.getLogger(__name__)

MAX_CHARACTERS = 1000  # of an error in a reply or in the log; a config may hold much longer words

SENTENCES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    (DataError, "data", "its images cannot be used"),
    (ConfigError, "settings", "its settings, or the code that they name, cannot be used"),
    (RunError, "files", "it cannot read or write its own files"),
    ((torch.OutOfMemoryError, MemoryError), "memory", "it ran out of memory"),
)
"""What a node says about each kind of error, and its code."""


def full_text(error: Exception) -> str:
    """Return the last frames of the user's code, if it failed, and then the error in one line."""
    if isinstance(error, (HeteroSSFLError, torch.OutOfMemoryError)):
        return f"{type(error).__name__}: {_one_line(error)}"
    frames = "".join(traceback.format_list(own_frames(error)))
    return f"{frames}{type(error).__name__}: {_one_line(error)}{place(error)}"


def public_text(error: Exception, home: Path | None) -> str:
    """Keep the full text on this machine, and return what may leave it: the code, a sentence and an id."""
    if isinstance(error, (ProtocolError, NotFiniteError)):  # about the server's message or the loss, not about the data
        log.warning("refused: %s", _one_line(error))
        return full_text(error)
    fault = uuid.uuid4().hex[:8]
    log.warning("fault %s: %s", fault, _one_line(error), exc_info=None if isinstance(error, HeteroSSFLError) else error)
    if home is not None:
        entry = {"time": time.time(), "fault": fault, "text": "".join(traceback.format_exception(error))}
        append_line(home / FAULTS, json.dumps(entry))
    where = "the node's log" if home is None else f"{FAULTS} in its home"
    return f"{_sentence(error)} (fault {fault}; {where} has the details)"


def _sentence(error: Exception) -> str:
    for kind, code, sentence in SENTENCES:
        if isinstance(error, kind):
            return f"{code}: {sentence}" + (_system_reason(error) if code == "files" else "")
    return f"code: its own code failed with {type(error).__name__}"


def _system_reason(error: BaseException) -> str:
    """Return the system's words for the fault, such as ': No space left on device', without the path."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError):
        return f": {cause.strerror}"
    return _system_reason(cause) if cause else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_CHARACTERS]
