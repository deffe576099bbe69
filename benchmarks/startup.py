"""Startup time, compared with the minimum: importing torch in a new process.

A. help    `hetero-ssfl --help`, from start to end of the process;
B. run     `hetero-ssfl run smoke`, from the start of the process until round 1 is sent to the workers, when the first
           training step begins: it includes loading data, starting workers, the opening and the first validation;
C. torch   `python -c "import torch"`;
D. step    torch and one step of an optimiser, which imports torch's compiler: the minimum for any training.

    python benchmarks/startup.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import Row, alternate, medians, publish, seconds

PROGRAM = str(Path(sys.executable).with_name("hetero-ssfl"))
PATIENCE = 120.0
STEP = "import torch; p = torch.zeros(1, requires_grad=True); p.sum().backward(); torch.optim.SGD([p], 0.1).step()"


def finish(command: list[str]) -> float:
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def until_training() -> float:
    """Return the seconds until status.json reports training in round 1, then stop the run."""
    with tempfile.TemporaryDirectory() as scratch:
        status = Path(scratch, "run", "status.json")
        started = time.perf_counter()
        command = [PROGRAM, "run", "smoke", "--run-dir", str(status.parent)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not trains(status):
                if child.poll() is not None or time.perf_counter() - started > PATIENCE:
                    raise RuntimeError(f"`hetero-ssfl run smoke` did not train; it ended with {child.poll()}")
                time.sleep(0.005)
            return time.perf_counter() - started
        finally:
            child.terminate()
            child.wait()


def trains(status: Path) -> bool:
    try:
        found = json.loads(status.read_text())
    except FileNotFoundError:
        return False
    return bool(found["phase"] == "training" and found["round"] >= 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Startup time, compared with `import torch`.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one repeat, without writing results")
    options = parser.parse_args()
    sides = {
        "torch": lambda: finish([sys.executable, "-c", "import torch"]),
        "step": lambda: finish([sys.executable, "-c", STEP]),
        "help": lambda: finish([PROGRAM, "--help"]),
        "run": until_training,
    }
    alternate(sides, 1)  # fills the page cache
    taken = alternate(sides, 1 if options.quick else options.repeats)
    middle = medians(taken)
    rows = [
        Row("hetero-ssfl --help", "python -c 'import torch'", middle["help"] / middle["torch"], 1.3, at_least=False),
        Row(
            "hetero-ssfl run smoke until its first training step",
            "python -c 'import torch'",
            middle["run"] / middle["torch"],
            2.0,
            at_least=False,
            note=f"torch and one bare optimiser step alone take {middle['step'] / middle['torch']:.2f} x",
        ),
    ]
    publish("startup", rows, {"seconds": taken}, write=not options.quick)


if __name__ == "__main__":
    main()
