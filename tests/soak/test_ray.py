"""A process of Ray that dies: the run stops and can be resumed."""

import os
from pathlib import Path

import pytest

from helpers.whole_runs import run
from hetero_ssfl.errors import FaultError
from hetero_ssfl.runs import load_tensors

pytestmark = pytest.mark.soak


@pytest.mark.timeout(600)
def test_a_dead_actor_stops_the_run_and_is_named(tmp_path: Path, dying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # Ray's processes do not inherit sys.path
    models = f"clients.models=['resnet8(width=4)', '{dying}']"
    with pytest.raises(FaultError, match=rf"client-001 \(encoder {dying}\) failed in round 1: .*--resume"):
        run(tmp_path / "run", models, "rounds=1", "engine.kind=simulation", "engine.workers=2")
    assert load_tensors(tmp_path / "run" / "server.safetensors")[1]["round"] == 0
