"""The arms of preset `cifar10-workstation`: does training together help clients that learn alone, and what matters?

    HETERO_SSFL_DATA=... python experiments/arms.py --seeds 3    # resumable; kept runs are not repeated
    HETERO_SSFL_DATA=... python experiments/arms.py --only together --seeds 3
    HETERO_SSFL_DATA=... python experiments/arms.py --sweep "RAD size" --seeds 2
    python experiments/arms.py --table            # print what is there, run nothing
    python experiments/arms.py --table --write docs/results.md --figure docs/assets/arms.svg

All settings were chosen on validation images before (docs/results.md). Each run probes the test images once, at
its end, and leaves its figures in results/arms/ARM-seedN.json.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import trials
from recipe import CENTRAL, CKA, rounds_of
from trials import ONE_CORE, core_minutes, markdown, provenance, train, write_result, write_to_page

from hetero_ssfl.config import load_config
from hetero_ssfl.report import plots
from hetero_ssfl.report.tables import bootstrap_interval, interval95
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.studies.paper.cells import CHOSEN, FEDSIMCLR

RESULTS = trials.RESULTS / "arms"
PRESET = "cifar10-workstation"
LONGER = "3 rounds of 8 epochs"

ARMS: dict[str, list[str]] = {
    "alone": ["method=local", "rad.in_ssl=false"],
    "alone with RAD images": ["method=local"],
    "alone with RAD images, as long as together": ["method=local", "local_epochs=6"],  # about the same CPU time
    "together without RAD images in the local loss": ["rad.in_ssl=false"],
    "together, CKA": [*CKA],
    "together": [],
    # Fewer, longer rounds, chosen on validation images (recipe.py, stage R), and their control of equal CPU time.
    "3 rounds of 12 epochs, alone": ["method=local", *rounds_of(3, 12)],
    LONGER: rounds_of(3, 8),
    "central": [*CENTRAL],  # one client has the images of all, and the RAD
    "central, as long as together": [*CENTRAL, "local_epochs=7"],
}


def rad_of(size: int) -> list[str]:
    """Change the size of the RAD, and leave the clients as many images (most of them the same)."""
    return [f"rad.size={size}", f"data.limit={9000 + size}"]


# Averaging weights needs equal encoders. The optimiser is that of FedSimCLR in the tables, chosen on validation images.
AVERAGING = ["method=fedssl", "clients.models=['resnet14(width=16)']", *CHOSEN[FEDSIMCLR]]
AVERAGED = {
    "averaging, 24 rounds of 1 epoch": (24, 1),
    "averaging, 6 rounds of 4 epochs": (6, 4),
    "averaging, 3 rounds of 8 epochs": (3, 8),
}

# What the paper varies. Each sweep contains the preset itself, the arm `together`.
SWEEPS: dict[str, dict[str, list[str]]] = {
    "RAD size": {
        "RAD of 100": rad_of(100),
        "RAD of 100, alone": ["method=local", *rad_of(100)],
        "together": [],
        "alone with RAD images": ARMS["alone with RAD images"],
        "RAD of 1000": rad_of(1000),
        "RAD of 1000, alone": ["method=local", *rad_of(1000)],
    },
    "local epochs": {
        "24 rounds of 1 epoch": rounds_of(24, 1),
        "12 rounds of 2 epochs": rounds_of(12, 2),
        "together": [],
        LONGER: ARMS[LONGER],
        # The optimiser starts fresh in each round, so that the number of rounds may matter without an exchange too.
        "12 rounds of 2 epochs, alone": ["method=local", *rounds_of(12, 2)],
        "alone with RAD images": ARMS["alone with RAD images"],
        "3 rounds of 8 epochs, alone": ["method=local", *rounds_of(3, 8)],
        "3 rounds of 12 epochs, alone": ARMS["3 rounds of 12 epochs, alone"],
        "2 rounds of 18 epochs, alone": ["method=local", *rounds_of(2, 18)],
        **{arm: [*AVERAGING, *rounds_of(*rounds)] for arm, rounds in AVERAGED.items()},
    },
    "mu": {
        "alone with RAD images": ARMS["alone with RAD images"],
        "mu 0.5": ["alignment.mu=0.5"],
        "together": [],
        "mu 4.5": ["alignment.mu=4.5"],
    },
    "kernel": {
        "together, CKA": [*CKA],
        "together, CKA, RBF": [*CKA, "alignment.kernel=rbf"],
    },
}
CONTROLS = (  # arms that are compared with each other, in addition to the columns of the preset's gains
    ("together", "alone with RAD images"),
    ("RAD of 100", "RAD of 100, alone"),
    ("RAD of 1000", "RAD of 1000, alone"),
    ("12 rounds of 2 epochs", "12 rounds of 2 epochs, alone"),
    (LONGER, "3 rounds of 8 epochs, alone"),
    (LONGER, "3 rounds of 12 epochs, alone"),
    (LONGER, "2 rounds of 18 epochs, alone"),
    ("3 rounds of 8 epochs, alone", "alone with RAD images"),
    ("mu 0.5", "alone with RAD images"),
    ("mu 4.5", "alone with RAD images"),
    ("together, CKA, RBF", "together, CKA"),
)
EVERYTHING = {**ARMS, **{arm: settings for sweep in SWEEPS.values() for arm, settings in sweep.items()}}
CENTRAL_ARMS = [arm for arm in ARMS if arm.startswith("central")]
ONE_MODEL = [*CENTRAL_ARMS, *AVERAGED]  # no clients to be paired with, no own classes
UNTRAINED = "untrained"  # not a run of its own: every run probes its untrained encoders too


def file_of(arm: str, seed: int) -> Path:
    return RESULTS / f"{arm.replace(',', '').replace(' ', '-')}-seed{seed}.json"


def run(arm: str, seed: int, root: Path) -> None:
    config = load_config(PRESET, [f"seed={seed}", *ONE_CORE, *EVERYTHING[arm]])
    path = root / file_of(arm, seed).stem
    train(config, path, f"{arm}, seed {seed}", test=True)
    results = RunFolder(path).read_json("results.json")
    result = {
        "command": f"python experiments/arms.py --only '{arm}' --seeds {seed + 1}",
        "arm": arm,
        "seed": seed,
        "overrides": EVERYTHING[arm],
        "clients": {"global model": results["global"]} if "global" in results else results["clients"],
        "untrained": results["untrained"],
        "core_minutes": core_minutes(path),
        **provenance(),
    }
    write_result(file_of(arm, seed), result)


def kept(arm: str) -> dict[int, dict[str, Any]]:
    """Return the results of an arm by seed. `untrained` are the encoders of the clients before round 1."""
    if arm == UNTRAINED:
        return untrained("together")
    files = RESULTS.glob(file_of(arm, 0).name.replace("seed0", "seed*"))
    found = {result["seed"]: result for result in (json.loads(file.read_text()) for file in files)}
    return dict(sorted(found.items()))


def untrained(arm: str) -> dict[int, dict[str, Any]]:
    return {s: {**result, "clients": result["untrained"], "core_minutes": 0} for s, result in kept(arm).items()}


def metric_by_seed(results: dict[int, dict[str, Any]], metric: str) -> dict[int, list[float]]:
    return {seed: [client[metric] for client in result["clients"].values()] for seed, result in results.items()}


def table_lines(arms: Iterable[str] = (UNTRAINED, *ARMS)) -> Iterator[str]:
    """One Markdown row per arm: means over clients, then mean and 95 % interval over seeds.

    A gain is paired by seed and client; behind it stands for how many clients it is positive.
    """
    metrics = ["linear probe", "together gains", "kNN", "together gains", "own classes"]
    yield from markdown(["arm", "seeds", *metrics, "core minutes"], filter(None, map(table_row, arms)))
    for arm in CENTRAL_ARMS:
        if arm in arms and (results := kept(arm)):
            gain = difference(metric_by_seed(results, "linear_all"), metric_by_seed(untrained(arm), "linear_all"))
            yield f"\n{arm}, against its untrained encoder, linear probe: {gain} seeds"
    for arm, control in CONTROLS:
        if {arm, control} <= set(arms) and (results := kept(arm)) and (others := kept(control)):
            gains = [
                f"{name} {difference(one, other)} clients, over seeds {over_seeds(gain_by_seed(one, other))}"
                for metric, name in (("linear_all", "linear probe"), ("knn_all", "kNN"), ("linear_own", "own classes"))
                for one, other in [(metric_by_seed(results, metric), metric_by_seed(others, metric))]
            ]
            yield f"\n{arm}, against {control}: {'; '.join(gains)}"


def table_row(arm: str) -> list[str]:
    together, results, cells = kept("together"), kept(arm), []
    if not results:
        return []
    for metric in ("linear_all", "knn_all"):
        mine = metric_by_seed(results, metric)
        paired = arm not in ("together", *ONE_MODEL)
        cells += [over_seeds(mine), difference(metric_by_seed(together, metric), mine) if paired else "-"]
    cells.append(over_seeds(metric_by_seed(results, "linear_own")) if arm not in ONE_MODEL else "-")
    minutes = mean(result["core_minutes"] for result in results.values())
    return [arm, str(len(results)), *cells, f"{minutes:.1f}"]


def over_seeds(by_seed: dict[int, list[float]]) -> str:
    means = [mean(values) for values in by_seed.values()]
    interval = interval95(means)
    return f"{mean(means):.1f}" + (f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else "")


def gain_by_seed(first: dict[int, list[float]], second: dict[int, list[float]]) -> dict[int, list[float]]:
    """Return the gains of the clients for each seed that both have."""
    common = sorted(first.keys() & second.keys())
    return {s: [a - b for a, b in zip(first[s], second[s], strict=True)] for s in common}


def difference(first: dict[int, list[float]], second: dict[int, list[float]]) -> str:
    pairs = list(gain_by_seed(first, second).values())
    interval = _bootstrap(tuple(map(tuple, pairs)))
    if interval is None:
        return "-"
    better = sum(value > 0 for values in pairs for value in values)
    text = f"{mean(map(mean, pairs)):+.1f} ({interval[0]:+.1f} to {interval[1]:+.1f})"
    return f"{text}, {better} of {sum(map(len, pairs))}"


@cache
def _bootstrap(pairs: tuple[tuple[float, ...], ...]) -> list[float] | None:
    """A table of a sweep repeats gains of the arms."""
    return bootstrap_interval([list(values) for values in pairs])


def draw(path: Path) -> None:
    """A dot per client and seed; the line is the mean. Small encoders differ by more than arms, so all are shown."""
    arms = {arm: results for arm in [UNTRAINED, *ARMS] if (results := kept(arm))}
    figure, panels = plots.subplots(1, 2, figsize=(9, 0.5 + 0.42 * len(arms)))
    for axes, metric, title in zip(panels, ("linear_all", "knn_all"), ("linear probe", "kNN"), strict=True):
        for place, (arm, results) in enumerate(arms.items()):
            values = [value for seed in metric_by_seed(results, metric).values() for value in seed]
            colour = plots.BLUE if arm in ("together", LONGER) else plots.GREY
            axes.plot(values, [place] * len(values), "o", color=colour, markersize=5, alpha=0.45, markeredgewidth=0)
            axes.plot([mean(values)] * 2, [place - 0.32, place + 0.32], color=colour, linewidth=2.5)
            axes.annotate(f"{mean(values):.1f}", (mean(values), place - 0.36), ha="center", va="bottom", fontsize=8)
        axes.set(xlabel=f"test accuracy (%), {title}", ylim=(len(arms) - 0.5, -0.9))
        labels = [f"together, {arm}" if arm == LONGER else arm for arm in arms]
        axes.set_yticks(range(len(arms)), labels if axes is panels[0] else [""] * len(arms), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=list(SWEEPS), help="run this sweep instead of the arms")
    parser.add_argument("--only", nargs="*", choices=list(EVERYTHING), metavar="ARM")
    parser.add_argument("--root", type=Path, default=Path("runs/arms"))
    parser.add_argument("--seeds", type=int, default=1, help="run seeds 0 to N - 1")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also replace the table of the arms on this page")
    parser.add_argument("--figure", type=Path, help="also draw the arms to this file")
    arguments = parser.parse_args()
    arms = list(SWEEPS[arguments.sweep] if arguments.sweep else ARMS)
    if not arguments.table:
        for seed in range(arguments.seeds):
            for arm in arguments.only or arms:
                if not file_of(arm, seed).exists():
                    run(arm, seed, arguments.root)
    print("\n".join(table_lines(arms if arguments.sweep else [UNTRAINED, *arms])))
    if arguments.write:
        write_to_page(arguments.write, "experiments/arms.py", "\n".join(table_lines()))
    if arguments.figure:
        draw(arguments.figure)


if __name__ == "__main__":
    main()
