"""Files that survive a crash: written completely or not at all, with a digest that is checked when they are read.

    JSON      the key "sha256" holds the digest of all other keys
    text      the first line is a comment with the digest of all other lines
    tensors   the metadata of a safetensors file hold the digest of all other bytes

A file without a digest is damaged. Digests find accidents, not forgery: whoever changes a file on purpose can also
change its digest.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import DamagedError, HeteroSSFLError, LostStateError, RunError

KEY = "sha256"
BLANK = b"0" * 64
TEXT_MARK = f"# {KEY} = "
TENSOR_MARK = rf"\"{KEY}\": \"".encode()  # the metadata are JSON within the JSON of the header
COPY = "Restore it from a copy, or start the run again in another folder."


def altered(path: Path, remedy: str = COPY) -> DamagedError:
    return DamagedError(f"'{path}' does not match its digest: it was changed or damaged after it was written. {remedy}")


# --- any file ---


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


def append_line(path: Path, line: str, max_bytes: int = 2**20) -> None:
    """Append to a log that is started anew when it has `max_bytes`. A log that cannot be written is not an error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > max_bytes:
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


@contextmanager
def locked(path: Path, busy: HeteroSSFLError) -> Iterator[None]:
    """Hold a file's lock, or raise `busy`. The system releases the lock when the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except (FileExistsError, NotADirectoryError):
        raise RunError(f"'{path.parent}' cannot be a folder: a file is in its place. Choose another folder.") from None
    except OSError as error:
        raise RunError(f"cannot write in '{path.parent}': {error.strerror}. Check its permissions.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise busy from None
        yield


# --- JSON and text ---


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, seal_json(content))


def read_json(path: Path, remedy: str = COPY) -> dict[str, Any]:
    with _reading(path, remedy):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.pop(KEY, None) != _json_digest(content):
        raise altered(path, remedy)
    return content


def seal_json(content: Mapping[str, Any]) -> bytes:
    plain = json.loads(json.dumps(content))  # as a reader will see it: tuples are lists, all keys are strings
    return json.dumps({**plain, KEY: _json_digest(plain)}, indent=2).encode() + b"\n"


def _json_digest(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    write_atomically(path, f"{TEXT_MARK}{sha256(text.encode()).hexdigest()}\n{text}".encode())


def read_text(path: Path, remedy: str = COPY) -> str:
    with _reading(path, remedy):
        first, _, text = path.read_bytes().partition(b"\n")
    if first != f"{TEXT_MARK}{sha256(text).hexdigest()}".encode():
        raise altered(path, remedy)
    return text.decode()


@contextmanager
def _reading(path: Path, remedy: str = COPY) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(f"'{path}' is missing. {remedy}") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"'{path}' cannot be read ({error}). {remedy}") from None


# --- tensors ---


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
    # Copies, because safetensors refuses tensors that share memory, such as tied weights.
    contents = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    data = save(contents, {"about": json.dumps({**(about or {}), KEY: BLANK.decode()})})
    place = data.rindex(TENSOR_MARK, 0, 8 + int.from_bytes(data[:8], "little")) + len(TENSOR_MARK)
    view = memoryview(data)  # slices without copying
    write_atomically(path, view[:place], sha256(data).hexdigest().encode(), view[place + len(BLANK) :])


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and what `save_tensors` was told about them."""
    with _reading(path), safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get("about", "{}"))
        if not isinstance(about, dict) or not _tensors_match(path):
            raise altered(path)
        about.pop(KEY, None)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors, about


def _tensors_match(path: Path) -> bool:
    """Tell whether a safetensors file has a digest and matches it."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        place = header.rfind(TENSOR_MARK) + len(TENSOR_MARK)
        if place < len(TENSOR_MARK):
            return False
        written = header[place : place + len(BLANK)]
        digest = sha256(start + header[:place] + BLANK + header[place + len(BLANK) :])
        buffer = memoryview(bytearray(2**20))
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return written == digest.hexdigest().encode()


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
