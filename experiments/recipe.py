"""The search for a regime that learns at 32 px, on validation images.

    HETERO_SSFL_DATA=... python experiments/recipe.py --stage L             # resumable; each variant takes minutes
    python experiments/recipe.py --stage L --table                          # print what is there, run nothing

Stages:
L. a whitened first layer, features pooled to 2x2, Muon; each client alone, all with the same encoder;
T. on that recipe, with small encoders: alone, and one model with all images;
W. preset `cifar10-workstation`: what training together needs.
The arms of the preset that came of it are in experiments/arms.py.

Each variant:
1. trains in a run folder of its own, with probes on validation images before the first and after the last round;
2. stops before the test images are probed (a run that was stopped goes on from there);
3. leaves its figures and training time in results/recipe/NAME-seedN.json.
"""

import argparse
import json
from pathlib import Path

import trials
from trials import ONE_CORE, markdown, provenance, train, validation_metrics, write_result

from hetero_ssfl.config import load_config
from hetero_ssfl.studies.grid import mean_and_deviation

RESULTS = trials.RESULTS / "recipe"
PRESETS = {"L": "cifar10-16px", "T": "cifar10-16px", "W": "cifar10-workstation"}

# The other distances of the alignment term, with the settings that were best for them at 16 px; also used by arms.py.
CKA = ["alignment.distance=cka", "alignment.live_layer=encoder", "alignment.estimator=debiased", "alignment.mu=4"]
NEIGHBOURHOODS = ["alignment.distance=relational-kl", "alignment.live_layer=projector", "alignment.temperature=0.2"]
NEIGHBOURHOODS += ["alignment.consensus_temperature=0.06", "alignment.mu=1.5", "alignment.ramp_rounds=5"]

# What all runs of a stage have in common.
ADAM = ["optim.kind=adamw", "optim.lr=3e-3", "optim.weight_decay=0.01", "optim.warmup=0.5"]
AT_32_PX = ["data.side=32", "data.limit=20000", "rad.size=2000", "method=local", "rounds=4", "local_epochs=2"]
AT_32_PX += ["optim.batch=128", "optim.warmup=0.2", "evaluation.every=4", "evaluation.untrained=false"]
MUON = ["optim.kind=muon", "optim.lr=5e-3", "optim.momentum=0.95", "optim.weight_decay=0.01"]
WHITENED = ["stem=2, whiten=3, pool=2"] * 3 + ["patch=4, whiten=3, pool=2"]
FAMILIES = ["resnet8(width=20, {})", "resnet14(width=16, {})", "mobilenet(width=16, expand=2, {})"]
FAMILIES += ["vit(width=64, depth=2, heads=2, {})"]
SMALL = ["data.limit=10000", "ssl.temperature=0.15"]
SMALL += [f"clients.models={[family.format(options) for family, options in zip(FAMILIES, WHITENED, strict=True)]}"]


def resnet8(options: str) -> str:
    return f"clients.models=['resnet8(width=32, {options})']"


COMMON: dict[str, list[str]] = {"L": [*AT_32_PX, *MUON], "T": [*AT_32_PX, *MUON, *SMALL], "W": []}

VARIANTS: dict[str, dict[str, list[str]]] = {
    "L": {
        "L-plain": [*ADAM, resnet8("stem=2")],
        "L-whiten": [*ADAM, resnet8("stem=2, whiten=3")],
        "L-whiten-pool": [*ADAM, resnet8("stem=2, whiten=3, pool=2")],
        "L-muon": [resnet8("stem=2, whiten=3, pool=2")],
        "L-muon-t0.1": ["ssl.temperature=0.1", resnet8("stem=2, whiten=3, pool=2")],
    },
    "T": {
        "T-alone-rad": [],
        "T-alone-rad-longer": ["local_epochs=3"],
        "T-central": [
            *("clients.count=1", "partition.kind=iid", "local_epochs=4"),
            "clients.models=['resnet8(width=20, stem=2, whiten=3, pool=2)']",
        ],
    },
    "W": {
        "W-alone-rad": ["method=local"],
        "W-together": [],
        "W-without-own-images": ["alignment.own_images=0"],
        "W-without-ten-crop": ["alignment.ten_crop=false"],
        "W-own-images-3": ["alignment.own_images=3"],
        "W-mu3": ["alignment.mu=3"],
        "W-temperature-0.05": ["alignment.temperature=0.05"],
        "W-64-coordinates": ["alignment.coordinates=64"],
    },
}


def run(stage: str, variant: str, seed: int, root: Path) -> None:
    changes = [*COMMON[stage], *VARIANTS[stage][variant]]
    config = load_config(PRESETS[stage], [f"seed={seed}", *ONE_CORE, *changes])
    path = root / f"{variant}-seed{seed}"
    train(config, path, f"{variant}, seed {seed}", test=False)
    about = {"variant": variant, "preset": PRESETS[stage], "overrides": changes, "seed": seed}
    result = {**about, **validation_metrics(path), **provenance()}
    write_result(result_file(variant, seed), result)


def result_file(variant: str, seed: int) -> Path:
    return RESULTS / f"{variant}-seed{seed}.json"


def print_table(variants: list[str], seeds: int) -> None:
    """One Markdown row per variant: means over clients, then mean ± deviation over seeds."""
    columns = {
        "linear_all": "linear probe",
        "untrained_linear_all": "untrained",
        "linear_own": "own classes",
        "knn_all": "kNN",
        "batch_rank": "batch rank",
        "core_minutes": "core minutes",
    }
    rows = []
    for variant in variants:
        files = [result_file(variant, seed) for seed in range(seeds)]
        kept = [json.loads(file.read_text()) for file in files if file.exists()]
        if kept:
            metrics = [mean_and_deviation([result[key] for result in kept]) for key in columns]
            rows.append([variant, str(len(kept)), *metrics])
    print("\n".join(markdown(["variant", "seeds", *columns.values()], rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=list(VARIANTS), required=True)
    parser.add_argument("--only", nargs="*", metavar="VARIANT", help="some of the stage's variants, in this order")
    parser.add_argument("--root", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--seeds", type=int, default=1, help="run seeds 0 to N - 1")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    variants = arguments.only or list(VARIANTS[arguments.stage])
    if not arguments.table:
        for seed in range(arguments.seeds):
            for variant in variants:
                run(arguments.stage, variant, seed, arguments.root)
    print_table(variants, arguments.seeds)


if __name__ == "__main__":
    main()
