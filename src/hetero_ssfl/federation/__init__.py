"""The only package that imports Flower.

records.py    packs messages and checks them
sites/        who takes part, and where their images and models are
client/       the participant's side of a round
server/       the server's side of a round
engines/      worker processes and Ray, which carry the messages on one machine
running.py    the one way to start or continue a run
continuing.py more rounds or other settings for an earlier run
superlink.py  the server's side on Flower's deployment engine

The names below are imported on first use, so that importing `engines.forkserver` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .continuing import continue_with as continue_with
    from .engines.forkserver import end_with_parent as end_with_parent
    from .running import check_resumable as check_resumable
    from .running import default_folder as default_folder
    from .running import encoders_of as encoders_of
    from .running import fitted as fitted
    from .running import mutual_cka_of as mutual_cka_of
    from .running import namesake as namesake
    from .running import open_run as open_run
    from .running import participants as participants
    from .running import reevaluate as reevaluate
    from .running import resume as resume
    from .running import run_here as run_here
    from .running import site_for as site_for
    from .running import start as start
    from .running import warn_of_changed_data as warn_of_changed_data

_HOME = {
    "check_resumable": "running",
    "continue_with": "continuing",
    "default_folder": "running",
    "encoders_of": "running",
    "end_with_parent": "engines.forkserver",
    "fitted": "running",
    "mutual_cka_of": "running",
    "namesake": "running",
    "open_run": "running",
    "participants": "running",
    "reevaluate": "running",
    "resume": "running",
    "run_here": "running",
    "site_for": "running",
    "start": "running",
    "warn_of_changed_data": "running",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hetero_ssfl.federation' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
