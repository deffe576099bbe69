"""What a round costs the server with 10 to 1000 clients, all of them selected: time per client and peak memory.

Measured is what `hetero-ssfl` does with the replies of a round: check each, aggregate, describe the consensus, and make
one broadcast. Messages and the run folder are not part of it. L = 1000 RAD images, factors of 64 columns, sketches and
consensus of 128. Each size runs in a fresh process: time is CPU seconds on one thread, the median of three rounds;
memory is what the rounds add to the peak (VmHWM) after imports and a small warm-up, the clients' shares included.

in memory   the state holds each client's last share as a tensor, as the server does today
on disk     each share waits in a safetensors file of its own and is read when it is used: what the server could do

    python benchmarks/server.py
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from measuring import Row, cpu_seconds, peak_memory, publish
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_ssfl.config import Config, validate
from hetero_ssfl.consensus import sketch, sketching_matrix
from hetero_ssfl.methods import Method, ServerState, Update, method_for
from hetero_ssfl.seeding import rng_for

WIDTH, RANK = 64, 128
COUNTS = (10, 30, 100, 300, 1000)


class Case(NamedTuple):
    form: str
    place: str
    clients: int
    rows: int = 1000


class OnDisk(Mapping[str, Tensor]):
    """A client's share in a file of its own; nothing of it stays in memory."""

    def __init__(self, path: Path, share: Mapping[str, Tensor]) -> None:
        self.path, self.names = path, tuple(share)
        save_file(dict(share), path)

    def __getitem__(self, name: str) -> Tensor:
        return load_file(self.path)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def configured(case: Case) -> Config:
    return validate(
        {
            "rad": {"size": case.rows},
            "clients": {"count": case.clients},
            "alignment": {"form": case.form, "rank": RANK},
        },
        Config,
    )


def share(case: Case, client: int, omega: Tensor) -> dict[str, Tensor]:
    a = torch.randn(case.rows, WIDTH, generator=rng_for(0, client))
    a = a / (a.T @ a).norm().sqrt()
    if case.form == "factor":
        return {"factor": a}
    return {"sketch": sketch(a, omega).float(), "trace": a.square().sum().view(1)}


def play(method: Method, state: ServerState, updates: Mapping[str, Update]) -> None:
    """The server's part of a round, from the replies to the next broadcast."""
    for name, update in updates.items():
        method.check(state, name, update)
    state = method.aggregate(state, updates)
    method.metrics(state)
    method.broadcast(state, state.roster[0])


def measure(case: Case, repeats: int) -> dict[str, float]:
    """CPU seconds and MB of a round, in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, case, repeats).result()


def _measure(case: Case, repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rounds_of(case._replace(clients=3, rows=100), Path(scratch), 1)  # loads what the libraries load once
        before = peak_memory()
        taken = rounds_of(case, Path(scratch), repeats)
        return {"seconds": median(taken), "megabytes": max(0.1, peak_memory() - before)}


def rounds_of(case: Case, folder: Path, repeats: int) -> list[float]:
    config = configured(case)
    omega = sketching_matrix(case.rows, RANK, config.seed)
    updates: dict[str, Update] = {}
    for client in range(case.clients):
        arrays: Mapping[str, Tensor] = share(case, client, omega)
        if case.place == "on disk":
            arrays = OnDisk(folder / f"{client}.safetensors", arrays)
        updates[f"client-{client:04d}"] = Update(1, arrays)
    state, method = ServerState(0, tuple(updates)), method_for(config)
    return [cpu_seconds(lambda: play(method, state, updates)) for _ in range(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="10 and 30 clients, once, nothing written: does it run?")
    options = parser.parse_args()
    counts, repeats = (COUNTS[:2], 1) if options.quick else (COUNTS, options.repeats)
    rows, measured = [], {}
    for form in ("factor", "sketch"):
        for place in ("in memory", "on disk"):
            found = {clients: measure(Case(form, place, clients), repeats) for clients in counts}
            measured[f"{form}, {place}"] = found
            rows += compared(form, place, found)
    publish("server", rows, measured, write=not options.quick)


def compared(form: str, place: str, found: dict[int, dict[str, float]]) -> list[Row]:
    few, many = min(found), max(found)
    each = {c: 1000 * found[c]["seconds"] / c for c in (few, many)}
    sizes = {c: found[c]["megabytes"] for c in found}
    title = f"server, {form} form, shares {place}, {many} clients"
    return [
        Row(
            f"{title}: time per client ({each[many]:.1f} ms)",
            f"{few} clients ({each[few]:.1f} ms)",
            each[many] / each[few],
            1.3,
            at_least=False,
        ),
        Row(
            f"{title}: peak memory ({sizes[many]:.0f} MB)",
            f"{few} clients ({sizes[few]:.0f} MB)",
            sizes[many] / sizes[few],
            1.3,
            at_least=False,
            note="grows with the shares that are kept" if place == "in memory" else "one share at a time",
        ),
    ]


if __name__ == "__main__":
    main()
