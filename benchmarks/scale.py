"""The cost of idle clients: 10, 100 and 1000 clients on one machine, 10 of them in each round.

Each client has the same number of images, so that a round is the same work for any number of clients. Every client has
a state on disk, as after its first round (which takes 30 ms more, for building the networks). Measured over the rounds
after the first: seconds from one `begin` to the next, bytes sent and received, the peak memory of server, fork server
and workers together (PSS: shared memory counts once), and the time of the server's steps.

    python benchmarks/scale.py
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from measuring import Row, config_of, publish
from PIL import Image

from hetero_ssfl.config import Config
from hetero_ssfl.federation.server import loop
from hetero_ssfl.federation.server.roster import Roster
from hetero_ssfl.federation.start import start
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.runs.events import Event, RoundBegun

SELECTED = 10
RAD = 64
MEMORY_MB = 32  # for clients in each worker


class EnoughError(Exception):
    """Raised to stop a run after the measured rounds."""


def scale_config(source: Path, clients: int, rad: int, images: int) -> Config:
    return config_of(
        {
            "name": "scale",
            "rounds": 1000,
            "local_epochs": 2,
            "data": {"source": str(source), "limit": images * clients + rad, "validation": 0},
            "clients": {"count": clients, "per_round": SELECTED, "models": ["resnet10(width=16)"]},
            "partition": {"kind": "iid"},
            "rad": {"size": rad},
            "optim": {"batch": images},
            "alignment": {"rad_batch": 32},
            "evaluation": {"every": 0, "probes": []},
            "engine": {"threads": 1, "memory_mb": MEMORY_MB},
        }
    )


def write_images(folder: Path, count: int) -> Path:
    """Write noise as one table of PNG files; the program itself reserves a fifth for testing."""
    from datasets import Dataset, Features
    from datasets import Image as ImageColumn

    noise = np.random.default_rng(0).integers(0, 256, (count * 5 // 4 + 5, 16, 16, 3), dtype=np.uint8)
    rows = {"image": [Image.fromarray(picture) for picture in noise]}
    Dataset.from_dict(rows, features=Features(image=ImageColumn())).to_parquet(str(folder / "train.parquet"))
    return folder


# --- measurements -------------------------------------------------------------------------------------


class Memory(threading.Thread):
    """Records the peak of the total memory of this process and its descendants, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = 0.0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            self.most = max(self.most, sum(map(_resident_mb, _family())))


def _family() -> set[int]:
    """Return the ids of this process and all its descendants, from /proc."""
    parents = {}
    for entry in os.listdir("/proc"):
        try:
            parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue
    found, new = set[int](), {os.getpid()}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new}
    return found


def _resident_mb(process: int) -> float:
    """Return the memory of a process with shared memory divided among its users (PSS), because workers are forked."""
    try:
        lines = Path("/proc", str(process), "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def give_states(server: loop.Server) -> None:
    """Give every client without a state another client's state of round 1, as if all had trained before."""
    trained = next(name for name, number in server.roster.trained.items() if number == 1)
    tensors = server.folder.states(trained).load(1)
    for name in (name for name, number in server.roster.trained.items() if not number):
        server.folder.states(name).save(1, tensors)
        server.roster.trained[name] = 1


@contextmanager
def timed(owner: Any, name: str, spent: dict[str, float]) -> Iterator[None]:
    """Add up the seconds spent in one method."""
    whole: Callable[..., Any] = getattr(owner, name)

    def measured(*arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return whole(*arguments)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun

    with patch.object(owner, name, measured):
        yield


def measure(source: Path, clients: int, rad: int, images: int, rounds: int) -> dict[str, Any]:
    begun: list[float] = []
    servers: list[loop.Server] = []
    spent: dict[str, float] = {}

    def listen(event: Event) -> None:
        if isinstance(event, RoundBegun) and event.round >= 2:  # in round 1 all caches are empty
            if not begun:
                spent.clear()
                give_states(servers[0])
            begun.append(time.perf_counter())
            if len(begun) > rounds:
                raise EnoughError

    play = loop.Server.run

    def remember(server: loop.Server) -> None:
        servers.append(server)
        play(server)

    started, memory = time.perf_counter(), Memory()
    memory.start()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run")
        with (
            patch.object(loop.Server, "run", remember),
            timed(loop, "save_state", spent),
            timed(Roster, "welcome", spent),
            timed(HeteroSSFL, "aggregate", spent),
            suppress(EnoughError),
        ):
            start(scale_config(source, clients, rad, images), run, listen)
        memory.over.set()
        memory.join()
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        state = sum(f.stat().st_size for f in run.glob("clients/*/round-*.safetensors")) / 2**20
    each = [later - earlier for earlier, later in itertools.pairwise(begun)]
    travelled = [e["bytes_down"] + e["bytes_up"] for e in events if e["event"] == "client" and e["round"] >= 2]
    server = {name: round(value / rounds, 4) for name, value in sorted(spent.items())}
    middle = statistics.median(each)
    found = {
        "clients": clients,
        "round_seconds": each,
        "rounds_per_hour": 3600 / middle,
        "clients_per_second": SELECTED / middle,
        "without_server": SELECTED / max(1e-3, middle - sum(server.values())),
        "bytes_per_round": SELECTED * statistics.mean(travelled),
        "peak_memory_mb": memory.most,
        "client_states_on_disk_mb": state,
        "server_seconds_per_round": server,
        "until_round_2": begun[0] - started,
    }
    print(json.dumps({k: v for k, v in found.items() if k != "round_seconds"}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of idle clients.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rad", type=int, default=RAD, help="images of the RAD")
    parser.add_argument("--images", type=int, default=64, help="images of a client")
    parser.add_argument("--quick", action="store_true", help="10 and 20 clients, one round, without writing results")
    options = parser.parse_args()
    sizes, rounds = ([10, 20], 1) if options.quick else ([10, 100, 1000], options.rounds)
    with (
        tempfile.TemporaryDirectory() as scratch,
        patch.dict(os.environ, HETERO_SSFL_CACHE=str(Path(scratch, "cache"))),
    ):
        source = write_images(Path(scratch), options.images * sizes[-1] + options.rad)
        # Small before and after large, because a machine's speed drifts.
        found = [
            measure(source, clients, options.rad, options.images, rounds)
            for clients in [*sizes, *([] if options.quick else [10])]
        ]
    few = statistics.median(s for f in found if f["clients"] == sizes[0] for s in f["round_seconds"])
    many = next(f for f in found if f["clients"] == sizes[-1])
    ratio = few / statistics.median(many["round_seconds"])
    growth = many["peak_memory_mb"] - found[0]["peak_memory_mb"]
    budget = MEMORY_MB * (os.cpu_count() or 1)
    rows = [
        Row(
            f"throughput per selected client, {sizes[-1]} clients",
            f"the same with {sizes[0]}",
            ratio,
            0.9,
            note=f"of a round the server took {many['server_seconds_per_round']} s",
        ),
        Row(
            f"memory that {sizes[-1]} clients add to {sizes[0]}",
            f"the budget, engine.memory_mb = {MEMORY_MB} in each worker",
            growth / budget,
            1.0,
            at_least=False,
        ),
    ]
    publish("scale", rows, {"sizes": found}, write=not options.quick)


if __name__ == "__main__":
    main()
