"""How many columns a sketch needs: the sketched consensus of finished runs compared with the exact one.

    python experiments/alignment_study.py --seeds 3 --only together "power 1" "paper's reading, mu 0.5"
    python experiments/sketch_rank.py runs/alignment/together-seed*
    python experiments/sketch_rank.py --time

The results are in docs/results.md. A run must have `alignment.form = "factor"` and a rank that truncates no client,
so that its last factors are exact.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.kernels.factor import effective_rank
from hetero_ssfl.kernels.mean import SPARE, Consensus, Sums, sketch, sketching_matrix, truncate
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.seeding import rng_for
from hetero_ssfl.studies.grid import mean_and_deviation

RANKS = (16, 32, 64, 96, 128, 160, 192, 256, 384, 500)
OMEGAS = 5  # per run


def client_factors(run: Path) -> list[Tensor]:
    _, about = load_tensors(run / "server.safetensors")
    return [load_tensors(run / "shares" / name / file)[0]["factor"].double() for name, file in about["shares"].items()]


def from_sketches(factors: list[Tensor], rank: int, seed: int, wire: torch.dtype) -> Consensus:
    omega, sums = sketching_matrix(len(factors[0]), rank, seed), Sums()
    for a in factors:
        sums = sums.plus(1.0, sketch(a, omega).to(wire), float(a.square().sum()))
    return sums.consensus(omega, torch.finfo(wire).eps, rank)


def print_table(runs: list[Path]) -> None:
    """Print one row per rank; mean ± deviation over all runs and Omegas."""
    clients = [client_factors(run) for run in runs]
    exact = [torch.cat(factors, dim=1) / len(factors) ** 0.5 for factors in clients]
    ranks = [effective_rank(b) for b in exact]
    print(f"{len(runs)} runs x {OMEGAS} Omegas, effective rank of the consensus {mean_and_deviation(ranks, 1)}")
    print(f"columns of the clients' factors: {[a.shape[1] for a in clients[0]]}\n")
    columns = "CKA of the sketch | in float16 | CKA of the best rank r | trace lost | best rank r"
    print(f"| r | {columns} | bytes up, float32 |\n|---|" + "---|" * 6)
    for rank in RANKS:
        best = [truncate(b, rank) for b in exact]
        single, half = (
            [from_sketches(factors, rank, seed, wire) for factors in clients for seed in range(OMEGAS)]
            for wire in (torch.float32, torch.float16)
        )
        wanted = [b for b in exact for _ in range(OMEGAS)]
        cells = [
            mean_and_deviation([cka(c.factor, b) for c, b in zip(single, wanted, strict=True)], 4),
            mean_and_deviation([cka(c.factor, b) for c, b in zip(half, wanted, strict=True)], 4),
            f"{mean(cka(c.factor, b) for c, b in zip(best, exact, strict=True)):.4f}",
            mean_and_deviation([c.lost for c in single], 3),
            f"{mean(c.lost for c in best):.3f}",
            f"{len(exact[0]) * rank * 4:,}",
        ]
        print(f"| {rank} | " + " | ".join(cells) + " |")


def print_times(rows: int = 5000, width: int = 128, rank: int = 256) -> None:
    """Print the server's time for one consensus in both forms."""
    print(f"L = {rows}, factors of {width} columns, r = {rank}, one thread\n")
    print("| clients | factor form, s | sketch form, s | columns concatenated |\n|---|---|---|---|")
    for clients in (5, 20, 60):
        factors = [torch.randn(rows, width, generator=rng_for(k)) for k in range(clients)]
        sketches = [torch.randn(rows, rank, generator=rng_for(k)) for k in range(clients)]  # the values do not matter
        by_factor, by_sketch = server_seconds(factors, sketches)
        print(f"| {clients} | {by_factor:.2f} | {by_sketch:.2f} | {clients * width} |")


def server_seconds(factors: list[Tensor], sketches: list[Tensor]) -> tuple[float, float]:
    rows, rank = sketches[0].shape

    def consensus(sketched: Iterable[Tensor], columns: int) -> Consensus:
        sums = Sums()
        for y in sketched:
            sums = sums.plus(1.0, y, 1.0)
        return sums.consensus(sketching_matrix(rows, columns, 0), 1e-7, rank)

    wide = sketching_matrix(rows, SPARE * rank, 0)  # the server sketches factors itself
    by_factor = seconds(lambda: consensus((sketch(a, wide) for a in factors), SPARE * rank))
    return by_factor, seconds(lambda: consensus(sketches, rank))


def seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def cka(a: Tensor, b: Tensor) -> float:
    return float(factor_cka(a.double(), b.double()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--time", action="store_true", help="the server's time, on random factors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.runs:
        print_table(arguments.runs)
    if arguments.time:
        print_times()
