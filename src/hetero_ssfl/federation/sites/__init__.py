"""Who takes part in a run, and where their images and models are: one protocol, three implementations.

simulated.py   a split of one data set, on this machine
python.py      objects that a user's program handed over
node.py        settings files on their owners' disks
"""

from pathlib import Path

from ...runs import RunFolder
from .node import NodeSite
from .python import ReopenedPythonSite
from .simulated import SimulatedSite
from .site import NodeConfig, Setup, Site

__all__ = ["NodeConfig", "NodeSite", "Setup", "SimulatedSite", "Site", "open_site"]


def open_site(folder: RunFolder) -> Site:
    """The site of a run that exists. Its kind was written once, when the run was created."""
    kind = folder.site
    if kind == "simulated":
        return SimulatedSite(folder)
    if kind == "python":
        return ReopenedPythonSite(folder)
    return NodeSite([Path(path) for path in folder.read_json("facts.json").get("nodes", [])])
