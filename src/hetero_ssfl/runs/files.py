"""Files that survive a crash: written completely or not at all, with a digest that is checked when they are read."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import DamagedError, HeteroSSFLError, LostStateError, RunError
from .sealing import COPY, altered, blank_seal, seal_json, seal_tensors, tensors_match, unseal_json


def write_atomically(path: Path, *content: bytes | memoryview) -> None:
    """Write a file completely or not at all, even if the power fails."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some disk space; nothing was lost" if full else "Choose a place where you may write"
        raise RunError(f"cannot write '{path}': {error.strerror}. {remedy}.") from None
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def append_line(path: Path, line: str, most: int = 2**20) -> None:
    """Append to a log that is started anew when it has `most` bytes. A log that cannot be written is not an error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > most:
            path.replace(path.with_name(f"{path.name}.1"))
        with path.open("a") as file:
            file.write(f"{line}\n")


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, seal_json(content))


def read_json(path: Path) -> dict[str, Any]:
    return unseal_json(path.read_bytes(), path)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
    # Copies, because safetensors refuses tensors that share memory, such as tied weights.
    contents = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    write_atomically(path, *seal_tensors(save(contents, {"about": blank_seal(about or {})})))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and what `save_tensors` was told about them."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            if not isinstance(about, dict) or not tensors_match(path):
                raise altered(path)
            about.pop("sha256", None)
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise DamagedError(f"'{path}' is missing. {COPY}") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"'{path}' cannot be read ({error}). {COPY}") from None


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the state of a server or client. If it is damaged, the error says that it can be computed again."""
    try:
        return load_tensors(path)
    except DamagedError as error:
        raise LostStateError(str(error)) from None


class SavedTensors(Mapping[str, Tensor]):
    """Tensors in a file that are read on access, so that a thousand clients' contributions need no memory.

    The files that were read last stay in memory, so that a round reads and hashes each of them once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _tensors(self) -> dict[str, Tensor]:
        stat = self.path.stat() if self.path.exists() else None
        return _load_once(self.path, stat and (stat.st_mtime_ns, stat.st_ino))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors())

    def __len__(self) -> int:
        return len(self._tensors())


@lru_cache(maxsize=20)  # as many as a round's events show; the memory of a server must not grow with its clients
def _load_once(path: Path, version: tuple[int, int] | None) -> dict[str, Tensor]:
    return load_state(path)[0]


@contextmanager
def locked(path: Path, busy: HeteroSSFLError) -> Iterator[None]:
    """Hold a file's lock, or raise `busy`. The system releases the lock when the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise RunError(
            f"cannot write in '{path.parent}': {error.strerror}. Check the permissions of the folder."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise busy from None
        yield
