"""The demo with several seeds: README.md and results.md.

python experiments/demo.py --seeds 3    # three minutes per seed; resumable
python experiments/demo.py --table      # print what is kept, compute nothing
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from trials import RESULTS, markdown, provenance, write_result

from hetero_ssfl.config import load_config
from hetero_ssfl.report.tables import Result, interval95
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.studies.demo import METRICS, run_demo, summary_rows
from hetero_ssfl.studies.grid import Row, run_rows
from hetero_ssfl.terminal import Console

FILE = RESULTS / "demo.json"
OWN = "alone with RAD images, taught by its own coordinates"  # the control that `make demo` has no time for


def scores(features: str, metric: str) -> list[float]:
    """Return the mean over clients of each seed."""
    rows = [row for seed in json.loads(FILE.read_text())["seeds"] for row in seed]
    return [row[metric] for row in rows if row["features"] == features]


def table_lines() -> Iterator[str]:
    """One Markdown row per kind of features: means over clients and seeds, and the difference of together."""
    first, *_ = json.loads(FILE.read_text())["seeds"]
    yield from markdown(
        ["features", *METRICS.values(), *[f"together minus this, {m}" for m in METRICS.values()]], map(cells, first)
    )


def cells(row: dict[str, str]) -> list[str]:
    name = row["features"]
    means = [f"{mean(scores(name, metric)):.1f}" for metric in METRICS]
    return [name, *means, *["" if name == "together" else difference(name, metric) for metric in METRICS]]


def difference(name: str, metric: str) -> str:
    """Return the gain of together and its 95 % t interval over seeds."""
    values = [ours - other for ours, other in zip(scores("together", metric), scores(name, metric), strict=True)]
    interval = interval95(values)
    return f"{mean(values):+.1f}" + (f" ({interval[0]:+.1f} to {interval[1]:+.1f})" if interval else "")


def run(seed: int, root: Path) -> list[dict[str, Any]]:
    """Run the demo and its second control; return one row per kind of features."""
    overrides, folder, console = [f"seed={seed}"], root / f"seed{seed}", Console()
    results = run_demo(folder, console, overrides)
    config = load_config("demo", [*overrides, "method=own_coordinates:OwnCoordinates"])
    run_rows([Row(OWN, config, folder / "own")], console)
    *others, together = summary_rows(results)
    own = summary_rows({"together": Result.read(RunFolder(folder / "own"))})[-1]
    return [*others, {**own, "features": OWN}, together]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--root", type=Path, default=Path("demo-run"))
    parser.add_argument("--table", action="store_true", help="compute nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        seeds = [run(seed, arguments.root) for seed in range(arguments.seeds)]
        write_result(FILE, {"seeds": seeds, **provenance()})
    print("\n".join(table_lines()))


if __name__ == "__main__":
    main()
