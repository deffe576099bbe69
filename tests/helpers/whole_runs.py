"""Small runs on real worker processes, and comparison of all their results."""

from pathlib import Path
from typing import Any

import torch

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.federation.start import start
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.runs.folder import RunFolder

from .saved import lines, server_tensors

TINY = [
    "data.limit=260",
    "data.validation=60",
    "rad.size=32",
    "alignment.rad_batch=16",
    "optim.batch=16",
    "rounds=3",
    "evaluation.epochs=5",
    "evaluation.probes=['linear']",
]


def tiny(*overrides: str) -> Config:
    return load_config("smoke", [*TINY, *overrides])


def run(path: Path, *overrides: str) -> RunFolder:
    return start(tiny(*overrides), path, lambda _: None)


def everything(folder: RunFolder) -> dict[str, Any]:
    """Return all results of a run: events, results.json, the server's state and every client's weights.

    Times and the bytes sent down, which depend on the text of the config, are left out.
    """
    events = [{k: v for k, v in e.items() if k not in ("seconds", "bytes_down")} for e in lines(folder)]
    tensors = server_tensors(folder.path)
    for name in load_tensors(folder.path / "server.safetensors")[1]["roster"]:
        states = folder.states(name)
        tensors |= {f"{name}/{k}": v for k, v in states.load(states.newest(10**6)).items()}
    return {"events": events, "results": folder.read_json("results.json"), "tensors": tensors}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["results"] == b["results"]
    assert a["events"] == b["events"]
    assert a["tensors"].keys() == b["tensors"].keys()
    for key, value in a["tensors"].items():
        assert torch.equal(value, b["tensors"][key]), key
