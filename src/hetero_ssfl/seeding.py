"""Randomness is an argument, never a global.

Every random choice names its scope, for example `rng_for(seed, "client", 3, "round", 7)`. The
numbers then depend on what is done and never on who does it or when, which is what lets a run give
the same bits with any number of workers and after any crash.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(seed: int, *scope: str | int) -> int:
    """A 63-bit seed for one named purpose; unequal scopes give unrelated seeds."""
    text = "\x1f".join([str(seed), *map(str, scope)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng_for(seed: int, *scope: str | int) -> torch.Generator:
    """A fresh generator for one named purpose."""
    return torch.Generator().manual_seed(seed_for(seed, *scope))


@contextmanager
def global_seed(seed: int, *scope: str | int) -> Iterator[None]:
    """Pin torch's global generator for code that reads it (parameter init, a user's dropout)."""
    # By default torch would save the generators of all GPUs, and so start CUDA in a process that may only want to fork.
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = [torch.cuda.current_device()] if started else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_for(seed, *scope))
        yield
