"""What a run would cost, found by building its parts and measuring one small step: nothing is trained."""

import time
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from .config import Config
from .data import Images, load_images, split_training_images, to_input
from .federation.records import content_size, pack
from .methods import METHODS, Broadcast, method_for
from .methods.averaging import shared_weights
from .models import Learner, build_learner, count_parameters
from .training import Client


def costs_of(name: str, config: Config) -> dict[str, Any]:
    """Per model: parameters, steps, bytes, memory, and time on one core of this machine."""
    method_for(config)
    torch.set_num_threads(1)
    images = load_images(config.data, "train")
    split = split_training_images(config, images)
    channels, side = images.pixels.shape[1:3]
    classes = len(images.classes) if METHODS[config.method].needs_labels else None
    models = []
    for number in range(min(len(config.clients.models), config.clients.count)):
        learner = build_learner(config.model_of(number), config.ssl, channels, side, config.seed, classes=classes)
        largest = max(len(share) for share in split.clients[number :: len(config.clients.models)])
        steps = max(1, largest // config.optim.batch) * config.local_epochs
        networks = sum(t.numel() * t.element_size() for t in learner.state_dict().values())
        trainable = sum(p.numel() * 4 for p in learner.trainable())
        models.append(
            {
                "encoder": config.model_of(number).encoder,
                "encoder_parameters": count_parameters(learner.encoder),
                "steps_per_round": steps,
                "bytes_per_round": message_bytes(config, learner, to_input(images.pixels[:2])),
                "memory_bytes": networks + 2 * trainable,  # gradients and momentum; activations come on top
                "seconds_per_step": seconds_per_step(config, learner, images),
            }
        )
    busy = sum(m["steps_per_round"] * m["seconds_per_step"] for m in models) / len(models)
    hours = busy * config.clients.selected_per_round() * config.rounds / 3600
    return {
        "cell": name,
        "rounds": config.rounds,
        "clients": config.clients.count,
        "models": models,
        "core_hours": hours,
    }


def message_bytes(config: Config, learner: Learner, sample: Tensor) -> int:
    """Both ways, one client and round, measured on contents of the real shapes."""
    if METHODS[config.method].averages_weights:
        return 2 * content_size(pack(shared_weights(learner)))
    if config.method != "hetero-ssfl":
        return 0
    with torch.no_grad():
        learner.eval()
        width = learner.represent(sample, config.alignment.layer).shape[1]
    rank, rows, wire = config.alignment.rank, config.rad.size, getattr(torch, config.alignment.wire)
    columns = min(width, rank), min(width * config.clients.count, rank)  # up, down
    return sum(content_size(pack({"factor": torch.zeros(rows, c, dtype=wire)})) for c in columns)


def seconds_per_step(config: Config, learner: Learner, images: Images) -> float:
    """Real local updates on a few images, scaled to the batch; a RAD batch counts as half a pair of views."""
    count = min(config.optim.batch, 4 if count_parameters(learner.encoder) > 2_000_000 else 64)
    few = config.model_copy(update={"local_epochs": 1, "optim": config.optim.model_copy(update={"batch": count})})
    pixels = images.pixels[:count]
    labels = images.labels[:count] if images.labels is not None and METHODS[config.method].needs_labels else None
    client = Client("measured", few, learner, pixels, pixels, labels)
    method, times = method_for(few), []
    for _ in range(3):  # the first is the warm-up
        started = time.perf_counter()
        method.local_update(client, Broadcast(1))
        times.append(time.perf_counter() - started)
    rad_batch = min(config.alignment.rad_batch or config.rad.size, config.rad.size)
    aligned = config.method == "hetero-ssfl" and config.alignment.mu > 0
    share = 1 + rad_batch / (2 * config.optim.batch) if aligned else 1.0
    return min(times[1:]) / count * config.optim.batch * share


def cost_table(costs: list[dict[str, Any]]) -> Table:
    table = Table(title="What it would cost (time: one core of this machine, from a measured step)")
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
                f"{model['bytes_per_round'] / 1e6:.1f}",
                f"{model['memory_bytes'] / 1e6:.0f}",
                "" if number else str(cost["rounds"]),
                "" if number else f"{cost['core_hours']:,.1f}",
            )
    return table
