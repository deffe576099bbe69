"""The overhead of a round besides training: our worker processes compared with Flower's Simulation Engine (Ray).

The same ServerApp loop and ClientApp run 100 clients, 10 in each round, on as many workers or actors as there are
cores. Training is one step on a few images; networks have a realistic size, so that moving and saving a client's state
counts. A round lasts from one `begin` to the next and includes saving; the first rounds, in which processes start and
caches fill, are not measured.

overhead = round - training, where training = seconds of the local work of ten clients in a warm process / workers.

    python benchmarks/engines.py
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from measuring import Row, alternate, config_of, publish, seconds

from hetero_ssfl.config import Config
from hetero_ssfl.federation.client.memory import ClientCache
from hetero_ssfl.federation.participants import open_site
from hetero_ssfl.federation.start import start
from hetero_ssfl.methods import Broadcast, method_for
from hetero_ssfl.runs.events import Event, RoundBegun
from hetero_ssfl.runs.folder import RunFolder, client_name
from hetero_ssfl.use.encoders import participants

SELECTED = 10
WARM_UP = 2  # rounds

Kind = Literal["in-process", "simulation"]


class EnoughError(Exception):
    """Raised to stop a run after the measured rounds."""


def engine_config(kind: Kind, clients: int) -> Config:
    return config_of(
        {
            "name": "engines",
            "rounds": 1000,
            "local_epochs": 1,
            "data": {"source": "digits", "side": 16, "channels": 3, "limit": 12 * clients + 64, "validation": 0},
            "clients": {"count": clients, "per_round": SELECTED, "models": ["resnet10(width=16)"]},
            "partition": {"kind": "iid"},
            "rad": {"size": 64},
            "optim": {"batch": 8},
            "alignment": {"rad_batch": 8},
            "evaluation": {"every": 0, "probes": []},
            "engine": {"kind": kind, "threads": 1, "join_timeout": 600.0},  # Ray may start slowly
        }
    )


def rounds_of(kind: Kind, clients: int, rounds: int) -> list[float]:
    """Return the seconds of each round after the warm-up."""
    begun: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, RoundBegun) and event.round > WARM_UP:
            begun.append(time.perf_counter())
            if len(begun) > rounds:
                raise EnoughError

    with tempfile.TemporaryDirectory() as scratch:
        try:
            start(engine_config(kind, clients), Path(scratch, "run"), listen)
        except EnoughError:
            return [later - earlier for earlier, later in itertools.pairwise(begun)]
    raise RuntimeError("the run ended before its rounds were measured")


def training_seconds(clients: int) -> float:
    """Return the seconds of a round's local work on one thread, without an engine."""

    def listen(event: Event) -> None:
        if isinstance(event, RoundBegun) and event.round == 1:
            raise EnoughError

    config = engine_config("in-process", clients)
    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.suppress(EnoughError):
            start(config, Path(scratch, "run"), listen)
        torch.set_num_threads(1)
        folder = RunFolder(Path(scratch, "run"))
        cache, method = ClientCache(), method_for(config)
        down = Broadcast(1, {"factor": torch.randn(config.rad.size, config.rad.size)})
        everyone = [
            cache.get(p, limit=0) for p in itertools.islice(participants(folder, open_site(folder), config), SELECTED)
        ]
        assert everyone[0].name == client_name(0)
        method.local_update(everyone[0], down)  # warm-up
        return statistics.median(
            seconds(lambda: [method.local_update(client, down) for client in everyone]) for _ in range(5)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of a round: worker processes against Flower's simulation.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="run 12 clients for one round, without writing results")
    options = parser.parse_args()
    clients, rounds, repeats = (12, 1, 1) if options.quick else (100, options.rounds, options.repeats)
    training = training_seconds(clients) / (os.cpu_count() or 1)
    taken: dict[str, list[float]] = {"in-process": [], "simulation": []}

    def measure(kind: Kind) -> float:
        found = rounds_of(kind, clients, rounds)
        taken[kind] += found
        print(f"  {kind:10}  {statistics.median(found):6.2f} s a round", flush=True)
        return statistics.median(found)

    alternate({"in-process": lambda: measure("in-process"), "simulation": lambda: measure("simulation")}, repeats)
    ours, flowers = (statistics.median(taken[kind]) for kind in ("in-process", "simulation"))
    floor = 0.001  # seconds: the overhead may be zero
    ratio = max(flowers - training, floor) / max(ours - training, floor)
    note = f"rounds of {ours:.2f} and {flowers:.2f} s, of which {training:.2f} s are training"
    rows = [
        Row(f"overhead of a round, {clients} clients, 10 selected", "Flower's Simulation Engine", ratio, 3, note=note)
    ]
    publish("engines", rows, {"round_seconds": taken, "training_seconds": training}, write=not options.quick)


if __name__ == "__main__":
    main()
