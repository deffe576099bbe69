"""One of five clients lies about its kernel: what it costs the honest ones, with equal and with learned weights.

The demo with smaller encoders at 8 x 8 pixels, 4 rounds of 2 epochs. The last client sends one of the lies of
tests/helpers/attacks.py instead of its kernel; the accuracies are means over the four honest clients on the test
images. "Without its seat" is the federation in which the fifth client counts nothing.

nice -n 10 python experiments/attacks.py --seeds 3                           # about 30 seconds per run; resumable
python experiments/attacks.py --table --write docs/privacy.md      # compute nothing
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean

from trials import ONE_CORE, RESULTS, markdown, provenance, write_result, write_to_page

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.report.tables import Result, interval95
from hetero_ssfl.runs.events import KernelsSeen
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.studies.grid import Row, run_rows
from hetero_ssfl.terminal import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the lies are those of the tests

FILE = RESULTS / "attacks.json"
HONEST = [f"client-{k:03d}" for k in range(4)]
METRICS = {"linear_all": "linear probe", "knn_all": "nearest neighbours"}
ATTACKS = ("permuted rows", "rank one", "same lie", "reversed consensus")
EQUAL, LEARNED = "clients.weights=uniform", "clients.weights=agreement"
WITHOUT = "without its seat"
ARMS = {
    WITHOUT: ("nobody, 0", "clients.weights=[1, 1, 1, 1, 1e-9]"),
    "equal weights": ("nobody, 0", EQUAL),
    "learned weights": ("nobody, 0", LEARNED),
    **{f"{attack}, equal weights": (f"{attack}, 1", EQUAL) for attack in ATTACKS},
    **{f"{attack}, learned weights": (f"{attack}, 1", LEARNED) for attack in ATTACKS},
}
OPTIONS = "whiten=3, pool=2"
ENCODERS = [
    "resnet8(width=8",
    "resnet8(width=12",
    "mobilenet(width=8, depth=1",
    "vit(width=24, depth=1, heads=2",
    "resnet8(width=8",
]
SHORT = ["method=helpers.attacks:Attacked", "data.side=8", "rounds=4", "local_epochs=2", "evaluation.every=0"]
SHORT += [f"clients.models={[f'{encoder}, {OPTIONS})' for encoder in ENCODERS]}"]


def configured(arm: str, seed: int) -> Config:
    name, weights = ARMS[arm]
    floors = ["evaluation.floors=false", "evaluation.untrained=false"]
    return load_config("demo", [*SHORT, *ONE_CORE, *floors, f"name={name}", f"seed={seed}", weights])


def outcome(folder: Path) -> dict[str, float]:
    """Return the means over the honest clients, and the last weight of the fifth one if weights are learned."""
    result, events = Result.read(RunFolder(folder)), RunFolder(folder).events()
    found = {metric: mean(float(result.results["clients"][name][metric]) for name in HONEST) for metric in METRICS}
    weights = [event.weights for event in events if isinstance(event, KernelsSeen) and event.weights]
    return {**found, **({"weight": weights[-1]["client-004"]} if weights else {})}


def kept() -> dict[str, list[dict[str, float]]]:
    return {**json.loads(FILE.read_text())["arms"]} if FILE.exists() else {}


def keep(row: Row, seed: int) -> None:
    found = {**kept(), row.name: [*kept().get(row.name, [])[:seed], outcome(row.folder)]}
    write_result(FILE, {"arms": found, **provenance()})


def difference(arm: str, metric: str) -> str:
    """Return the difference to the federation without the fifth seat on equal seeds, with its 95 % interval."""
    arms = kept()
    values = [run[metric] - base[metric] for run, base in zip(arms[arm], arms[WITHOUT], strict=False)]
    interval = interval95(values)
    return f"{mean(values):+.1f}" + (f" ({interval[0]:+.1f} to {interval[1]:+.1f})" if interval else "")


def table_lines() -> Iterator[str]:
    arms = kept()
    head = ["fifth client", *METRICS.values(), *[f"difference, {m}" for m in METRICS.values()], "its weight"]
    rows = []
    for arm in (arm for arm in ARMS if arm in arms):
        means = [f"{mean(run[metric] for run in arms[arm]):.1f}" for metric in METRICS]
        differences = ["" if arm == WITHOUT else difference(arm, metric) for metric in METRICS]
        weights = [run["weight"] for run in arms[arm] if "weight" in run]
        name = arm if arm == WITHOUT or "," in arm else f"honest, {arm}"
        rows.append([name, *means, *differences, f"{mean(weights):.2f}" if weights else ""])
    yield from markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--root", type=Path, default=Path("attacks-run"))
    parser.add_argument("--table", action="store_true", help="compute nothing")
    parser.add_argument("--write", type=Path, help="put the table between the marks on this page")
    arguments = parser.parse_args()
    for seed in range(0 if arguments.table else arguments.seeds):
        rows = [Row(arm, configured(arm, seed), arguments.root / f"seed{seed}" / str(k)) for k, arm in enumerate(ARMS)]
        run_rows(rows, Console(), quiet=True, done=partial(keep, seed=seed))
    lines = "\n".join(table_lines())
    if arguments.write:
        write_to_page(arguments.write, "experiments/attacks.py", lines)
    print(lines)


if __name__ == "__main__":
    main()
