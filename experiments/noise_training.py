"""From how many clients on does a run with noise still learn? By training, with few clients that stand for many.

Each of the five clients of the demo, with smaller encoders, stands for N/5 clients of its kind. It trains as in any
run, and the mean of the five sketches gets the noise that the mean over N clients would have with secure sums. So
training, alignment and noise are real; what is not is that N/5 clients would send the same sketch. `alone` trains
without alignment, `none` has no noise.

    python experiments/noise_training.py --seeds 0 1 2 --out runs/noise-training
    python experiments/noise_training.py --out runs/noise-training --figure docs/assets/noise.svg

Figures of the end of a run: linear probe on the test images (mean over clients); CKA of the last consensus with the
same mean without noise; mean CKA of two clients on the RAD (debiased).
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from trials import markdown

from hetero_ssfl.config import Config, load_config
from hetero_ssfl.federation.client.memory import ClientCache
from hetero_ssfl.federation.client.scoring import evaluate
from hetero_ssfl.federation.participants import LocalSite
from hetero_ssfl.federation.start import open_run
from hetero_ssfl.kernels.cka import factor_cka, mutual_cka
from hetero_ssfl.kernels.consensus import MeanKernel
from hetero_ssfl.kernels.factor import kernel_factor
from hetero_ssfl.kernels.mean import Sums
from hetero_ssfl.learning.training import TrainingClient, rad_representations
from hetero_ssfl.methods import ServerState
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.report import plots
from hetero_ssfl.runs.files import write_json
from hetero_ssfl.seeding import rng_for
from hetero_ssfl.studies.grid import mean_and_deviation

COUNTS = (5, 20, 100, 300, 1000, 3000, 10_000, 100_000)
SETTINGS = (
    "clients.models=['resnet8(width=8)', 'resnet10(width=6)', 'mobilenet(width=8)', 'resnet8(width=6)', "
    "'vit(width=32, depth=2, heads=2)']",
    "data.side=8",
    "evaluation.probes=['linear']",
    "alignment.form=sketch",
    "privacy.secure=true",
)
METRICS = ("probe", "consensus", "mutual")


def run(config: Config, folder: Path, deviation: float) -> dict[str, float]:
    """Train all clients for all rounds, with this much noise in each mean sketch, and return the figures of the end."""
    site = LocalSite()
    run_folder = open_run(folder, config, site)
    names = [client.name for client in site.clients(run_folder)]
    participants = {name: site.participant(run_folder, k, config) for k, name in enumerate(names)}
    clients = {name: ClientCache().get(participant, 0) for name, participant in participants.items()}
    method, state, agreement = HeteroSSFL(config), ServerState(-1, tuple(names)), 1.0
    while state.round < config.rounds:
        updates = {name: method.local_update(clients[name], method.broadcast(state, name)) for name in names}
        sketches = [update.arrays["sketch"].double() for update in updates.values()]
        exact = Sums().plus(1.0, torch.stack(sketches).mean(0), 1.0)
        rng = rng_for(config.seed, "noise", state.round + 1)
        noise = torch.randn(exact.sketch.shape, dtype=torch.float64, generator=rng)
        noisy = replace(exact, sketch=exact.sketch + deviation * noise)
        without = method.averaging.mix(MeanKernel.from_tensors(state.shared), exact, 0.0).factor.double()
        found = method.averaging.mix(MeanKernel.from_tensors(state.shared), noisy, 0.0, deviation)
        agreement = float(factor_cka(found.factor.double(), without))
        state = replace(state, round=state.round + 1, shared=found.to_tensors())
    scores = [evaluate(participants[name], clients[name].learner, "test")["linear_all"] for name in names]
    return {"probe": mean(scores), "consensus": agreement, "mutual": mutual(list(clients.values()))}


def mutual(clients: Sequence[TrainingClient]) -> float:
    factors = [kernel_factor(rad_representations(client), client.config.alignment) for client in clients]
    found = mutual_cka(factors)
    return float(found[~torch.eye(len(found), dtype=torch.bool)].mean())


def variants(epsilon: float) -> dict[str, list[str]]:
    """Return the settings of each variant; the number of clients is its name."""
    budget = f"privacy.epsilon={epsilon}"
    return {"alone": ["alignment.mu=0"], **{str(count): [budget] for count in COUNTS}, "none": []}


def simulate(seed: int, name: str, settings: Sequence[str]) -> dict[str, float]:
    config = load_config("digits-byol", [*SETTINGS, f"seed={seed}", *settings])
    clients = int(name) if name.isdigit() else 1
    with TemporaryDirectory() as scratch:  # without privacy.epsilon there is no noise
        return run(config, Path(scratch) / "run", HeteroSSFL(config).noise_in_mean(clients, clients))


def print_table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    table = []
    for name, rows in results.items():
        gains = [row["probe"] - base["probe"] for row, base in zip(rows, results["alone"], strict=True)]
        probe, consensus, mutual = ([row[metric] for row in rows] for metric in METRICS)
        cells = [mean_and_deviation(probe), mean_and_deviation(gains, 1, "+"), mean_and_deviation(consensus, 2)]
        cells[1:] = cells[1:] if name != "alone" else ["-", "-"]
        clients = f"{int(name):,}" if name.isdigit() else name
        table.append([clients, *cells, mean_and_deviation(mutual, 2)])
    head = ["clients", "linear probe (%)", "against alone, same seed", "CKA of the consensus", "mutual CKA"]
    print("\n".join(markdown(head, table)))


def draw(results: Mapping[str, Sequence[Mapping[str, float]]], epsilon: float, path: Path) -> None:
    """Draw the probe and both CKAs over the number of clients, with lines for `alone` and `none`."""
    figure, (left, right) = plots.subplots(1, 2, figsize=(9, 3.4))
    xs, many = list(COUNTS), [results[str(count)] for count in COUNTS]
    for axes, key, colour, label in (
        (left, "probe", plots.BLUE, f"epsilon {epsilon:g}"),
        (right, "consensus", plots.ORANGE, "consensus with and without noise"),
        (right, "mutual", plots.BLUE, "two clients"),
    ):
        values = [[row[key] for row in rows] for rows in many]
        axes.plot(xs, [mean(v) for v in values], color=colour, marker="o", markersize=3, label=label)
        axes.fill_between(xs, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0)
    for name, style in (("none", "--"), ("alone", ":")):
        words = {"none": "without noise", "alone": "alone"}[name]
        left.axhline(mean(row["probe"] for row in results[name]), color=plots.GREY, linestyle=style, label=words)
        right.axhline(
            mean(row["mutual"] for row in results[name]),
            color=plots.GREY,
            linestyle=style,
            label=f"two clients, {words}",
        )
    left.set(xscale="log", xlabel="clients (secure sums)", ylabel="linear probe (%)")
    right.set(xscale="log", xlabel="clients (secure sums)", ylabel="CKA", ylim=(0, 1.05))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.48))
        axes.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("runs/noise-training"))
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        for name, settings in variants(options.epsilon).items():
            file = options.out / f"{name}-epsilon{options.epsilon:g}-seed{seed}.json"
            if not file.exists():
                started = time.process_time()
                found = simulate(seed, name, settings)
                write_json(file, {**found, "seconds": time.process_time() - started})
            results.setdefault(name, []).append(json.loads(file.read_text()))
    print_table(results)
    print(f"{sum(row['seconds'] for rows in results.values() for row in rows):.0f} s of one core")
    if options.figure:
        draw(results, options.epsilon, options.figure)


if __name__ == "__main__":
    main()
