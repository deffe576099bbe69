"""Vectors of integers, and the masks that are added to them: the keystream of ChaCha20 under a seed."""

from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from .fixed_point import UNSIGNED, Words


@dataclass(frozen=True)
class Layout:
    """The shape of the vectors of one sum."""

    figures: int
    """Number of integers modulo 2^64."""
    body: int
    """Number of integers modulo 2^word."""
    word: int = 32

    def zeros(self) -> "Vector":
        return Vector(np.zeros(self.figures, np.uint64), np.zeros(self.body, UNSIGNED[self.word]))


@dataclass(frozen=True)
class Vector:
    figures: NDArray[np.uint64]
    body: Words

    @property
    def layout(self) -> Layout:
        return Layout(self.figures.size, self.body.size, self.body.itemsize * 8)

    def copy(self) -> "Vector":
        return Vector(self.figures.copy(), self.body.copy())

    def add(self, other: "Vector", sign: int = 1) -> None:
        """Add or subtract another vector in place, modulo 2^64 and 2^word."""
        change = np.add if sign > 0 else np.subtract
        change(self.figures, other.figures, out=self.figures)
        change(self.body, other.body, out=self.body)


def mask_of(seed: bytes, layout: Layout) -> Vector:
    """Expand a seed into a vector of uniform integers."""
    size = 8 * layout.figures + layout.word // 8 * layout.body
    stream = bytearray(size)
    Cipher(ChaCha20(seed, bytes(16)), None).encryptor().update_into(bytes(size), stream)
    figures = np.frombuffer(stream, "<u8", layout.figures)
    body = np.frombuffer(stream, np.dtype(UNSIGNED[layout.word]).newbyteorder("<"), offset=8 * layout.figures)
    return Vector(figures, body)


def sign_of(own: str, peer: str) -> int:
    """Of two participants, one adds their common mask and the other subtracts it."""
    return 1 if own < peer else -1
