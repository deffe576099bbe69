"""The checks on the pretend accelerator, in a process that may have such a device."""

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).parents[1] / "helpers" / "checks.py"


def test_a_round_works_on_a_device_of_its_own_and_does_not_wait_for_it() -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", CHECKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
