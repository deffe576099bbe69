"""The overhead of the engine: wall time of a run divided by that of a bare PyTorch loop; target 1.15.

A. engine  `hetero_ssfl.federation.start` with one worker and one torch thread: messages, checkpoints, events, figures.
W. watched the same with the live page of the run, and a viewer that reads it (target: 1.01 of A).
B. bare    one process, one torch thread, a plain loop over the same clients with the same steps and nothing else.

All start in a new process with the consensus of the untrained clients (not timed) and are timed from round 1 to the
last round: for the engine from the start of round 1 until the last round is saved. Runs alternate (A B, B A, ...),
because a machine's speed drifts, and ratios are those of the medians. Beside W stands the CPU time that the page took
after its start, as a fraction of the machine's, which is more precise than a ratio of times. At the end all must have
the same parameters, bit for bit: otherwise they did not do the same work.

    python benchmarks/overhead.py
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from measuring import Row, config_of, medians, publish
from torch import Tensor

from hetero_ssfl.config import Config
from hetero_ssfl.data import load_images, load_rad, random_view, split_training_images, to_input
from hetero_ssfl.federation.start import prepare
from hetero_ssfl.kernels.contribution import contribution
from hetero_ssfl.kernels.distance import alignment_distance
from hetero_ssfl.kernels.mean import combine
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.learning.losses.byol import byol
from hetero_ssfl.learning.training import learning_rate
from hetero_ssfl.runs.events import Event, RoundBegun, RoundDone, Watched
from hetero_ssfl.seeding import rng_for

TARGET = 1.15

States = list[dict[str, Tensor]]
"""The parameters and buffers of each client after the last round."""
Run = Callable[[Config], tuple[float, States]]


def benchmark_config(rounds: int) -> Config:
    """Return a config with cifar10 if HETERO_SSFL_DATA has it, otherwise with digits at 16 px in three channels."""
    folder = os.environ.get("HETERO_SSFL_DATA")
    source, side = ("cifar10", 32) if folder and Path(folder, "cifar10").is_dir() else ("digits", 16)
    return config_of(
        {
            "name": "overhead",
            "rounds": rounds,
            "local_epochs": 2,
            "data": {"source": source, "side": side, "channels": 3, "limit": 1400, "validation": 0},
            "clients": {"count": 3, "models": ["resnet10(width=16)", "resnet8(width=16)", "mobilenet(width=16)"]},
            "partition": {"kind": "iid"},
            "optim": {"batch": 64},
            "evaluation": {"every": 0, "probes": [], "untrained": False, "labels_per_class": 1},
            "engine": {"workers": 1, "threads": 1},
        }
    )


# --- A: the engine ----------------------------------------------------------------------------------


VIEWER = "import sys, urllib.request as web\nfor _ in web.urlopen(sys.argv[1] + 'events'): pass"
shares: list[float] = []
"""The CPU time of the page in each watched run, as a fraction of the machine's."""


def cpu_of_pages() -> float:
    """Return the CPU seconds that this process's live page has taken."""
    seconds = 0.0
    for child in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        if b"hetero_ssfl.report.serving" in Path("/proc", child, "cmdline").read_bytes():
            user, system = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()[11:13]
            seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def run_engine(config: Config, watch: bool = False) -> tuple[float, States]:
    """Return the seconds from the start of round 1 to the first event after the last round is saved, and the states."""
    begun, ended, cpu = 0.0, 0.0, 0.0
    previous: Event | None = None
    viewers: list[subprocess.Popen[bytes]] = []

    def listen(event: Event) -> None:
        nonlocal begun, ended, previous, cpu
        if isinstance(event, Watched):
            viewers.append(subprocess.Popen([sys.executable, "-c", VIEWER, event.url], stderr=subprocess.DEVNULL))
        if watch and isinstance(event, RoundBegun) and event.round == 1:
            time.sleep(15)  # the page has started, and drawn what there is
            cpu = cpu_of_pages()
        if isinstance(event, RoundBegun) and event.round == 1:
            begun = time.perf_counter()
        if isinstance(previous, RoundDone) and previous.round == config.rounds:
            ended = time.perf_counter()
            if watch:
                shares.append((cpu_of_pages() - cpu) / (ended - begun) / (os.cpu_count() or 1))
        previous = event

    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(config, Path(scratch, "run")).train(listen, watch)
        for viewer in viewers:
            viewer.kill()
            viewer.wait()
        names = [f"client-{k:03d}" for k in range(config.clients.count)]
        return ended - begun, [folder.states(name).load(config.rounds) for name in names]


# --- B: the same work without it ----------------------------------------------------------------------


def run_bare(config: Config) -> tuple[float, States]:
    """Run the rounds in a loop as written for a single experiment."""
    torch.set_num_threads(1)
    train = load_images(config.data, "train")
    split = split_training_images(config, train)
    rad = load_rad(config, train, split)
    parts = [train.pixels[rows] for rows in split.clients]
    shape = train.pixels.shape[1:3]
    learners = [
        build_learner(config.model_of(k), config.ssl, *shape, config.seed, "init", k) for k in range(len(parts))
    ]
    factors = [rad_factor(learner, rad, config) for learner in learners]
    begun = time.perf_counter()
    for number in range(1, config.rounds + 1):
        consensus = combine(factors, [1.0] * len(factors)).factor
        for k, learner in enumerate(learners):
            local_training(learner, f"client-{k:03d}", number, parts[k], rad, consensus, config)
            factors[k] = rad_factor(learner, rad, config)
    return time.perf_counter() - begun, [dict(learner.state_dict()) for learner in learners]


def local_training(
    learner: Learner, name: str, number: int, pixels: Tensor, rad: Tensor, consensus: Tensor, config: Config
) -> None:
    optim, alignment, batch = config.optim, config.alignment, config.optim.batch
    sgd = torch.optim.SGD(learner.trainable(), optim.lr, optim.momentum, weight_decay=optim.weight_decay, foreach=True)
    steps, epochs = len(pixels) // batch, config.epochs_of(len(pixels))
    learner.train()
    for epoch in range(epochs):
        scope = ("train", name, number, epoch)
        rng, rng_rad = rng_for(config.seed, *scope), rng_for(config.seed, *scope, "regulariser")
        order = torch.randperm(len(pixels), generator=rng)
        for step in range(steps):
            done = (epoch + step / steps) / epochs
            sgd.param_groups[0]["lr"] = learning_rate(config, number - 1 + done)
            images = pixels[order[step * batch : (step + 1) * batch]]
            views = [random_view(images, config.views, rng) for _ in range(2)]
            loss = byol(learner, views)[0]
            rows = torch.randperm(len(rad), generator=rng_rad)[: alignment.rad_batch]
            live = learner.encoder(random_view(rad[rows], config.views, rng_rad))
            loss = loss + alignment.mu * alignment_distance(live, consensus[rows], alignment)
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
            learner.move_target()


@torch.no_grad()
def rad_factor(learner: Learner, rad: Tensor, config: Config) -> Tensor:
    learner.eval()
    return contribution(learner.encoder(to_input(rad)), config.alignment).arrays["factor"]


def in_fresh_process(config: Config) -> tuple[float, States]:
    """Run the bare loop in a new process, because the engine's worker is always new."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_bare, config).result()


# --- the comparison -----------------------------------------------------------------------------------


def largest_difference(one: States, other: States) -> float:
    differences = (
        float((a[key].double() - b[key].double()).abs().max()) for a, b in zip(one, other, strict=True) for key in a
    )
    return max(differences)


def compare(config: Config, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of every run, by kind, and the largest difference between the final parameters."""
    watched = partial(run_engine, watch=True)
    runs: dict[str, Run] = {"engine": run_engine, "watched": watched, "bare": in_fresh_process}
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    finals: dict[str, States] = {}
    for repeat in range(repeats):
        for kind in sorted(runs, reverse=repeat % 2 == 0):
            taken, finals[kind] = runs[kind](config)
            seconds[kind].append(taken)
            print(f"  repeat {repeat + 1}  {kind:7}  {taken:7.2f} s", flush=True)
    return seconds, max(largest_difference(finals["engine"], finals[kind]) for kind in ("watched", "bare"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Wall time of the engine divided by that of a bare PyTorch loop.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round, one repeat, without writing results")
    options = parser.parse_args()
    rounds, repeats = (1, 1) if options.quick else (options.rounds, options.repeats)
    config = benchmark_config(rounds)
    print(f"{config.clients.count} clients, {rounds} rounds x {config.local_epochs} epochs, {config.data.source}")
    seconds, difference = compare(config, repeats)
    middle = medians(seconds)
    print(f"largest difference between final parameters: {difference:g} (0 is bit for bit)")
    what, against = "a run: messages, checkpoints, events and all", "a bare loop with the same steps and final bits"
    row = Row(what, against, middle["engine"] / middle["bare"], TARGET, at_least=False)
    note = f"CPU time of the page: {statistics.median(shares):.2%} of the machine's"
    page = Row(
        "a run with its live page", "the same without", middle["watched"] / middle["engine"], 1.01, False, note=note
    )
    measured = {
        "seconds": seconds,
        "data": config.data.source,
        "rounds": rounds,
        "difference": difference,
        "cpu_of_page": shares,
    }
    publish("overhead", [row, page], measured, write=not options.quick)
    if difference:
        print("the two sides did not do the same work, so the ratio is not valid", file=sys.stderr)
    return int(difference > 0)


if __name__ == "__main__":
    sys.exit(main())
