"""The arms of preset `cifar10-workstation`: does training together help clients that learn alone, and whom?

    HETERO_SSFL_DATA=... python experiments/arms.py --seeds 3                  # resumable; kept runs are not repeated
    HETERO_SSFL_DATA=... python experiments/arms.py --only together --seeds 3
    python experiments/arms.py --table                                         # print what is there, run nothing
    python experiments/arms.py --table --write docs/results.md --figure docs/assets/arms.svg

Settings were chosen on validation images before (experiments/recipe.py). Each run probes the test images once, at its
end, and leaves its figures in results/arms/ARM-seedN.json.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import trials
from recipe import CKA, NEIGHBOURHOODS
from trials import ONE_CORE, core_minutes, markdown, provenance, train, write_result, write_to_page

from hetero_ssfl.config import load_config
from hetero_ssfl.report import plots
from hetero_ssfl.report.tables import interval95
from hetero_ssfl.runs.folder import RunFolder

RESULTS = trials.RESULTS / "arms"
PRESET = "cifar10-workstation"
TOGETHER, ALONE_RAD = "together", "alone with RAD images"
OWN = f"{ALONE_RAD}, taught by its own coordinates"
LABELS = f"{ALONE_RAD}, taught the true classes of the RAD"
LONGER, CENTRAL = f"{ALONE_RAD}, two epochs more per round", "one model with the images of all"

WIDEST = "clients.models=['resnet8(width=32, stem=2, whiten=3, pool=2)']"
ALL_IMAGES = ["method=local", "clients.count=1", "partition.kind=iid", WIDEST]

ARMS: dict[str, list[str]] = {
    "alone": ["method=local", "rad.in_ssl=false", "local_epochs=42"],  # as many steps as with the RAD images
    ALONE_RAD: ["method=local"],
    LONGER: ["method=local", "local_epochs=20"],  # a ninth more steps: more CPU time than together
    OWN: ["method=own_coordinates:OwnCoordinates"],
    LABELS: ["method=rad_labels:RadLabels"],  # a ceiling: the best that any teacher could say of the RAD
    "together, CKA": [*CKA],
    "together, neighbourhoods": [*NEIGHBOURHOODS],
    TOGETHER: [],
    "averaging weights": ["method=fedssl", WIDEST],
    CENTRAL: [*ALL_IMAGES, "local_epochs=6"],  # about as many steps as one client
    f"{CENTRAL}, as long as five clients": [*ALL_IMAGES, "local_epochs=33"],
}
SMALL_CLIENT = {
    f"{arm}, client 1 has {images} images": [*ARMS[arm], f"partition.images=[{images}, 400, 400, 400, 400]"]
    for images in (25, 50, 100, 200)
    for arm in (ALONE_RAD, TOGETHER)
}
EVERYTHING = {**ARMS, **SMALL_CLIENT}
UNTRAINED = "untrained"  # not a run of its own: every run probes its untrained encoders and the floors too
METRICS = {"linear_all": "linear probe", "knn_all": "kNN", "knn-flat_all": "kNN, flattened"}


def file_of(arm: str, seed: int) -> Path:
    return RESULTS / f"{arm.replace(',', '').replace(' ', '-')}-seed{seed}.json"


def run(arm: str, seed: int, root: Path) -> None:
    config = load_config(PRESET, [f"seed={seed}", *ONE_CORE, "evaluation.every=0", *EVERYTHING[arm]])
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
        "floors": results["floors"],
        "core_minutes": core_minutes(path),
        **provenance(),
    }
    write_result(file_of(arm, seed), result)


Scores = dict[int, list[float]]
"""For each seed, the accuracy of each client."""


def kept(arm: str) -> dict[int, dict[str, Any]]:
    """Return the kept results of an arm by seed."""
    files = RESULTS.glob(file_of(arm, 0).name.replace("seed0", "seed*"))
    return {result["seed"]: result for result in sorted((json.loads(f.read_text()) for f in files), key=seed_of)}


def seed_of(result: dict[str, Any]) -> int:
    return int(result["seed"])


def scores(row: str, metric: str) -> Scores:
    """Return the accuracies of an arm, of the untrained encoders or of a floor; those are in each run of `together`."""
    if row in ARMS or row in SMALL_CLIENT:
        clients = {seed: result["clients"] for seed, result in kept(row).items()}
    elif row == UNTRAINED:
        clients = {seed: result["untrained"] for seed, result in kept(TOGETHER).items()}
    else:
        clients = {seed: result["floors"][row] for seed, result in kept(TOGETHER).items()}
    return {seed: [client[metric] for client in of_seed.values()] for seed, of_seed in clients.items()}


def gains(row: str, metric: str) -> Scores:
    """Return what `together` has more than a row, for the same seed and client (or one model's value for all)."""
    ours, theirs = scores(TOGETHER, metric), scores(row, metric)
    pairs = {seed: (ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}
    return {
        seed: [a - b for a, b in zip(one, other * len(one) if len(other) == 1 else other, strict=True)]
        for seed, (one, other) in pairs.items()
    }


def over_seeds(by_seed: Scores, sign: str = "") -> str:
    """Return the mean over clients and seeds with a 95 % t interval over seeds."""
    means = [mean(values) for values in by_seed.values()]
    interval = interval95(means)
    return f"{mean(means):{sign}.1f}" + (f" ({interval[0]:{sign}.1f} to {interval[1]:{sign}.1f})" if interval else "")


def gain(row: str, metric: str) -> str:
    by_seed = gains(row, metric)
    values = [value for of_seed in by_seed.values() for value in of_seed]
    return f"{over_seeds(by_seed, '+')}, {sum(v > 0 for v in values)} of {len(values)}" if values else "-"


def rows_of_arms() -> list[str]:
    floors: list[str] = [floor for result in list(kept(TOGETHER).values())[:1] for floor in result["floors"]]
    return [*floors, *([UNTRAINED] if floors else []), *(arm for arm in ARMS if kept(arm))]


def table_lines() -> Iterator[str]:
    """One Markdown row per floor and arm; "together minus this" also counts the clients for which it is positive."""
    heads = [text for name in METRICS.values() for text in (name, "together minus this")]
    yield from markdown(["", "seeds", *heads, "core minutes"], map(table_row, rows_of_arms()))
    yield ""
    yield from markdown(["images of client 1", "seeds", *METRICS.values()], small_client_rows())


def table_row(row: str) -> list[str]:
    cells = []
    for metric in METRICS:
        mine = scores(row, metric)
        cells += [over_seeds(mine), "-" if row == TOGETHER else gain(row, metric)]
    minutes = [result["core_minutes"] for result in kept(row).values()] if row in ARMS else [0.0]
    return [row, str(len(mine)), *cells, f"{mean(minutes):.1f}"]


def small_client_rows() -> Iterable[list[str]]:
    """What client 1 gains from the others, by the number of its images; the others have 400 each."""
    for images in (25, 50, 100, 200, 400):
        both = [f"{arm}, client 1 has {images} images" if images < 400 else arm for arm in (ALONE_RAD, TOGETHER)]
        cells, seeds = [], 0
        for metric in METRICS:
            alone, together = (scores(arm, metric) for arm in both)
            first = {seed: [together[seed][0] - alone[seed][0]] for seed in alone.keys() & together.keys()}
            seeds = len(first)
            cells.append(over_seeds(first, "+") if first else "-")
        if seeds:
            yield [str(images), str(seeds), *cells]


def draw(path: Path) -> None:
    """A dot per client and seed, a line at the mean; the strongest floor is a dashed line through all rows."""
    names = [arm for arm in (UNTRAINED, *ARMS) if arm == UNTRAINED or kept(arm)]
    figure, panels = plots.subplots(1, 2, figsize=(9, 0.6 + 0.42 * len(names)))
    for axes, metric in zip(panels, ("linear_all", "knn_all"), strict=True):
        for place, name in enumerate(names):
            values = [value for of_seed in scores(name, metric).values() for value in of_seed]
            colour = plots.BLUE if name == TOGETHER else plots.GREY
            axes.plot(values, [place] * len(values), "o", color=colour, markersize=5, alpha=0.45, markeredgewidth=0)
            axes.plot([mean(values)] * 2, [place - 0.32, place + 0.32], color=colour, linewidth=2.5)
            axes.annotate(f"{mean(values):.1f}", (mean(values), place - 0.36), ha="center", va="bottom", fontsize=8)
        axes.axvline(strongest_floor(metric), color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel=f"test accuracy (%), {METRICS[metric]}; dashed: floor", ylim=(len(names) - 0.5, -0.9))
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)


def strongest_floor(metric: str) -> float:
    floors = next(iter(kept(TOGETHER).values()))["floors"]
    return max(mean(value for of_seed in scores(floor, metric).values() for value in of_seed) for floor in floors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(EVERYTHING), metavar="ARM")
    parser.add_argument("--root", type=Path, default=Path("runs/arms"))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="run seeds up to N - 1")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also replace the table of the arms on this page")
    parser.add_argument("--figure", type=Path, help="also draw the arms to this file")
    arguments = parser.parse_args()
    if not arguments.table:
        for seed in range(arguments.first, arguments.seeds):
            for arm in arguments.only or EVERYTHING:
                if not file_of(arm, seed).exists():
                    run(arm, seed, arguments.root)
    print("\n".join(table_lines()))
    if arguments.write:
        write_to_page(arguments.write, "experiments/arms.py", "\n".join(table_lines()))
    if arguments.figure:
        draw(arguments.figure)


if __name__ == "__main__":
    main()
