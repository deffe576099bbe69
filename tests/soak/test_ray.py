"""Flower's Simulation Engine: another project's apps, and a process of Ray that dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.whole_runs import run
from hetero_ssfl.errors import FaultError
from hetero_ssfl.runs.files import load_tensors

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_project.py"
pytestmark = pytest.mark.soak


@pytest.mark.timeout(600)
def test_the_example_aligns_two_different_networks_on_flowers_engine() -> None:
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.rsplit(":", 1)[1]) > 0.8, "0.5 with mu = 0"


@pytest.mark.timeout(600)
def test_a_dead_actor_stops_the_run_and_is_named(tmp_path: Path, dying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # Ray's processes do not inherit sys.path
    models = f"clients.models=['resnet8(width=4)', '{dying}']"
    with pytest.raises(FaultError, match=rf"client-001 \(encoder {dying}\) failed in round 1: .*--resume"):
        run(tmp_path / "run", models, "rounds=1", "engine.kind=simulation", "engine.workers=2")
    assert load_tensors(tmp_path / "run" / "server.safetensors")[1]["round"] == 0
