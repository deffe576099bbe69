"""The consensus without dense kernels, compared with L x L kernels: time and peak memory, L = 5000, d = 256, N = 20.

The work is one round with one alignment step on the whole RAD: the server computes K_mean from the contributions of 20
clients (aggregate), and each client compares the kernel of its live representations with it, forward and backward
(step).

dense    contributions are kernels, centred and of norm 1; the server averages them; a step is CKA of kernels
factor   the server sketches each factor (1024 columns), sums and truncates to 512; a step is `alignment_distance`
sketch   `Sums` of sketches of 512 columns; a step is the same as for a factor

Computing a contribution is not measured. Contributions and consensus are float32. Times are CPU seconds of one thread,
medians of alternating runs; totals count one aggregate and one step per client, or five (one per local epoch, as in
Algorithm 1). Memory is what a new process adds to its peak (VmHWM) after imports and a warm-up, including its input
arrays and buffers of torch and other libraries.

    python benchmarks/consensus.py
"""

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from measuring import Row, alternate, cpu_seconds, medians, peak_memory, publish
from torch import Tensor

from hetero_ssfl.config import AlignmentConfig
from hetero_ssfl.kernels.cka import centre, cka
from hetero_ssfl.kernels.distance import alignment_distance
from hetero_ssfl.kernels.mean import SINGLE, SPARE, Sums, sketch, sketching_matrix
from hetero_ssfl.seeding import rng_for

SIDES = ("dense", "factor", "sketch")


class Size(NamedTuple):
    rows: int = 5000
    width: int = 256
    clients: int = 20
    rank: int = 512


# --- the work ---------------------------------------------------------------------------------------


def contribution(side: str, size: Size, client: int) -> Tensor:
    """Return a synthetic contribution of realistic size; clients have much in common, like real ones."""
    common = torch.randn(size.rows, size.width, generator=rng_for(0, "common")) / torch.arange(1, size.width + 1).sqrt()
    mixing = torch.randn(size.width, size.width, generator=rng_for(0, "mixing", client))
    a = common @ mixing + torch.randn(size.rows, size.width, generator=rng_for(0, "own", client))
    a = a - a.mean(0)
    a = a / (a.T @ a).norm().sqrt()
    if side == "dense":
        return a @ a.T
    return a if side == "factor" else a @ (a.T @ sketching_matrix(size.rows, size.rank, 0).float())


def aggregate(side: str, contributions: list[Tensor], size: Size) -> Tensor:
    weights = [1.0] * len(contributions)
    if side == "dense":
        mean = torch.zeros_like(contributions[0])
        for kernel, weight in zip(contributions, weights, strict=True):
            mean.add_(kernel, alpha=weight / sum(weights))  # in place: the least memory that a dense server needs
        return mean
    sums, omega = Sums(), sketching_matrix(size.rows, size.rank * (SPARE if side == "factor" else 1), 0)
    for sent, weight in zip(contributions, weights, strict=True):
        sums = sums.plus(weight, sketch(sent, omega) if side == "factor" else sent, 1.0)
    return sums.consensus(omega, SINGLE, size.rank).factor


def step(side: str, live: Tensor, consensus: Tensor) -> Tensor:
    """Return the gradient of 1 - CKA with respect to the live representations."""
    live = live.detach().requires_grad_()
    if side == "dense":
        loss = 1 - cka(centre(live @ live.T), consensus)
    else:
        loss = alignment_distance(live, consensus, AlignmentConfig(row_normalize=False))
    loss.backward()
    assert live.grad is not None
    return live.grad


def consensus_of_shape(side: str, size: Size) -> Tensor:
    """Return a random consensus of the right shape."""
    columns = size.rows if side == "dense" else size.rank
    return torch.randn(size.rows, columns, generator=rng_for(0, "consensus"))


# --- memory -----------------------------------------------------------------------------------------


def peak_megabytes(side: str, part: str, size: Size) -> float:
    """Return what a new process adds to its peak memory, including the contributions but not computing them."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, side, part, size).result()


def _peak(side: str, part: str, size: Size) -> float:
    torch.set_num_threads(1)
    small = Size(64, 8, 2, 16)
    step(side, torch.randn(64, 8), aggregate(side, [contribution(side, small, k) for k in range(2)], small))  # warm-up
    before = peak_memory()
    if part == "aggregate":
        columns = {"dense": size.rows, "factor": size.width, "sketch": size.rank}[side]
        aggregate(side, [torch.randn(size.rows, columns, generator=rng_for(k)) for k in range(size.clients)], size)
    else:
        step(side, torch.randn(size.rows, size.width, generator=rng_for(0, "live")), consensus_of_shape(side, size))
    return max(0.1, peak_memory() - before)


# --- time -------------------------------------------------------------------------------------------


def times(size: Size, repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    live = torch.randn(size.rows, size.width, generator=rng_for(0, "live"))
    work: dict[str, Callable[[], float]] = {}
    for side in SIDES:
        sent = [contribution(side, size, k) for k in range(size.clients)]
        mean = aggregate(side, sent, size)
        work[f"{side} aggregate"] = partial(cpu_seconds, partial(aggregate, side, sent, size))
        work[f"{side} step"] = partial(cpu_seconds, partial(step, side, live, mean))
    return medians(alternate(work, repeats))


def largest_difference(size: Size) -> float:
    """Return the difference between the gradients of dense and untruncated factor form, relative to the norm."""
    exact = size._replace(rank=size.width * size.clients)
    live = torch.randn(size.rows, size.width, generator=rng_for(0, "live"))
    wanted, found = (
        step(side, live, aggregate(side, [contribution(side, exact, k) for k in range(size.clients)], exact))
        for side in ("dense", "factor")
    )
    return float((wanted - found).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="run a small case once, without writing results")
    options = parser.parse_args()
    size, repeats = (Size(500, 32, 5, 64), 1) if options.quick else (Size(), options.repeats)
    apart = largest_difference(Size(400, 16, 5, 0))
    assert apart < 1e-3, f"the two sides do not compute the same gradient: {apart:.2g} apart"
    taken = times(size, repeats)
    memory = {f"{side} {part}": peak_megabytes(side, part, size) for side in SIDES for part in ("aggregate", "step")}
    rows = [row for side in SIDES[1:] for row in compared(side, size, taken, memory)]
    publish(
        "consensus",
        rows,
        {"size": size._asdict(), "seconds": taken, "megabytes": memory, "gradients_apart": apart},
        write=not options.quick,
    )


def compared(side: str, size: Size, taken: dict[str, float], memory: dict[str, float]) -> list[Row]:
    against = f"dense, L = {size.rows}, d = {size.width}, N = {size.clients}"
    note = (
        f"aggregate {taken[f'{side} aggregate']:.2f} s against {taken['dense aggregate']:.2f} s, "
        f"one step {taken[f'{side} step']:.3f} s against {taken['dense step']:.3f} s"
    )
    rows = []
    for steps in (1, 5):
        ours, dense = (taken[f"{s} aggregate"] + steps * size.clients * taken[f"{s} step"] for s in (side, "dense"))
        what = f"{side} form, CPU time of one aggregate and {steps} x {size.clients} steps ({ours:.2f} s)"
        rows.append(Row(what, f"{against} ({dense:.2f} s)", dense / ours, 10, note=note))
    smaller = size.rows / (size.width if side == "factor" else size.rank)
    notes = {
        "aggregate": f"the {size.clients} shares, which the server keeps, are {smaller:.1f} times smaller than kernels",
        "step": f"live representations and consensus alone are {size.rows * (size.width + size.rank) * 4e-6:.0f} MB; "
        "their centred copies and the gradient come on top",
    }
    for part, place in (("aggregate", "server"), ("step", "client")):
        ours, dense = memory[f"{side} {part}"], memory[f"dense {part}"]
        what = f"{side} form, peak memory of the {place} ({ours:.0f} MB)"
        rows.append(Row(what, f"{against} ({dense:.0f} MB)", dense / ours, 30, note=notes[part]))
    return rows


if __name__ == "__main__":
    main()
