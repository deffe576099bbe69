"""From how many clients on does a consensus with noise say anything? By simulation, with the mean kernel of a real run.

The noise of a secure sum is added to the sketch of the run's last mean kernel, and the consensus is computed from it as
the server does. The table shows the CKA of the result with the mean kernel itself: 1 without noise, near 0 if only
noise is left. Training is not simulated.

    python experiments/noise_curve.py runs/demo --rounds 10 --epsilon 2 8
"""

import argparse
from pathlib import Path

import torch

from hetero_ssfl.consensus import SINGLE, combine_sketches, sketch, sketching_matrix
from hetero_ssfl.noise import noise_multiplier
from hetero_ssfl.objectives import factor_cka
from hetero_ssfl.runs import load_tensors
from hetero_ssfl.secure import Rules
from hetero_ssfl.seeding import rng_for

COUNTS = (5, 100, 1000, 3000, 10_000, 30_000, 100_000)


def agreement(factor: torch.Tensor, columns: int, deviation: float, repeats: int = 3) -> float:
    """Return the mean CKA of the noisy consensus with the kernel, for noise of this size in the mean sketch."""
    omega = sketching_matrix(len(factor), columns, 0)
    exact, found = sketch(factor, omega), []
    for repeat in range(repeats):
        noise = torch.randn(exact.shape, dtype=exact.dtype, generator=rng_for(0, "noise", repeat))
        noisy = combine_sketches(exact + deviation * noise, 1.0, omega, SINGLE, deviation).factor
        found.append(float(factor_cka(noisy.double(), factor)))
    return sum(found) / repeats


def per_sum(clients: int) -> float:
    """Return how much more noise a sum has than it needs, if all of its clients survive."""
    return float((clients / Rules().survivors_needed(clients)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--columns", type=int, nargs="+", default=[32, 300])
    options = parser.parse_args()
    factor = load_tensors(options.run / "server.safetensors")[0]["factor"].double()
    print("| epsilon | columns | noise multiplier |" + "".join(f" {count:,} clients |" for count in COUNTS))
    print("|---|---|---|" + "---|" * len(COUNTS))
    for epsilon in options.epsilon:
        z = noise_multiplier(epsilon, 1e-5, options.rounds + 1)
        for columns in options.columns:
            row = [agreement(factor, columns, z * len(factor) * per_sum(count) / count) for count in COUNTS]
            print(f"| {epsilon:g} | {columns} | {z:.2f} |" + "".join(f" {value:.3f} |" for value in row))


if __name__ == "__main__":
    main()
