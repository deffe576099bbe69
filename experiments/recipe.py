"""The search behind preset `cifar10-workstation`: which recipe learns most per CPU minute, on validation images.

    HETERO_SSFL_DATA=... python experiments/recipe.py --stage A             # resumable; each variant takes minutes
    python experiments/recipe.py --stage A --table                          # print what is there, run nothing

Stages:
A. which local loss, optimiser and views learn best, for one client with all images;
C. the alignment on top of an early recipe, for clients with two classes each, against its controls;
N. the alignment on top of the chosen recipe: the whole kernel or neighbourhoods, and how strongly;
L. at 32 px: a whitened first layer, features pooled to 2x2, Muon; each client alone, all with the same encoder;
T. on that recipe, with small encoders: alone, coordinates, one model with all images;
R. how many rounds, together and alone with the RAD images for as much CPU time.
The arms of the preset are in experiments/arms.py.

Each variant:
1. trains in a run folder of its own, with probes on validation images before the first and after the last round;
2. stops before the test images are probed, unless --test is given (a run that was stopped goes on from there);
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

SGD = ["optim.warmup=0.5"]
ADAM = ["optim.kind=adamw", "optim.lr=1e-3", "optim.weight_decay=0.01", "optim.warmup=0.5"]
SOFT = ["views.brightness=0.4", "views.contrast=0.4", "views.saturation=0.4", "views.hue=0.1"]

# What all runs of a stage have in common: a preset and changes to it.
DATA = ["data.limit=20000", "data.validation=2000", "rad.size=1000", "evaluation.untrained=false"]
CENTRAL = ["method=local", "clients.count=1", "clients.models=['resnet10(width=16)']", "partition.kind=iid"]
THREE = "clients.models=['resnet8(width=16)', 'resnet10(width=16)', 'vit(width=96, depth=3, heads=3)']"
TWO_CLASSES = [*DATA, THREE, "evaluation.labels_per_class=500", "rounds=6", "local_epochs=2", "optim.batch=128"]
RAD_2000 = "rad.size=2000"
DEBIASED = ["alignment.estimator=debiased", "alignment.rad_batch=256"]
CKA = ["alignment.distance=cka", "alignment.live_layer=encoder", "alignment.estimator=debiased", "alignment.mu=4"]
AT_32_PX = ["data.side=32", "data.limit=20000", "rad.size=2000", "method=local", "rounds=4", "local_epochs=2"]
AT_32_PX += ["optim.batch=128", "optim.warmup=0.2", "evaluation.every=4", "evaluation.untrained=false"]
MUON = ["optim.kind=muon", "optim.lr=5e-3", "optim.momentum=0.95", "optim.weight_decay=0.01"]


WHITENED = ["stem=2, whiten=3, pool=2"] * 3 + ["patch=4, whiten=3, pool=2"]
FAMILIES = ["resnet8(width=20, {})", "resnet14(width=16, {})", "mobilenet(width=16, expand=2, {})"]
FAMILIES += ["vit(width=64, depth=2, heads=2, {})"]
SMALL = ["data.limit=10000", "ssl.temperature=0.15"]
SMALL += [f"clients.models={[family.format(options) for family, options in zip(FAMILIES, WHITENED, strict=True)]}"]
COORDINATES = ["method=hetero-ssfl", "alignment.distance=coordinates", "alignment.live_layer=encoder"]
COORDINATES += ["alignment.ramp_rounds=0"]


def resnet8(options: str) -> str:
    return f"clients.models=['resnet8(width=32, {options})']"


COMMON: dict[str, tuple[str, list[str]]] = {
    "A": ("cifar10-laptop", [*DATA, *CENTRAL, "rounds=4", "local_epochs=2", "optim.batch=128", "evaluation.every=4"]),
    "C": ("cifar10-laptop", [*TWO_CLASSES, *ADAM, *SOFT, "ssl.kind=simclr", "evaluation.every=6"]),
    "N": ("cifar10-workstation", ["evaluation.untrained=false"]),
    "L": ("cifar10-workstation", [*AT_32_PX, *MUON]),
    "T": ("cifar10-workstation", [*AT_32_PX, *MUON, *SMALL]),
    "R": ("cifar10-workstation", ["evaluation.untrained=false"]),
}


def rounds_of(rounds: int, epochs: int) -> list[str]:
    """Exchange kernels more or less often in the same number of epochs, with 2 epochs of warm-up as in the preset."""
    ramp = f"alignment.ramp_rounds={rounds - 1}"
    return [f"rounds={rounds}", f"local_epochs={epochs}", f"optim.warmup={2 / epochs}", ramp]


# A new stage is three entries: a line in the docstring, its preset in COMMON, its variants here.
VARIANTS: dict[str, dict[str, list[str]]] = {
    "A": {
        "A-byol-sgd": [*SGD],
        "A-vicreg-sgd": [*SGD, "ssl.kind=vicreg"],
        "A-simclr-sgd": [*SGD, "ssl.kind=simclr", "optim.lr=0.1"],
        "A-byol-adamw": [*ADAM],
        "A-vicreg-adamw": [*ADAM, "ssl.kind=vicreg"],
        "A-simclr-adamw": [*ADAM, "ssl.kind=simclr"],
        "A-barlow-adamw": [*ADAM, "ssl.kind=barlow-twins"],
        "A-simclr-soft": [*ADAM, "ssl.kind=simclr", *SOFT],
        "A-simclr-t0.2": [*ADAM, "ssl.kind=simclr", "ssl.temperature=0.2", *SOFT],
        "A-simclr-lr3e-3": [*ADAM, "ssl.kind=simclr", "optim.lr=3e-3", *SOFT],
        "A-simclr-t0.2-lr3e-3": [*ADAM, "ssl.kind=simclr", "ssl.temperature=0.2", "optim.lr=3e-3", *SOFT],
        "A-simclr-t0.1-lr3e-3": [*ADAM, "ssl.kind=simclr", "ssl.temperature=0.1", "optim.lr=3e-3", *SOFT],
        "A-vicreg-lr3e-3": [*ADAM, "ssl.kind=vicreg", "optim.lr=3e-3", *SOFT],
        "A-barlow-lr3e-3": [*ADAM, "ssl.kind=barlow-twins", "optim.lr=3e-3", *SOFT],
        "A-byol-lr3e-3": [*ADAM, "optim.lr=3e-3", *SOFT],
        "A-simclr-batch64": [*ADAM, "ssl.kind=simclr", "optim.batch=64", *SOFT],
        "A-simclr-views4": [*ADAM, "ssl.kind=simclr", "views.count=4", "local_epochs=1", *SOFT],  # as many views in all
        "A-vicreg-soft": [*ADAM, "ssl.kind=vicreg", *SOFT],
        "A-vicreg-wide": [*ADAM, "ssl.kind=vicreg", "ssl.projector=[512, 512]", *SOFT],
        "A-vicreg-views4": [*ADAM, "ssl.kind=vicreg", "views.count=4", "local_epochs=1", *SOFT],
    },
    "C": {
        "C-alone": ["method=local"],
        "C-together": [],
        "C-alone-rad": ["method=local", "rad.in_ssl=true"],
        "C-together-rad": ["rad.in_ssl=true"],
        "C-alone-vicreg": ["method=local", "ssl.kind=vicreg"],
        "C-together-mu1": ["alignment.mu=1"],
        "C-together-mu16": ["alignment.mu=16"],
        "C-together-every2": ["alignment.every=2", "alignment.rad_batch=256"],
        "C-together-vicreg": ["ssl.kind=vicreg", "alignment.mu=16"],
        # The paper's RAD is a tenth of the training images; here that is 2,000.
        "C-rad2000-alone": [RAD_2000, "method=local"],
        "C-rad2000-together": [RAD_2000],
        "C-rad2000-power1": [RAD_2000, "alignment.power=1.0"],
        "C-debiased": [RAD_2000, *DEBIASED],
        "C-debiased-clean": [RAD_2000, *DEBIASED, "alignment.augment_rad=false"],
        "C-debiased-clean-rad": [RAD_2000, *DEBIASED, "alignment.augment_rad=false", "rad.in_ssl=true"],
        "C-debiased-rad": [RAD_2000, *DEBIASED, "rad.in_ssl=true"],
        "C-debiased-clean-mu16": [RAD_2000, *DEBIASED, "alignment.augment_rad=false", "alignment.mu=16"],
        "C-rad2000-mu1": [RAD_2000, "alignment.mu=1"],
        "C-rad2000-clean": [RAD_2000, "alignment.augment_rad=false"],
        "C-rad2000-mu16": [RAD_2000, "alignment.mu=16"],
        "C-rad2000-kl": [RAD_2000, "alignment.distance=relational-kl"],
        "C-rad2000-alone-rad": [RAD_2000, "method=local", "rad.in_ssl=true"],
        "C-rad2000-together-rad": [RAD_2000, "rad.in_ssl=true"],
    },
    "N": {
        "N-alone": ["method=local", "rad.in_ssl=false"],
        "N-alone-rad": ["method=local"],
        "N-cka": [*CKA],
        "N-cka-mu16": [*CKA, "alignment.mu=16"],
        "N-cka-constant": [*CKA, "alignment.ramp_rounds=0"],
        "N-neighbours": [],
        "N-neighbours-constant": ["alignment.ramp_rounds=0"],
        "N-neighbours-mu0.75": ["alignment.mu=0.75"],
        "N-neighbours-mu3": ["alignment.mu=3"],
        "N-neighbours-soft": ["alignment.consensus_temperature=0.1"],
        "N-neighbours-memory": ["alignment.memory=372"],  # all 500 RAD images in each comparison
        "N-neighbours-cheap": ["alignment.memory=372", "alignment.every=6"],
        "N-neighbours-encoder": ["alignment.live_layer=encoder"],
        "N-neighbours-original": ["alignment.augment_rad=false"],
        # 2.5 times as long, and the control of equal CPU time
        "N-long": ["rounds=10", "local_epochs=6", "alignment.ramp_rounds=8", "evaluation.every=10"],
        "N-long-alone": ["method=local", "rounds=10", "local_epochs=9", "evaluation.every=10"],
    },
    "L": {
        "L-plain": [*ADAM, "optim.lr=3e-3", resnet8("stem=2")],
        "L-whiten": [*ADAM, "optim.lr=3e-3", resnet8("stem=2, whiten=3")],
        "L-whiten-pool": [*ADAM, "optim.lr=3e-3", resnet8("stem=2, whiten=3, pool=2")],
        "L-muon": [resnet8("stem=2, whiten=3, pool=2")],
        "L-muon-t0.1": ["ssl.temperature=0.1", resnet8("stem=2, whiten=3, pool=2")],
    },
    "T": {
        "T-alone-rad": [],
        "T-coordinates-mu4": [*COORDINATES, "alignment.mu=4"],
        "T-coordinates-mu15": [*COORDINATES, "alignment.mu=15"],
        "T-coordinates-mu40": [*COORDINATES, "alignment.mu=40"],
        "T-alone-rad-longer": ["local_epochs=3"],
        "T-central": [
            *("clients.count=1", "partition.kind=iid", "local_epochs=4"),
            "clients.models=['resnet8(width=20, stem=2, whiten=3, pool=2)']",
        ],
    },
    "R": {  # 24 epochs together take about as much CPU time as 36 alone
        **{f"R-{n}-rounds": [*rounds_of(n, 24 // n), f"evaluation.every={n}"] for n in (2, 3, 4, 6)},
        **{
            f"R-{n}-rounds-alone": ["method=local", *rounds_of(n, 36 // n), f"evaluation.every={n}"]
            for n in (2, 3, 4, 6)
        },
    },
}


def run(stage: str, variant: str, seed: int, root: Path, test: bool) -> None:
    preset, common = COMMON[stage]
    changes = [*common, *VARIANTS[stage][variant]]
    config = load_config(preset, [f"seed={seed}", *ONE_CORE, *changes])
    path = root / f"{variant}-seed{seed}"
    train(config, path, f"{variant}, seed {seed}", test)
    about = {"variant": variant, "preset": preset, "overrides": changes, "seed": seed}
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
    parser.add_argument("--test", action="store_true", help="go on to the test images; for the arms that are reported")
    arguments = parser.parse_args()
    variants = arguments.only or list(VARIANTS[arguments.stage])
    if not arguments.table:
        for seed in range(arguments.seeds):
            for variant in variants:
                run(arguments.stage, variant, seed, arguments.root, arguments.test)
    print_table(variants, arguments.seeds)


if __name__ == "__main__":
    main()
