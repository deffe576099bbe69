"""Create a deployment with real images and config, and run it to the end."""

import shutil
from pathlib import Path

from helpers.federations import ENCODERS, write_federation
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import Rehearsal, free_port
from hetero_ssfl.deploy.watch import RunWatch
from hetero_ssfl.deploy.writing import initialise
from hetero_ssfl.progress import RunView
from hetero_ssfl.runs import RunFolder
from hetero_ssfl.screen import Console


def deployed(root: Path, *overrides: str, encoders: tuple[str, ...] = ENCODERS, images: int = 60) -> Deployment:
    """Create a deployment with `deploy init`, and add real images and settings."""
    federation, paths = write_federation(root / "source", encoders, images)
    it = Deployment(root / "fl", tuple(f"node-{k}" for k in range(len(encoders))), port=free_port())
    initialise(it)
    config = load_config(str(federation), overrides)
    (it.server / "federation.toml").write_text(config.to_toml())
    for name, path in zip(it.nodes, paths, strict=True):
        shutil.copytree(path.parent, it.node(name), dirs_exist_ok=True)
    return it


def to_the_end(rehearsal: Rehearsal) -> RunFolder:
    rehearsal.run(RunWatch(rehearsal.run_dir, RunView(Console(quiet=True), "test")))
    return RunFolder.open(rehearsal.run_dir)
