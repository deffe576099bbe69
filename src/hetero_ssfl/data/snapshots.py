"""Notice when the files of a source have changed: their names and contents are kept with a run.

A file with the same name, size and time is taken to be unchanged; others are compared by a digest of their contents.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cache import remembered
from .sources import DATASET_FILES, METADATA, TABLES, files_of, is_image, locate

Snapshot = dict[str, tuple[int, int, str]]
"""For each file below a source: size, time of its last change in nanoseconds, and a digest of its contents."""


def take_snapshot(source: str) -> Snapshot | None:
    """Return the files of a local source; None for data without files of their own (`digits`, a hub id)."""
    root = _root(source)
    if root is None:
        return None
    stats = _stats(root)
    # Remembered, so that the next run on the same files need not read them again.
    digests = remembered(["files", str(root), stats], lambda: {name: _digest(root, name) for name in stats})
    return {name: (*stat, digests[name]) for name, stat in stats.items()}


def what_changed(source: str, before: Mapping[str, Sequence[int | str]]) -> str | None:
    """Describe how the files of a source differ from an earlier snapshot; None if names and contents are the same."""
    root = _root(source)
    now = {} if root is None else _stats(root)
    removed, added = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    other = [name for name in sorted(now.keys() & before.keys()) if list(now[name]) != list(before[name])[:2]]
    changed = [name for name in other if root is None or _digest(root, name) != before[name][2]]
    groups = {"removed": removed, "added": added, "changed": changed}
    return ", ".join(f"{len(names)} {verb} (such as {names[0]})" for verb, names in groups.items() if names) or None


def _root(source: str) -> Path | None:
    place = None if source == "digits" else locate(source)
    return place.resolve() if isinstance(place, Path) else None


def _stats(root: Path) -> dict[str, tuple[int, int]]:
    base, known = root if root.is_dir() else root.parent, (*METADATA, *DATASET_FILES, "state.json")
    stats = {}
    for file in files_of(root):
        if is_image(file) or file.suffix.lower() in TABLES or file.name in known:
            stat = file.stat()
            stats[file.relative_to(base).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return stats


def _digest(root: Path, name: str) -> str:
    with (root / name if root.is_dir() else root).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
