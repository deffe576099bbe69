"""Real numbers as vectors of integers, and the masks that are added to them: the keystream of ChaCha20 under a seed.

Integers modulo 2^word make a sum exact, whatever the order of its summands.
"""

import math
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Words = NDArray[np.unsignedinteger]

UNSIGNED: dict[int, type[np.unsignedinteger]] = {32: np.uint32, 64: np.uint64}
SIGNED: dict[int, type[np.signedinteger]] = {32: np.int32, 64: np.int64}


def fraction_bits(word: int, summands: int, largest: float) -> int:
    """Return the bits after the binary point with which a sum of `summands` values up to ±`largest` fits a word."""
    return word - 2 - math.floor(math.log2(summands * largest))


def encode(values: NDArray[np.float64], word: int, summands: int, largest: float) -> Words:
    """Round values to fixed point. Values beyond ±`largest` are clipped, so that no sum can wrap around."""
    scaled = np.rint(np.clip(values, -largest, largest) * 2.0 ** fraction_bits(word, summands, largest))
    most = float((2 ** (word - 1) - 1) // summands)
    return np.clip(scaled, -most, most).astype(np.int64).astype(UNSIGNED[word])


def decode(words: Words, summands: int, largest: float) -> NDArray[np.float64]:
    """Return the real numbers that a sum of encoded values stands for."""
    word = words.itemsize * 8
    return words.view(SIGNED[word]).astype(np.float64) / 2.0 ** fraction_bits(word, summands, largest)


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
