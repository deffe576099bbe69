"""A federation of nodes in one thread, run by the real server loop."""

from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

from hetero_ssfl.config import load_config
from hetero_ssfl.federation.participants import NodeSite
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.federation.server.status_file import reporting
from hetero_ssfl.federation.start import open_run
from hetero_ssfl.runs.events import Event
from hetero_ssfl.runs.folder import RunFolder

from .federations import ENCODERS, write_federation
from .grids import LocalGrid
from .saved import lines, server_tensors


class Rig:
    """A federation on a LocalGrid, run by the real server loop."""

    def __init__(self, root: Path, *overrides: str, encoders: tuple[str, ...] = ENCODERS) -> None:
        self.root = root
        self.federation, self.paths = write_federation(root, encoders)
        self.config = load_config(str(self.federation), [f"clients.count={len(encoders)}", *overrides])
        self.folder = open_run(root / "run", self.config, NodeSite())
        self.grid = LocalGrid({100 + k: path for k, path in enumerate(self.paths)})
        self.events: list[dict[str, Any]] = []
        self.at: dict[tuple[str, int], Any] = {}
        """Actions to run at an event: (event, round) -> a function without arguments."""

    def listen(self, event: Event) -> None:
        told = event.to_json()
        self.events.append(told)
        action = self.at.pop((event.kind, told.get("round", -1)), None)
        if action:
            action()

    def run(self) -> RunFolder:
        Server(self.grid, self.folder, self.config, reporting(self.folder, self.listen)).run()
        return self.folder

    def excluded(self) -> list[tuple[int, str]]:
        return [(e["round"], e["client"]) for e in lines(self.folder) if "excluded" in e]

    def sent(self, kind: str) -> list[Message]:
        return [m for m in self.grid.sent if m.metadata.message_type.startswith(kind)]


def tensors(folder: RunFolder) -> dict[str, torch.Tensor]:
    return server_tensors(folder.path)
