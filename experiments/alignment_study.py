"""The study for docs/results.md: which version of the alignment term helps, over several seeds.

    python experiments/alignment_study.py --seeds 3                 # everything (hours on a laptop), resumable
    python experiments/alignment_study.py --seeds 1 --only alone together
    python experiments/alignment_study.py --table                   # print existing results, run nothing

Settings are chosen by validation accuracy. --test also prints test accuracy, for the reported variants.
"""

import argparse
from pathlib import Path

from trials import markdown

from hetero_ssfl.config import load_config
from hetero_ssfl.runs.events import Evaluated, RoundDone
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.studies.grid import Row, mean_and_deviation, run_rows
from hetero_ssfl.terminal import Console

PAPER = ["layer=predictor", "row_normalize=false", "power=1.0", "augment_rad=false"]

# Each variant changes these defaults of [alignment] (or of other sections, with the full key).
VARIANTS: dict[str, list[str]] = {
    "alone": ["method=local"],
    "alone + RAD images": ["method=local", "rad.in_ssl=true"],
    "together": [],
    "together + RAD images": ["rad.in_ssl=true"],
    "paper's reading, mu 0.5": [*PAPER, "mu=0.5"],
    "paper's reading, mu 4": [*PAPER, "mu=4"],
    "mu 1": ["mu=1"],
    "mu 16": ["mu=16"],
    "power 1": ["power=1.0"],
    "power 0.25": ["power=0.25"],
    "clean RAD batch": ["augment_rad=false"],
    "projector output": ["layer=projector"],
    "debiased": ["estimator=debiased"],
    "leave one out": ["leave_one_out=true"],
    "memory 256": ["memory=256"],
    "relational KL": ["distance=relational-kl"],
    "RBF kernel": ["kernel=rbf"],
    "ramp 3 rounds": ["ramp_rounds=3"],
}


def overrides(variant: str, seed: int) -> list[str]:
    keys = [
        key if "." in key.partition("=")[0] or key.startswith("method") else f"alignment.{key}"
        for key in VARIANTS[variant]
    ]
    return [f"seed={seed}", *keys]


def folder_of(root: Path, variant: str, seed: int) -> Path:
    return root / f"{variant.replace(' ', '-').replace(chr(39), '')}-seed{seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cifar10-laptop")
    parser.add_argument("--root", type=Path, default=Path("runs/alignment"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--test", action="store_true", help="show test accuracy too")
    arguments = parser.parse_args()
    if not arguments.table:
        rows = [
            Row(
                f"{variant}, seed {seed}",
                load_config(arguments.preset, overrides(variant, seed)),
                folder_of(arguments.root, variant, seed),
            )
            for seed in range(arguments.seeds)
            for variant in arguments.only
        ]
        run_rows(rows, Console())
    print_table(arguments.root, arguments.only, arguments.seeds, arguments.test)


def print_table(root: Path, variants: list[str], seeds: int, with_test: bool) -> None:
    """Print one Markdown row per variant: means over clients, then mean ± deviation over seeds."""
    columns = ["linear probe", "kNN", "own classes", "effective rank of the consensus"]
    columns += ["test, linear", "test, own classes"] if with_test else []
    rows = []
    for variant in variants:
        folders = [RunFolder(folder_of(root, variant, seed)) for seed in range(seeds)]
        values = [metrics_of(folder)[: len(columns)] for folder in folders if folder.finished]
        if values:
            cells = ["-" if None in each else mean_and_deviation(each) for each in zip(*values, strict=True)]
            rows.append([variant, str(len(values)), *cells])
    print("\n".join(markdown(["variant", "seeds", *columns], rows)))


def metrics_of(folder: RunFolder) -> list[float | None]:
    """Return the last metrics on validation images, and two on test images. Without a consensus, the rank is None."""
    events, test = folder.events(), folder.read_json("results.json")["mean"]
    scores = [e.mean for e in events if isinstance(e, Evaluated) and e.split == "validation"][-1]
    rank = [e.figures for e in events if isinstance(e, RoundDone)][-1].get("consensus_effective_rank")
    validation = [scores["linear_all"], scores["knn_all"], scores["linear_own"]]
    return [*validation, rank, test["linear_all"], test["linear_own"]]


if __name__ == "__main__":
    main()
