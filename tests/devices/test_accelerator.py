"""Run the checks on the pretend accelerator in a separate process, which registers that device."""

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).parents[1] / "helpers" / "checks.py"


def test_a_round_works_on_an_accelerator_without_waiting_for_it() -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", CHECKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
