"""The cache folder: decoded images, and small facts that take seconds to find out. All processes of a user share it.

Its size is limited by HETERO_SSFL_CACHE_MB. Beyond that, the entries that were unused for the longest time are deleted.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import DataError

USUAL_MB = 20_000


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "hetero-ssfl")
    return Path(os.environ.get("HETERO_SSFL_CACHE", default)).expanduser()


def max_bytes() -> int:
    text = os.environ.get("HETERO_SSFL_CACHE_MB", str(USUAL_MB))
    if not text.isdecimal() or not int(text):
        raise DataError(f"HETERO_SSFL_CACHE_MB is '{text[:40]}', expected a whole number of at least 1. Correct it.")
    return int(text) * 2**20


def write_private(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill an empty file, which then replaces `file`. Only its owner may read it: images are private."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = file.with_suffix(f".{os.getpid()}{file.suffix}")
    scratch.unlink(missing_ok=True)
    scratch.touch(mode=0o600)
    write(scratch)
    scratch.replace(file)


def prune_cache(newest: Path) -> None:
    """Delete the entries that were not used for the longest time until the rest fits. `newest` always stays.

    A process that has mapped a deleted file keeps its content until it ends.
    """
    entries: dict[str, list[tuple[Path, os.stat_result]]] = {}
    for file in newest.parent.iterdir():
        with suppress(OSError):  # another process may be deleting it
            entries.setdefault(file.name.partition(".")[0], []).append((file, file.stat()))
    excess = sum(stat.st_size for files in entries.values() for _, stat in files) - max_bytes()
    entries.pop(newest.name, None)
    for files in sorted(entries.values(), key=lambda files: max(stat.st_mtime_ns for _, stat in files)):
        if excess <= 0:
            return
        for file, stat in files:
            file.unlink(missing_ok=True)
            excess -= stat.st_size


def remembered(key: object, find_out: Callable[[], Any]) -> Any:
    """Return a JSON value from the cache or, the first time, from `find_out`. It must depend on nothing but `key`."""
    file = cache_folder() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.fact"
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    value = find_out()
    with suppress(OSError):  # without a cache it is found out again
        write_private(file, lambda path: path.write_text(json.dumps(value)))
    return value
