"""The server's cost of a round with 10 to 1000 clients: time per selected client, and memory for idle clients.

The benchmark measures the server's work on the replies of a round: check each, aggregate, describe the consensus, save
the state and make one broadcast. L = 1000 RAD images, factors of 64 columns, sketches and consensus of 128. Each case
runs in a new process: time is CPU seconds on one thread, the median of three rounds after the first, in which all
clients are new; memory is what these rounds add to the peak (VmHWM) after imports and a small warm-up.

all selected   10 to 1000 clients, all reply: time per client
10 selected    10 to 1000 clients, of which 10 reply in each round: time and memory of a round
weights        20 clients, all reply: a round with clients.weights = "agreement" against equal weights

    python benchmarks/server.py
    python benchmarks/server.py --large     one round of 10 sketches, L = 50,000, 256 columns, float16: for an estimate
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from measuring import Row, config_of, cpu_seconds, peak_memory, publish
from torch import Tensor

from hetero_ssfl.config import Config
from hetero_ssfl.federation.server.saving import save_state
from hetero_ssfl.kernels.mean import sketch
from hetero_ssfl.methods import ServerState, Update
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.seeding import rng_for

WIDTH, SELECTED = 64, 10
COUNTS = (10, 100, 1000)
WEIGHTS = ("uniform", "agreement")


class Case(NamedTuple):
    form: str
    clients: int
    selected: int
    rows: int = 1000
    rank: int = 128
    wire: str = "float32"
    weights: str = "uniform"


def configured(case: Case) -> Config:
    return config_of(
        {
            "rad": {"size": case.rows},
            "clients": {"count": case.clients, "weights": case.weights},
            "alignment": {"form": case.form, "rank": case.rank, "wire": case.wire},
        }
    )


def contribution(case: Case, omega: Tensor, *scope: int) -> dict[str, Tensor]:
    a = torch.randn(case.rows, WIDTH, generator=rng_for(0, *scope))
    a = a / (a.T @ a).norm().sqrt()
    wire = getattr(torch, case.wire)
    if case.form == "factor":
        return {"factor": a.to(wire)}
    return {"sketch": sketch(a, omega).to(wire), "trace": a.square().sum().view(1)}


class Server:
    """A method with its state and its folder."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.method = case, RunFolder(folder), HeteroSSFL(configured(case))
        self.state = ServerState(-1, tuple(f"client-{k:04d}" for k in range(case.clients)))
        for few in torch.arange(case.clients).split(SELECTED):  # a thousand at once would dominate the peak
            self.play(few.tolist())

    def replies(self, clients: Sequence[int]) -> dict[str, Update]:
        names, number = self.state.roster, self.state.round
        return {names[k]: Update(1, contribution(self.case, self.method.averaging.omega(), k, number)) for k in clients}

    def play(self, clients: Sequence[int]) -> float:
        """Return the CPU seconds of a round, from the replies to the next broadcast."""
        updates = self.replies(clients)
        return cpu_seconds(lambda: self.round(updates))

    def round(self, updates: dict[str, Update]) -> None:
        for name, update in updates.items():
            self.method.check(self.state, name, update)
        state = self.method.aggregate(self.state, updates)
        self.method.metrics(state)
        self.method.kernel_snapshot(state)
        self.state = save_state(self.folder, state)
        self.method.broadcast(self.state, self.state.roster[0])


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Return the CPU seconds and MB of a round, measured in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, case, repeats).result()


def _measure(case: Case, repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        Server(case._replace(clients=3, rows=100), Path(scratch, "warm"))  # warm-up of the libraries
        before, server = peak_memory(), Server(case, Path(scratch, "run"))
        taken = [server.play(range(case.selected)) for _ in range(repeats)]
        return {"seconds": median(taken), "megabytes": max(0.1, peak_memory() - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="10 and 30 clients, one repeat, without writing results")
    parser.add_argument("--large", action="store_true", help="one large case, printed but not saved")
    options = parser.parse_args()
    if options.large:
        found = measure(Case("sketch", 20, SELECTED, 50_000, 256, "float16"), 2)
        print(f"{found['seconds'] / SELECTED:.2f} s per client, {found['megabytes']:,.0f} MB")
        return
    counts, repeats = ((10, 30), 1) if options.quick else (COUNTS, options.repeats)
    rows, measured = list[Row](), dict[str, object]()
    for form in ("factor", "sketch"):
        few = {n: measure(Case(form, n, SELECTED), repeats) for n in counts}
        everybody = {n: few[n] if n == SELECTED else measure(Case(form, n, n), repeats) for n in counts}
        measured[form] = {"10 selected": few, "all selected": everybody}
        rows += compared(form, few, everybody)
    weighed = {weights: measure(Case("factor", 20, 20, weights=weights), repeats) for weights in WEIGHTS}
    measured["weights"] = weighed
    rows.append(learned(*(weighed[weights]["seconds"] for weights in WEIGHTS)))
    publish("server", rows, measured, write=not options.quick)


def learned(equal: float, learned: float) -> Row:
    what, against = f"server, 20 clients, learned weights ({learned:.3g} s)", f"equal weights ({equal:.3g} s)"
    return Row(what, against, learned / equal, 1.1, at_least=False)


def compared(form: str, few: dict[int, dict[str, float]], everybody: dict[int, dict[str, float]]) -> list[Row]:
    least, most = min(few), max(few)
    each = {n: 1000 * everybody[n]["seconds"] / n for n in (least, most)}
    seconds, sizes = ({n: few[n][what] for n in (least, most)} for what in ("seconds", "megabytes"))
    cases = [
        (f"all {most} selected: time per client", "ms", each),
        (f"{SELECTED} of {most} selected: time of a round", "s", seconds),
        (f"{SELECTED} of {most} selected: peak memory", "MB", sizes),
    ]
    return [
        Row(
            f"server, {form} form, {what} ({found[most]:.3g} {unit})",
            f"{least} clients ({found[least]:.3g} {unit})",
            found[most] / found[least],
            1.3,
            at_least=False,
        )
        for what, unit, found in cases
    ]


if __name__ == "__main__":
    main()
