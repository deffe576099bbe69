"""Who takes part in a run, and where their images and models are: one protocol, three implementations.

simulated.py   a split of one data set, on this machine
python.py      objects passed by a user's program
node.py        files on the own disks of participants: settings (node_settings.py), RAD (node_rad.py), state
"""

from pathlib import Path

from ...plugins import is_known_place
from ...runs.folder import RunFolder
from .node import NodeSite
from .python import PythonSite, ReopenedPythonSite
from .simulated import SimulatedSite
from .site import NodeConfig, Setup, Site

__all__ = ["NodeConfig", "NodeSite", "PythonSite", "Setup", "SimulatedSite", "Site", "open_site"]


def open_site(folder: RunFolder, to_train: bool = False) -> Site:
    """Open the site of an existing run. Its kind was recorded when the run was created.

    Node settings that the folder names are read only if they were used on this machine before, or `to_train`: the
    folder may come from someone else.
    """
    kind = folder.read_facts().site
    if kind == "simulated":
        return SimulatedSite(folder)
    if kind == "python":
        return ReopenedPythonSite(folder)
    paths = folder.read_json("facts.json").get("nodes", [])
    return NodeSite([Path(path) for path in paths] if to_train or all(map(is_known_place, paths)) else [])
