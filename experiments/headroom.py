"""What the clients of finished runs know together: probes of all their features side by side, on validation images.

    python experiments/headroom.py RUN [RUN ...]

The mean kernel of all clients is the kernel of their scaled features side by side, so this is the probe of what each
client is asked to learn from. `first 96` keeps the 96 largest directions, which is not wider than the widest
encoder. The scaling alone changes what a probe reaches, so each client is also probed on the scaled features of its own
kernel. The CKA (debiased) is that between a client's kernel and the mean kernel.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor
from trials import write_result

from hetero_ssfl import Run
from hetero_ssfl.config import AlignmentConfig
from hetero_ssfl.federation.participants.split import SplitData
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.kernels.factor import kernel_factor
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.learning.probes import Labeled, probe
from hetero_ssfl.runs.folder import RunFolder

WIDTH = 96


def kernel_features(train: Tensor, held_out: Tensor, config: AlignmentConfig) -> tuple[Tensor, Tensor]:
    """Return features whose inner products are a client's kernel."""
    both = kernel_factor(torch.cat([train, held_out]), config).float()
    return both[: len(train)], both[len(train) :]


def measure(path: Path) -> dict[str, dict[str, float]]:
    run, data = Run.open(path), SplitData(RunFolder(path))
    config, pool, held_out = run.config, data.pool, data.held_out("validation")
    labels, wanted = pool.labels, held_out.labels
    assert labels is not None
    assert wanted is not None

    def accuracy(train: Tensor, test: Tensor) -> dict[str, float]:
        return probe(Labeled(train, labels), Labeled(test, wanted), config.evaluation, config.seed)

    encoders = [run.encoder(k) for k in range(config.clients.count)]
    features = [(extract_features(e, pool.pixels), extract_features(e, held_out.pixels)) for e in encoders]
    single = [accuracy(*pair) for pair in features]
    kernels = [kernel_features(*pair, config.alignment) for pair in features]
    scaled = [accuracy(*pair) for pair in kernels]
    train, test = (torch.cat([pair[side] for pair in kernels], dim=1) for side in (0, 1))
    centre = train.mean(0)
    directions = torch.linalg.svd(train - centre, full_matrices=False).Vh[:WIDTH].T
    agreement = [float(factor_cka(F.normalize(own, dim=1), test, debiased=True)) for _, own in features]
    return {
        "mean of the clients": {
            **{name: mean(found[name] for found in single) for name in single[0]},
            "cka": mean(agreement),
        },
        "mean of the clients, scaled as in the kernel": {
            name: mean(found[name] for found in scaled) for name in scaled[0]
        },
        "all side by side": accuracy(train, test),
        f"first {WIDTH}": accuracy((train - centre) @ directions, (test - centre) @ directions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--keep", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    found = {path.name: measure(path) for path in arguments.runs}
    commits = {path.name: RunFolder(path).read_json("environment.json")["commit"] for path in arguments.runs}
    print("| features | " + " | ".join(f"{run}, linear | kNN | CKA" for run in found) + " |")
    print("|---|" + "---|---|---|" * len(found))
    for features in next(iter(found.values())):
        cells = []
        for run in found.values():
            figures = run[features]
            agreement = f"{figures['cka']:.2f}" if "cka" in figures else "-"
            cells.append(f"{figures['linear']:.1f} | {figures['knn']:.1f} | {agreement}")
        print(f"| {features} | " + " | ".join(cells) + " |")
    if arguments.keep:
        command = f"python experiments/headroom.py {' '.join(sys.argv[1:])}"
        write_result(arguments.keep, {"command": command, "commits": commits, "figures": found})


if __name__ == "__main__":
    main()
