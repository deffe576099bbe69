"""Local training of BYOL: images per second of `hetero_ssfl.learning.training.train` compared with two other loops.

    ours     two clients in two worker processes with one torch thread each, with `train`, as in the engine
    obvious  one process with torch's default threads and memory format, PIL transforms in a DataLoader: target 1.5 x.
             Measured with and without loader processes; the faster one counts.
    limit    as ours (including the allocator), but a bare loop on precomputed views, so only networks: target 0.92 x

    coordinates  as ours, with SimCLR on own and RAD images in equal parts, and the alignment term with coordinates;
                 its baseline is the same without the term: target 0.91 x, a step costs at most 1.1 times as much

All train the same networks (width 16, 32 px, batch 128) on images in memory; one warm-up step is not timed.
Processes stay alive between repeats. Sides alternate, and ratios are those of medians.

    python benchmarks/training.py
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from measuring import Row, alternate, config_of, medians, publish, seconds
from per_image import TwoViews
from torch import Tensor
from torch.utils.data import DataLoader

from hetero_ssfl.config import Config, ViewsConfig, with_settings
from hetero_ssfl.data import random_view
from hetero_ssfl.federation.engines.workers import keep_freed_memory
from hetero_ssfl.learning.alignment import Coordinates
from hetero_ssfl.learning.learner import Learner, build_learner
from hetero_ssfl.learning.losses.byol import byol
from hetero_ssfl.learning.training import TrainingClient, train
from hetero_ssfl.seeding import rng_for

MODELS = {"ResNet-10": "resnet10(width=16)", "ResNet-18": "resnet18(width=16)"}
BATCH, SIDE, PROCESSES, VIEWS = 128, 32, 2, ViewsConfig()


@dataclass(frozen=True)
class Task:
    """The work of one process: a number of steps of one model."""

    model: str
    steps: int
    batch: int

    @property
    def images(self) -> int:
        return self.steps * self.batch

    def config(self) -> Config:
        choices = {"clients": {"count": PROCESSES, "models": [self.model]}, "optim": {"batch": self.batch}}
        return config_of({"name": "training", "rounds": 1, "local_epochs": 1, **choices})


def learner_of(config: Config) -> Learner:
    return build_learner(config.model_of(0), config.ssl, 3, SIDE, 0, "training")


def noise(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=rng_for(0, "images"), dtype=torch.uint8)


def ours(task: Task) -> float:
    """Return the images per second of one worker."""
    torch.set_num_threads(1)
    config, pixels = task.config(), noise(task.images)
    client = TrainingClient("client", config, learner_of(config), pixels[: task.batch], rad=pixels[:0])
    train(client, 1)
    client.pixels = pixels
    return task.images / seconds(lambda: train(client, 1))


def with_rad(task: Task, aligned: bool) -> float:
    """Return the images per second of one worker that trains on RAD images too, with or without coordinates."""
    torch.set_num_threads(1)
    settings = {"rad.in_ssl": True, "ssl.kind": "simclr", "alignment.distance": "coordinates"}
    config, (own, rad) = with_settings(task.config(), settings), noise(task.images).chunk(2)
    columns = config.alignment.coordinates
    learner = build_learner(config.model_of(0), config.ssl, 3, SIDE, 0, "training", coordinates=columns)
    client = TrainingClient("client", config, learner, own, rad)
    term = Coordinates(client, torch.randn(len(rad), columns, generator=rng_for(0, "targets")), 4.0)
    regulariser = term if aligned else None
    train(client, 1, regulariser)
    return task.images / seconds(lambda: train(client, 1, regulariser))


def limit(task: Task) -> float:
    """Return the images per second of one worker with precomputed views."""
    torch.set_num_threads(1)
    config = task.config()
    learner, rng = learner_of(config), rng_for(0, "views")
    views = [[random_view(rows, VIEWS, rng) for _ in range(2)] for rows in noise(task.images).split(task.batch)]
    sgd = torch.optim.SGD(learner.trainable(), 0.032, momentum=0.9, weight_decay=5e-4, foreach=True)

    def steps(pairs: list[list[Tensor]]) -> None:
        for view_1, view_2 in pairs:
            loss = byol(learner, [view_1, view_2])[0]
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
            learner.move_target()

    steps(views[:1])
    return task.images / seconds(lambda: steps(views))


def obvious(task: Task, loaders: int) -> float:
    """Return the images per second of a straightforward training loop."""
    learner = learner_of(task.config()).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    sgd = torch.optim.SGD(learner.trainable(), lr=0.032, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(TwoViews(noise(task.images + task.batch), VIEWS), task.batch, shuffle=True, num_workers=loaders)
    begun = 0.0
    for number, (view_1, view_2) in enumerate(loader):
        loss = byol(learner, [view_1, view_2])[0]
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        with torch.no_grad():
            assert learner.target is not None
            for old, new in zip(learner.target.parameters(), learner.online.parameters(), strict=True):
                old.mul_(learner.ssl.ema).add_(new, alpha=1 - learner.ssl.ema)
        if number == 0:
            begun = time.perf_counter()
    return task.images / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description="Images per second of local training.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one step of 8 images, without writing results")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    workers_of_ours = ProcessPoolExecutor(PROCESSES, spawn, initializer=keep_freed_memory)
    with workers_of_ours as workers, ProcessPoolExecutor(1, spawn) as single:
        if options.quick:
            measured = {"ResNet-10": measure(Task(MODELS["ResNet-10"], 1, 8), 1, workers, single)}
        else:
            tasks = {name: Task(model, options.steps, BATCH) for name, model in MODELS.items()}
            measured = {name: measure(task, options.repeats, workers, single) for name, task in tasks.items()}
    rows = [row for name, taken in measured.items() for row in compare(name, medians(taken))]
    publish("training", rows, {"images_per_second": measured}, not options.quick)


def measure(
    task: Task, repeats: int, workers: ProcessPoolExecutor, single: ProcessPoolExecutor
) -> dict[str, list[float]]:
    """Return the images per second of all processes of a side together, for every repeat."""
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: sum(workers.map(ours, [task] * PROCESSES)),
        "coordinates": lambda: sum(workers.map(with_rad, [task] * PROCESSES, [True] * PROCESSES)),
        "without coordinates": lambda: sum(workers.map(with_rad, [task] * PROCESSES, [False] * PROCESSES)),
        "limit": lambda: sum(workers.map(limit, [task] * PROCESSES)),
        "obvious, no loaders": lambda: single.submit(obvious, task, 0).result(),
        "obvious, 2 loaders": lambda: single.submit(obvious, task, 2).result(),
    }
    return alternate(sides, repeats)


def compare(name: str, rates: dict[str, float]) -> list[Row]:
    what = f"local training, {name} of width 16, {SIDE} px, batch {BATCH}"
    rival = max(rate for side, rate in rates.items() if side.startswith("obvious"))
    return [
        Row(what, "PIL in a DataLoader, default threads and format", rates["ours"] / rival, 1.5),
        Row(what, "bare loops on ready-made views", rates["ours"] / rates["limit"], 0.92),
        Row(f"{what}, with coordinates", "without them", rates["coordinates"] / rates["without coordinates"], 0.91),
    ]


if __name__ == "__main__":
    main()
