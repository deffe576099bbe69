"""Randomness is an argument, never a global.

Every random choice names its scope, for example `rng_for(seed, "client", 3, "round", 7)`. The numbers depend on the
scope and not on the process or the time, so a run gives the same bits with any number of workers and after any crash.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(seed: int, *scope: str | int) -> int:
    """Return a 63-bit seed for one named purpose; different scopes give unrelated seeds."""
    text = "\x1f".join([str(seed), *map(str, scope)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng_for(seed: int, *scope: str | int) -> torch.Generator:
    """Return a new generator for one named purpose."""
    return torch.Generator().manual_seed(seed_for(seed, *scope))


@contextmanager
def global_seed(seed: int, *scope: str | int) -> Iterator[None]:
    """Seed torch's global generator for code that uses it (parameter init, a user's dropout)."""
    # By default torch saves the generators of all GPUs, which would initialise CUDA in a process that may later fork.
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = [torch.cuda.current_device()] if started else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_for(seed, *scope))
        yield
