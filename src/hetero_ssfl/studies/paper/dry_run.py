"""What the cells of a table will cost: their models, partitions and messages are built, and nothing is trained."""

from typing import Any

import torch
from rich.table import Table

from ...config import Config
from ...data import Counts, Images, load_images, split_training_images, to_input
from ...learning.forward_cost import work_of
from ...learning.learner import build_learner
from ...methods import method_class, method_for
from ...methods.costs import Workload, memory_bytes, message_bytes, training_seconds
from ...report.tables import table_of

PUBLIC = {"cifar10": (50_000, 32, 10), "cifar100": (50_000, 32, 100), "tiny-imagenet": (100_000, 64, 200)}
"""Number of training images, side and number of classes of the complete public data sets."""


def costs_of(name: str, config: Config) -> dict[str, Any]:
    """Return for each model: parameters, steps, bytes, memory, and time on one core."""
    method_for(config)
    images = _images(config)
    split = split_training_images(config, images)
    channels, side = images.pixels.shape[1:3]
    labels = len(images.classes) if method_class(config.method).needs_labels else None
    models: list[dict[str, Any]] = []
    for number in range(min(len(config.clients.models), config.clients.count)):
        model = config.model_of(number)
        learner = build_learner(model, config.ssl, channels, side, config.seed, classes=labels)
        largest = max(len(rows) for rows in split.clients[number :: len(config.clients.models)])
        counts = Counts(largest, largest, len(images.classes))
        work = Workload(work_of(model.encoder, channels, side), counts, channels, side)
        local = largest + (config.rad.size if config.rad.in_ssl else 0)
        steps = max(1, local // config.optim.batch) * config.epochs_of(local)
        models.append(
            {
                "encoder": model.encoder,
                "encoder_parameters": work.encoder.parameters,
                "steps_per_round": steps,
                "bytes_per_round": message_bytes(config, learner, to_input(images.pixels[:2])),
                "memory_bytes": round(sum(memory_bytes(config, work).values())),
                "seconds_per_step": sum(training_seconds(config, work).values()) / steps,
            }
        )
    busy = sum(m["steps_per_round"] * m["seconds_per_step"] for m in models) / len(models)
    hours = busy * config.clients.selected_per_round() * config.rounds / 3600
    count = config.clients.count
    return {"cell": name, "rounds": config.rounds, "clients": count, "models": models, "core_hours": hours}


def _images(config: Config) -> Images:
    """Return the training images. Public data sets are replaced by blank images, so that nothing is downloaded."""
    if config.data.source not in PUBLIC:
        return load_images(config.data, "train")
    count, side, classes = PUBLIC[config.data.source]
    side = config.data.side or side
    blank = torch.zeros(1, 3, side, side, dtype=torch.uint8).expand(count, -1, -1, -1)  # takes no memory
    return Images(blank, torch.arange(count) % classes, tuple(map(str, range(classes))))


def cost_table(costs: list[dict[str, Any]]) -> Table:
    rows = [
        [
            "" if number else cost["cell"],
            model["encoder"],
            f"{model['encoder_parameters']:,}",
            str(model["steps_per_round"]),
            "?" if model["bytes_per_round"] is None else f"{model['bytes_per_round'] / 1e6:.1f}",
            f"{model['memory_bytes'] / 1e6:,.0f}",
            "" if number else str(cost["rounds"]),
            "" if number else f"{cost['core_hours']:,.1f}",
        ]
        for cost in costs
        for number, model in enumerate(cost["models"])
    ]
    numbers = ("parameters", "steps per\nclient and round", "MB per client\nand round", "MB of memory", "rounds")
    title = "Estimated cost of training (time: one core, from counted operations)"
    return table_of(title, ["cell", "encoder", *numbers, "core hours"], rows, texts=2)
