"""Who takes part in a run, and where their images and models are: one protocol (site.py), two implementations.

local.py       clients on this machine: rows of one data set, or objects of a program (python_data.py)
node.py        files on the own disks of participants: settings (node_settings.py), RAD (node_rad.py), state
limits.py      what a node accepts
participant.py one participant as its ClientApp sees it, wherever it is
"""

from pathlib import Path

from ...plugins import is_known_place
from ...runs.folder import RunFolder
from .local import LocalSite as LocalSite
from .local import SplitData as SplitData
from .node import NodeSite as NodeSite
from .python_data import PassedData as PassedData
from .python_data import ReopenedData
from .site import ClientInfo as ClientInfo
from .site import NodeConfig as NodeConfig
from .site import Setup as Setup
from .site import Site as Site


def open_site(folder: RunFolder, to_train: bool = False) -> Site:
    """Open the site of an existing run. Its kind was recorded when the run was created.

    Node settings that the folder names are read only if they were used on this machine before, or `to_train`: the
    folder may come from someone else.
    """
    facts = folder.read_facts()
    if facts.site != "nodes":
        return LocalSite(ReopenedData(folder) if facts.site == "python" else None)
    return NodeSite([Path(path) for path in facts.nodes] if to_train or all(map(is_known_place, facts.nodes)) else [])
