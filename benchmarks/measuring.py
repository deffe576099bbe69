"""Helpers for all benchmarks: alternate the sides, take medians, print a table, write a JSON file."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from hetero_ssfl.config import Config, validate
from hetero_ssfl.terminal import Console

RESULTS = Path(__file__).parent / "results"


# BYOL with SGD and CKA, as in the paper: the recipe for which the baselines are written.
RECIPE: dict[str, dict[str, Any]] = {
    "ssl": {"kind": "byol"},
    "optim": {"kind": "sgd", "lr": 0.032, "momentum": 0.9, "weight_decay": 5e-4, "warmup": 0.0},
    "rad": {"in_ssl": False},
    "alignment": {"distance": "cka", "mu": 4.0, "ten_crop": False},
}


def config_of(values: Mapping[str, Any]) -> Config:
    """Return a config with these values and, in what they leave open, the recipe of the benchmarks."""
    return validate({**values, **{name: {**own, **values.get(name, {})} for name, own in RECIPE.items()}}, Config)


@dataclass(frozen=True)
class Row:
    """One row of the table: a ratio to a baseline that was measured in the same run."""

    what: str
    against: str
    ratio: float
    target: float
    at_least: bool = True
    """Whether the ratio must be at least the target, or at most."""
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return CPU seconds of this process, for work on one thread. Other jobs on the machine have less influence."""
    started = time.process_time()
    work()
    return time.process_time() - started


def peak_memory() -> float:
    """Return the peak memory of this process in MB, from Linux's VmHWM (ru_maxrss would include the parent's)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def alternate(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure every side `repeats` times, alternating in changing order, because a machine's speed drifts."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in sorted(sides, reverse=repeat % 2 == 1):
            taken[name].append(sides[name]())
    return taken


def medians(taken: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in taken.items()}


def publish(name: str, rows: list[Row], measured: Mapping[str, Any], write: bool = True) -> None:
    """Print the table, and write it with the measurements and the machine to results/NAME.json."""
    table = Table(title=name)
    for heading in ("what", "against", "ratio", "target", ""):
        table.add_column(heading, justify="right" if heading in ("ratio", "target") else "left")
    for row in rows:
        target = f"{'>=' if row.at_least else '<='} {row.target:g} {row.unit}"
        verdict = ("met" if row.met else "not met") + (f": {row.note}" if row.note else "")
        table.add_row(row.what, row.against, f"{row.ratio:.3g} {row.unit}", target, verdict)
    Console(width=160).print(table)
    if write:
        RESULTS.mkdir(exist_ok=True)
        content = {
            "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
            "rows": [{**asdict(row), "met": row.met} for row in rows],
            "measured": measured,
            "machine": machine(),
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
