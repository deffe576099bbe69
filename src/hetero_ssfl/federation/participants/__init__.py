"""Who takes part in a run, and where their images and models are: one protocol (site.py), two implementations.

local.py       clients on this machine: rows of one data set (split.py), or objects of a program (python_data.py,
               reading.py)
node.py        files on the own disks of participants: settings (node_settings.py), RAD (node_rad.py), state
limits.py      what a node accepts
participant.py one participant as its ClientApp sees it, wherever it is
"""

from pathlib import Path

from ...plugins import is_known_place
from ...runs.folder import RunFolder
from .local import LocalSite
from .node import NodeSite
from .python_data import PassedData, ReopenedData
from .site import ClientInfo, NodeConfig, Request, Setup, Site
from .split import SplitData

__all__ = [
    "ClientInfo",
    "LocalSite",
    "NodeConfig",
    "NodeSite",
    "PassedData",
    "Request",
    "Setup",
    "Site",
    "SplitData",
    "open_site",
]


def open_site(folder: RunFolder, to_train: bool = False) -> Site:
    """Open the site of an existing run. Its kind was recorded when the run was created.

    Node settings that the folder names are read only if they were used on this machine before, or `to_train`: the
    folder may come from someone else.
    """
    kind = folder.read_facts().site
    if kind != "nodes":
        return LocalSite(ReopenedData(folder) if kind == "python" else None)
    paths = folder.read_json("facts.json").get("nodes", [])
    return NodeSite([Path(path) for path in paths] if to_train or all(map(is_known_place, paths)) else [])
