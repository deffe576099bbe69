"""Real machines' worth of processes on loopback: SuperLink, SuperNodes, TLS, node keys, and whatever kills them."""

import shutil
from pathlib import Path

import torch
from nodes import ENCODERS, write_federation
from rich.console import Console

from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import Rehearsal, free_port
from hetero_ssfl.deploy.watch import RunWatch
from hetero_ssfl.deploy.writing import initialise
from hetero_ssfl.federation import start
from hetero_ssfl.progress import RunView
from hetero_ssfl.runs import RunFolder, load_tensors


def deployed(root: Path, *overrides: str, encoders: tuple[str, ...] = ENCODERS, images: int = 60) -> Deployment:
    """A deployment as `deploy init` writes it, with real images and settings put in."""
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


def logs(rehearsal: Rehearsal) -> str:
    return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in rehearsal.logs.glob("*.log"))


def test_three_supernodes_with_tls_and_keys_give_the_same_numbers_as_in_process(tmp_path: Path) -> None:
    it = deployed(tmp_path)
    with Rehearsal(it) as rehearsal:
        there = to_the_end(rehearsal)
    federation, paths = write_federation(tmp_path / "here")
    config = load_config(str(federation), [f"rad.source='{tmp_path / 'source' / 'rad'}'"])
    here = start(config, tmp_path / "run", lambda _: None, paths)
    assert there.read_json("results.json") == here.read_json("results.json")
    states = [load_tensors(folder.path / "server.safetensors")[0] for folder in (here, there)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    events = there.events()
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1, 2]
    assert not [e for e in events if "excluded" in e]
