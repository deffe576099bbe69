"""Gaussian noise from a cryptographic generator, for vectors of bounded norm."""

import math
import secrets
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

TAIL = 9.0  # deviations: the probability of more is 2e-19

FLOAT32_BITS = 23


def gaussian(size: int, deviation: float) -> NDArray[np.float64]:
    """Draw normal numbers from a cryptographic generator, which nobody can predict from other draws (Box-Muller)."""
    half = -(-size // 2)
    stream = bytearray(16 * half)
    Cipher(ChaCha20(secrets.token_bytes(32), bytes(16)), None).encryptor().update_into(bytes(len(stream)), stream)
    bits = np.frombuffer(stream, "<u8") >> np.uint64(11)
    first, second = ((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(2, half)
    radius = deviation * np.sqrt(-2 * np.log(first))
    return np.concatenate([radius * np.cos(2 * np.pi * second), radius * np.sin(2 * np.pi * second)])[:size]


@dataclass(frozen=True)
class Noise:
    """What makes the release of a vector private: a bound on its norm, and noise."""

    clip: float
    """The largest norm of one client's vector."""
    deviation: float
    """The standard deviation of the noise in each entry of what others see, a sum of vectors or a single one."""

    def clipped(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        return vector * min(1.0, self.clip / max(float(np.linalg.norm(vector)), 1e-300))

    def alone(self, vector: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the clipped vector with the whole noise, for a server that sees this vector.

        Values are rounded to multiples of one power of two, all of which float32 can hold: the low bits of
        floating-point noise would tell which sums are possible (Mironov 2012).
        """
        step = 2.0 ** (math.ceil(math.log2(self.clip + TAIL * self.deviation)) - FLOAT32_BITS)
        noisy = self.clipped(vector) + gaussian(vector.size, self.deviation).reshape(vector.shape)
        return (step * np.round(noisy / step)).astype(np.float32)
