"""Choose each method's settings for `paper --scale workstation`, on validation images of CIFAR-10, seed 0.

    HETERO_SSFL_DATA=... python experiments/selection.py                # resumable; a trial takes minutes on one core
    HETERO_SSFL_DATA=... python experiments/selection.py --only FedEMA
    python experiments/selection.py --table                             # print what is there, run nothing

Every method gets six trials of half the table's length (3 rounds of 2 epochs):
1. four optimisers;
2. with the best of them, two values of the method's own setting (mu, tau, threshold, decay of the target network), or
   two more learning rates.
The best mean linear probe over the clients' models wins. (The tables show the global model of methods that have one; it
is probed on test images only.) Test images are not looked at. The winners, for all data sets, stand in
src/hetero_ssfl/studies/paper/cells.toml. Our own rows are not chosen here: their recipe comes from
experiments/recipe.py, which took more trials.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import trials
from trials import ONE_CORE, markdown, provenance, train, validation_metrics, write_result

from hetero_ssfl.studies.paper.cells import FEDSIMCLR, HETERO, Cell, cells_of

RESULTS = trials.RESULTS / "selection"
SHORT = ["rounds=3", "evaluation.every=3", "evaluation.untrained=false"]

Trial = tuple[str, list[str]]


def sgd(lr: str) -> Trial:
    return f"sgd {lr}", ["optim.kind=sgd", f"optim.lr={lr}", "optim.weight_decay=5e-4", "optim.warmup=0.5"]


def adamw(lr: str) -> Trial:
    return f"adamw {lr}", ["optim.kind=adamw", f"optim.lr={lr}", "optim.weight_decay=0.01", "optim.warmup=0.5"]


OPTIMISERS = [sgd("0.03"), sgd("0.1"), adamw("0.001"), adamw("0.003")]

OWN_SETTINGS: dict[str, list[str]] = {
    "FedU": ["averaging.threshold=0.2", "averaging.threshold=0.8"],
    "FedEMA": ["averaging.tau=0.5", "averaging.tau=0.9"],
    HETERO: ["alignment.mu=4", "alignment.mu=16"],
    "FedBYOL": ["ssl.ema=0.9", "ssl.ema=0.95"],
    "central BYOL": ["ssl.ema=0.9", "ssl.ema=0.95"],
    "local SSL": ["ssl.ema=0.9", "ssl.ema=0.95"],
}

ROWS = ["FedBYOL", "FedSimSiam", "FedU", "FedEMA", HETERO, "supervised FedAvg", "central BYOL", "local SSL", FEDSIMCLR]


def cell_of(row: str) -> Cell:
    if row == "local SSL":
        return cells_of("table4", f"small clients/{row}")[0]
    return cells_of("table1", f"CIFAR-10/{row}")[0]


def second_trials(row: str, best: Trial) -> list[Trial]:
    """Return the method's own settings with the best optimiser, or that optimiser with two more learning rates."""
    name, settings = best
    own = OWN_SETTINGS.get(row)
    if own:
        return [(f"{name} {setting.partition('.')[2]}", [*settings, setting]) for setting in own]
    kind, lr = name.split()
    make = {"sgd": sgd, "adamw": adamw}[kind]
    return [make(f"{float(lr) * factor:.4g}") for factor in (0.5, 2)]


def file_of(row: str, trial: str) -> Path:
    return RESULTS / f"{row} {trial}.json".replace(" ", "-")


def run_trials(row: str, chosen: list[Trial], root: Path) -> None:
    for name, settings in chosen:
        file = file_of(row, name)
        if not file.exists():
            config = cell_of(row).config("workstation", 0, [*SHORT, *ONE_CORE, *settings], chosen=False)
            train(config, root / file.stem, f"{row}, {name}", test=False)
            about = {"row": row, "trial": name, "overrides": settings}
            write_result(file, {**about, **validation_metrics(root / file.stem), **provenance()})


def kept(row: str) -> list[dict[str, Any]]:
    """Return the finished trials of a method, the best first."""
    finished = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    return sorted((t for t in finished if t["row"] == row), key=lambda t: -t["linear_all"])


def print_table() -> None:
    rows = [
        [row, trial["trial"], *(f"{trial[key]:.1f}" for key in ("linear_all", "knn_all", "core_minutes"))]
        for row in ROWS
        for trial in kept(row)
    ]
    print("\n".join(markdown(["method", "trial", "linear probe", "kNN", "core minutes"], rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="METHOD", default=ROWS)
    parser.add_argument("--root", type=Path, default=Path("runs/selection"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        for row in arguments.only:
            run_trials(row, OPTIMISERS, arguments.root)
            first = next(t for t in kept(row) if t["trial"] in dict(OPTIMISERS))
            run_trials(row, second_trials(row, (first["trial"], first["overrides"])), arguments.root)
    print_table()


if __name__ == "__main__":
    main()
