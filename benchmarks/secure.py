"""Secure sums against plain sketches: bytes of a round, time and memory of the server, for 5, 20 and 100 clients.

The real server loop plays rounds with clients in the same process. Clients answer with the real protocol, but send
random kernels instead of training. L = 1000 RAD images, sketches and consensus of 128 columns in float32. Each case
runs in a new process with one thread. Time is CPU seconds of a round without the time of the clients: the median of
three rounds after the opening. Bytes are those of all messages of a client in a round, in both directions. Memory is
what the rounds add to the peak (VmHWM) after a warm-up with three clients, against the size of the replies.

    python benchmarks/secure.py
"""

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch
from flwr.app import Context, Message, RecordDict
from measuring import Row, config_of, peak_memory, publish
from torch import Tensor

from hetero_ssfl.config import Config
from hetero_ssfl.data import Images
from hetero_ssfl.federation.client.sums import Summing
from hetero_ssfl.federation.engines.workers import RUN_ID, SERVER_NODE, LocalGrid, set_identity
from hetero_ssfl.federation.participants.participant import Participant
from hetero_ssfl.federation.participants.site import Setup
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.federation.wire import Scalar, fields_of, header_of, pack, pack_vector, session_of
from hetero_ssfl.kernels.mean import sketch
from hetero_ssfl.methods import ServerState, Update
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.runs.events import ClientTrained
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.runs.states import StateFolder
from hetero_ssfl.seeding import rng_for

ROWS, WIDTH, COLUMNS = 1000, 64, 128


class Case(NamedTuple):
    secure: bool
    clients: int
    rows: int = ROWS


def configured(case: Case) -> Config:
    values = {
        "rad": {"size": case.rows},
        "clients": {"count": case.clients},
        "alignment": {"form": "sketch", "rank": COLUMNS},
        "privacy": {"secure": case.secure},
    }
    return config_of(values)


class Clients(LocalGrid):
    """Answers each message when its reply is pulled, so that no reply waits in memory. Counts the clients' own time."""

    def __init__(self, case: Case, config: Config, scratch: Path, rad: Tensor) -> None:
        super().__init__([{} for _ in range(case.clients)])
        self.method, self.config, self.rad = HeteroSSFL(config), config, rad
        self.folders = {number + 2: scratch / f"client-{number:04d}" for number in range(case.clients)}
        self.states = {node: RecordDict() for node in self.folders}
        self.seconds = 0.0

    def _receive(self, timeout: float) -> None:
        message = self._pending.pop(0)
        started, node = time.process_time(), message.metadata.dst_node_id
        set_identity(node)
        self._replies[message.metadata.message_id] = Message(self.answer(message, node), reply_to=message)
        set_identity(SERVER_NODE)
        self.seconds += time.process_time() - started

    def answer(self, message: Message, node: int) -> RecordDict:
        fields = fields_of(message.content)
        header, kind = header_of(fields), message.metadata.message_type
        if kind == "query":
            facts: dict[str, Scalar] = {"name": self.folders[node].name, "has_rad": True}
            return pack(fields=facts, header=header)
        if not self.config.privacy.secure:
            update = self.update(node, header.round)
            return pack(update.arrays, {"examples": update.examples}, update.metrics, header)
        participant = self.participant(node)
        context = Context(RUN_ID, node, {}, self.states[node], {})
        summing, reply = Summing(participant, session_of(header, fields), context), pack(header=header)
        if kind == "train":
            vector = summing.masked(message.content, self.method, self.update(node, header.round))
            return pack_vector(fields_of(reply), vector)
        if kind == "query.keys":
            return summing.keys(reply)
        phases = {"query.shares": summing.shares, "query.confirm": summing.confirm, "query.unmask": summing.unmask}
        return phases[kind](message.content, reply)

    def update(self, node: int, number: int) -> Update:
        a = torch.randn(len(self.rad), WIDTH, generator=rng_for(0, node, number))
        a = a / (a.T @ a).norm().sqrt()
        arrays = {"sketch": sketch(a, self.method.averaging.omega()).float(), "trace": a.square().sum().view(1)}
        return Update(100, arrays, {"loss_ssl": 1.0, "loss_alignment": 1.0, "spread": 0.5, "effective_rank": 9.0})

    def participant(self, node: int) -> Participant:
        folder = self.folders[node]
        none = Images(self.rad[:0], None, ())
        return Participant(
            name=folder.name,
            config=self.config,
            model=self.config.model_of(0),
            seed_scope=(),
            rad=self.rad,
            own=lambda: none,
            states=StateFolder(folder),
            exports=folder,
            labeled=lambda: none,
            held_out=lambda _: none,
        )


class Bench:
    """A server, its clients, and the rounds that they play."""

    def __init__(self, case: Case, scratch: Path) -> None:
        rad = torch.zeros(case.rows, 1, 2, 2, dtype=torch.uint8)
        config = configured(case)
        folder = RunFolder.create(scratch / "run", config, lambda made: Setup(rad, {}).write(made, "nodes"))
        self.folder, self.clients = folder, Clients(case, config, scratch, rad)
        set_identity(SERVER_NODE)
        self.server = Server(self.clients, folder, config, lambda _: None)
        self.server.roster.gather(None)
        self.names = tuple(sorted(self.server.roster.ids))
        self.state = ServerState(-1, self.names)
        self.play()

    def play(self) -> dict[str, float]:
        """Return the CPU seconds of the server and of a client, and the bytes of a client, of one round."""
        started, self.clients.seconds = time.process_time(), 0.0
        self.state = self.server.play(self.state, self.names)
        seconds = time.process_time() - started - self.clients.seconds
        sizes = [
            event.bytes_down + (event.bytes_up or 0)
            for event in self.folder.events()
            if isinstance(event, ClientTrained) and event.round == self.state.round and event.excluded is None
        ]
        assert len(sizes) == len(self.names), "a client was excluded"
        each = self.clients.seconds / len(self.names)
        return {"server seconds": seconds, "client seconds": each, "bytes": mean(sizes)}


def measure(case: Case, repeats: int) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, case, repeats).result()


def _measure(case: Case, repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        Bench(case._replace(clients=3), Path(scratch, "warm")).play()
        before, bench = peak_memory(), Bench(case, Path(scratch, "bench"))
        rounds = [bench.play() for _ in range(repeats)]
        found = {key: median(each[key] for each in rounds) for key in rounds[0]}
        return {**found, "megabytes": max(0.1, peak_memory() - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="5 and 20 clients, one repeat, without writing results")
    options = parser.parse_args()
    counts, repeats = ((5, 20), 1) if options.quick else ((5, 20, 100), options.repeats)
    measured = {
        form: {count: measure(Case(form == "secure", count), repeats) for count in counts}
        for form in ("plain", "secure")
    }
    plain, secure = measured["plain"], measured["secure"]
    rows = []
    for n in counts:
        sizes = [found[n]["bytes"] for found in (secure, plain)]
        against = f"plain sketches, {n} clients ({sizes[1] / 1e6:.3f} MB)"
        rows.append(
            Row(f"secure sum, bytes ({sizes[0] / 1e6:.3f} MB)", against, sizes[0] / sizes[1], 1.5, at_least=False)
        )
    for n in counts:
        taken = [1000 * found[n]["server seconds"] for found in (secure, plain)]
        own = 1000 * secure[n]["client seconds"]
        what, against = f"secure sum, server ({taken[0]:.0f} ms)", f"plain sketches, {n} clients ({taken[1]:.0f} ms)"
        rows.append(Row(what, against, taken[0] / taken[1], 2.0, at_least=False, note=f"a client takes {own:.0f} ms"))
    most = max(counts)
    for form, found in measured.items():
        added, replies = found[most]["megabytes"], most * 4 * ROWS * COLUMNS / 2**20
        what, against = f"{form} form, memory of a round ({added:.1f} MB)", f"replies of {most} ({replies:.0f} MB)"
        rows.append(Row(what, against, added / replies, 0.2, at_least=False))
    publish("secure", rows, measured, write=not options.quick)


if __name__ == "__main__":
    main()
