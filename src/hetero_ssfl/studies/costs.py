"""Estimate the cost of a run by building its parts and measuring one small step, without training it."""

import time
from functools import lru_cache
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..config import ClientsConfig, Config, ModelConfig, OptimConfig, SslConfig
from ..data import Images, load_images, split_training_images, to_input
from ..federation.start import torch_threads
from ..learning.learner import Learner, build_learner, count_parameters
from ..learning.training import TrainingClient
from ..methods import Broadcast, FedSSL, HeteroSSFL, Local, method_class, method_for
from ..methods.averaging import shared_weights

PUBLIC = {"cifar10": (50_000, 32, 10), "cifar100": (50_000, 32, 100), "tiny-imagenet": (100_000, 64, 200)}
"""Number of training images, side and number of classes of the complete public data sets."""


def costs_of(name: str, config: Config) -> dict[str, Any]:
    """Return for each model: parameters, steps, bytes, memory, and time on one core of this machine."""
    method_for(config)
    images = _images(config)
    split = split_training_images(config, images)
    channels, side = images.pixels.shape[1:3]
    classes = len(images.classes) if method_class(config.method).needs_labels else None
    models = []
    for number in range(min(len(config.clients.models), config.clients.count)):
        # Measured first, on separate networks: two models of this size at once would exceed a dry run's memory limit.
        seconds = seconds_per_step(config, config.model_of(number), channels, side, classes)
        learner = build_learner(config.model_of(number), config.ssl, channels, side, config.seed, classes=classes)
        largest = max(len(rows) for rows in split.clients[number :: len(config.clients.models)])
        steps = max(1, largest // config.optim.batch) * config.local_epochs
        networks = sum(t.numel() * t.element_size() for t in learner.state_dict().values())
        trainable = sum(p.numel() * 4 for p in learner.trainable())
        models.append(
            {
                "encoder": config.model_of(number).encoder,
                "encoder_parameters": count_parameters(learner.encoder),
                "steps_per_round": steps,
                "bytes_per_round": message_bytes(config, learner, to_input(images.pixels[:2])),
                "memory_bytes": networks + 2 * trainable,  # gradients and momentum; activations are not included
                "seconds_per_step": seconds,
            }
        )
        del learner
    busy = sum(m["steps_per_round"] * m["seconds_per_step"] for m in models) / len(models)
    hours = busy * config.clients.selected_per_round() * config.rounds / 3600
    return {
        "cell": name,
        "rounds": config.rounds,
        "clients": config.clients.count,
        "models": models,
        "core_hours": hours,
    }


def _images(config: Config) -> Images:
    """Return the training images. Public data sets are replaced by blank images, so that nothing is downloaded."""
    if config.data.source not in PUBLIC:
        return load_images(config.data, "train")
    count, side, classes = PUBLIC[config.data.source]
    side = config.data.side or side
    blank = torch.zeros(1, 3, side, side, dtype=torch.uint8).expand(count, -1, -1, -1)  # takes no memory
    return Images(blank, torch.arange(count) % classes, tuple(map(str, range(classes))))


def message_bytes(config: Config, learner: Learner, sample: Tensor) -> int | None:
    """Return the bytes per client and round in both directions; None for a method whose messages are not known."""
    kind = method_class(config.method)
    if issubclass(kind, Local):
        return 0
    if issubclass(kind, FedSSL):
        return 2 * sum(w.numel() * w.element_size() for w in shared_weights(learner, kind.shared).values())
    if not issubclass(kind, HeteroSSFL):
        return None
    with torch.no_grad():
        width = learner.eval().represent(sample, config.alignment.layer).shape[1]
    rank, rows, size = config.alignment.rank, config.rad.size, 2 if config.alignment.wire == "float16" else 4
    up, down = min(width, rank), min(width * config.clients.count, rank)
    if config.alignment.form == "sketch":
        up = down = min(rank, rows)
    return rows * (up + down) * size


def seconds_per_step(config: Config, model: ModelConfig, channels: int, side: int, classes: int | None) -> float:
    """Estimate the time per step from the measured time per image."""
    images = config.optim.batch + _extra_images(config)
    trains = config.method if method_class(config.method).needs_labels else Local.name
    return images * _seconds_per_image(trains, model, config.ssl, channels, side, classes)


def _extra_images(config: Config) -> float:
    """Return the cost of a step beyond its own batch, in pairs of views: one view of each RAD image of the term."""
    alignment, rows = config.alignment, config.rad.size
    if alignment.mu == 0 or not issubclass(method_class(config.method), HeteroSSFL):
        return 0.0
    return min(alignment.rad_batch or rows, rows) / 2 / alignment.every


@lru_cache(maxsize=64)
def _seconds_per_image(
    method_name: str, model: ModelConfig, ssl: SslConfig, channels: int, side: int, classes: int | None
) -> float:
    """Measure one-step local updates on a few blank images; the best of two after a warm-up."""
    learner = build_learner(model, ssl, channels, side, 0, classes=classes)
    count = 4 if count_parameters(learner.encoder) > 2_000_000 else 64
    config = Config(
        method=method_name,
        local_epochs=1,
        clients=ClientsConfig(count=1, models=(model,)),
        ssl=ssl,
        optim=OptimConfig(batch=count),
    )
    pixels = torch.zeros(count, channels, side, side, dtype=torch.uint8)
    labels = torch.arange(count) % classes if classes else None
    client, method, times = TrainingClient("measured", config, learner, pixels, pixels, labels), method_for(config), []
    with torch_threads(1):
        for _ in range(3):
            started = time.perf_counter()
            method.local_update(client, Broadcast(1))
            times.append(time.perf_counter() - started)
    return min(times[1:]) / count


def cost_table(costs: list[dict[str, Any]]) -> Table:
    table = Table(title="Estimated cost (time: one core of this machine, from a measured step)")
    table.add_column("cell")
    table.add_column("encoder")
    for heading in (
        "parameters",
        "steps per\nclient and round",
        "MB per client\nand round",
        "MB of networks",
        "rounds",
        "core hours",
    ):
        table.add_column(heading, justify="right")
    for cost in costs:
        for number, model in enumerate(cost["models"]):
            table.add_row(
                "" if number else cost["cell"],
                model["encoder"],
                f"{model['encoder_parameters']:,}",
                str(model["steps_per_round"]),
                "?" if model["bytes_per_round"] is None else f"{model['bytes_per_round'] / 1e6:.1f}",
                f"{model['memory_bytes'] / 1e6:.0f}",
                "" if number else str(cost["rounds"]),
                "" if number else f"{cost['core_hours']:,.1f}",
            )
    return table
