"""Who takes part in a run, and where their images and models are: one protocol, three implementations.

simulated.py   a split of one data set, on this machine
python.py      objects passed by a user's program
node.py        node settings files on the participants' own disks
"""

from pathlib import Path

from ...runs import RunFolder
from .node import NodeSite
from .python import ReopenedPythonSite
from .simulated import SimulatedSite
from .site import NodeConfig, Setup, Site

__all__ = ["NodeConfig", "NodeSite", "Setup", "SimulatedSite", "Site", "open_site"]


def open_site(folder: RunFolder) -> Site:
    """Open the site of an existing run. Its kind was recorded when the run was created."""
    kind = folder.site
    if kind == "simulated":
        return SimulatedSite(folder)
    if kind == "python":
        return ReopenedPythonSite(folder)
    return NodeSite([Path(path) for path in folder.read_json("facts.json").get("nodes", [])])
