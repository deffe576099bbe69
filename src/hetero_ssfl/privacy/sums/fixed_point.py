"""Real numbers as integers modulo 2^word, so that sums are exact and do not depend on the order of their summands."""

import math

import numpy as np
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
