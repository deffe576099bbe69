"""The only package that imports Flower.

records.py    packs messages and checks them
sites/        who takes part, and where their images and models are
client/       the participant's side of a round
server/       the server's side of a round
engines/      worker processes and Ray, which carry the messages on one machine
running.py    the one way to start or continue a run
superlink.py  the server's side on Flower's deployment engine

The names below are imported on first use, so that importing `engines.forkserver` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .running import mutual_cka_of, new_folder, open_run, participants, reevaluate, resume, run_here, start

__all__ = ["mutual_cka_of", "new_folder", "open_run", "participants", "reevaluate", "resume", "run_here", "start"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hetero_ssfl.federation' has no attribute '{name}'")
    return getattr(import_module(".running", __name__), name)
