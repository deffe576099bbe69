"""After kill -9 in the middle of a round, a second call with the same arguments gives bit-identical results."""

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_federate import same  # type: ignore[import-not-found]

from hetero_ssfl import RunFolder

SCRIPT = [sys.executable, "-m", "helpers.interrupted"]
TESTS = Path(__file__).parents[1]


def test_a_killed_run_continues_to_bit_identical_results_when_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with subprocess.Popen([*SCRIPT, str(cut)], stdout=subprocess.PIPE, text=True, cwd=TESTS) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split() == ["begin", "2"]:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not RunFolder(cut).finished
    again = subprocess.run([*SCRIPT, str(cut)], capture_output=True, text=True, check=True, timeout=120, cwd=TESTS)
    assert "start 1" in again.stdout  # the finished round is not repeated
    monkeypatch.setattr(sys, "argv", ["interrupted.py", str(whole)])
    runpy.run_module("helpers.interrupted", run_name="__main__")
    assert same(RunFolder(whole), RunFolder(cut))
