"""Digests inside files, so that a flipped bit, a cut or a changed number is found when a file is read.

    JSON      the key "sha256" holds the digest of all other keys
    text      the first line is a comment with the digest of all other lines
    tensors   the metadata of a safetensors file hold the digest of all other bytes

A digest is computed once for each write and checked at each read. A file without one is damaged. Digests find
accidents, not forgery: whoever changes a file on purpose can also change its digest.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..errors import DamagedError

KEY = "sha256"
BLANK = b"0" * 64
TEXT_MARK = f"# {KEY} = "
TENSOR_MARK = rf"\"{KEY}\": \"".encode()  # the metadata are JSON within the JSON of the header
COPY = "Restore it from a copy, or start the run again in another folder."


def altered(path: Path, remedy: str = COPY) -> DamagedError:
    return DamagedError(f"'{path}' does not match its digest: it was changed or damaged after it was written. {remedy}")


# --- JSON ---


def seal_json(content: Mapping[str, Any]) -> bytes:
    plain = json.loads(json.dumps(content))  # as a reader will see it: tuples are lists, all keys are strings
    return json.dumps({**plain, KEY: _json_digest(plain)}, indent=2).encode() + b"\n"


def unseal_json(data: bytes, path: Path, remedy: str = COPY) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"'{path}' is not valid JSON ({error}). {remedy}") from None
    if not isinstance(content, dict):
        raise DamagedError(f"'{path}' holds a {type(content).__name__}, expected a JSON object. {remedy}")
    if content.pop(KEY, None) != _json_digest(content):
        raise altered(path, remedy)
    return content


def _json_digest(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- text ---


def seal_text(text: str) -> str:
    return f"{TEXT_MARK}{sha256(text.encode()).hexdigest()}\n{text}"


def unseal_text(text: str, path: Path, remedy: str = COPY) -> str:
    """Return the text without its digest."""
    first, _, rest = text.partition("\n")
    if first != f"{TEXT_MARK}{sha256(rest.encode()).hexdigest()}":
        raise altered(path, remedy)
    return rest


# --- tensors ---


def blank_seal(about: Mapping[str, Any]) -> str:
    """Return the metadata of a safetensors file as JSON, with space for the digest."""
    return json.dumps({**about, KEY: BLANK.decode()})


def seal_tensors(data: bytes) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file whose metadata come from `blank_seal`, with the digest filled in."""
    place = data.rindex(TENSOR_MARK, 0, 8 + int.from_bytes(data[:8], "little")) + len(TENSOR_MARK)
    view = memoryview(data)  # slices without copying
    return [view[:place], sha256(data).hexdigest().encode(), view[place + len(BLANK) :]]


def tensors_match(path: Path) -> bool:
    """Tell whether a safetensors file has a digest and matches it."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        place = header.rfind(TENSOR_MARK) + len(TENSOR_MARK)
        if place < len(TENSOR_MARK):
            return False
        found = header[place : place + len(BLANK)]
        digest = sha256(start + header[:place] + BLANK + header[place + len(BLANK) :])
        buffer = memoryview(bytearray(2**20))
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return found == digest.hexdigest().encode()
