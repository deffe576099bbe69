"""The only package that knows Flower. Its names are imported when first used: `nursery` alone loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import client_names, mutual_cka_of, participants, reevaluate, resume, start, start_or_resume

__all__ = ["client_names", "mutual_cka_of", "participants", "reevaluate", "resume", "start", "start_or_resume"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hetero_ssfl.federation' has no attribute '{name}'")
    return getattr(import_module(".engine", __name__), name)
