"""Divide training images among simulated clients.

Dirichlet and shards use the partitioners of flwr-datasets. The paper's rule (disjoint classes) is implemented here.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import Config
from ..errors import ConfigError
from ..seeding import rng_for, seed_for

if TYPE_CHECKING:
    from datasets import Dataset


def partition(config: Config, labels: Tensor | None, size: int, n_classes: int) -> list[Tensor]:
    """Return one tensor of row numbers per client: disjoint, complete, reproducible."""
    settings, count = config.partition, config.clients.count
    if labels is None and settings.kind != "iid":
        raise ConfigError(
            f"partition.kind = '{settings.kind}' divides by class, but the data has no labels. "
            "Set partition.kind = 'iid'."
        )
    if settings.kind == "iid":
        order = torch.randperm(size, generator=rng_for(config.seed, "partition"))
        return list(order.tensor_split(count))
    assert labels is not None
    if settings.kind == "classes":
        holders = assign_classes(n_classes, count, settings.classes_per_client, config.seed)
        return divide_by_class(labels, holders, rng_for(config.seed, "partition"))
    return _by_flower(config, labels)


def assign_classes(n_classes: int, count: int, per_client: int | None, seed: int) -> list[list[int]]:
    """Assign classes by the paper's rule: disjoint groups of K/N classes, or with many clients a random sample each."""
    wanted = per_client or max(1, n_classes // count)
    if wanted > n_classes:
        raise ConfigError(f"partition.classes_per_client = {wanted}, but there are {n_classes} classes. Lower it.")
    order = torch.randperm(n_classes, generator=rng_for(seed, "classes")).tolist()
    if count * wanted <= n_classes:
        holders = [order[k * wanted : (k + 1) * wanted] for k in range(count)]
        if per_client is None:  # K is not divisible by N: assign the remaining classes too
            for k, left in enumerate(order[count * wanted :]):
                holders[k % count].append(left)
        return holders
    if count < n_classes:
        raise ConfigError(
            f"{count} clients with {wanted} disjoint classes each need {count * wanted} classes, "
            f"but there are {n_classes}. "
            f"Set partition.classes_per_client to at most {n_classes // count}."
        )
    # Each client draws from the classes that the fewest clients hold so far, so that no class is left out.
    rng, held, holders = rng_for(seed, "holders"), torch.zeros(n_classes), []
    for _ in range(count):
        drawn = (held + torch.rand(n_classes, generator=rng)).argsort()[:wanted]
        held[drawn] += 1
        holders.append(sorted(drawn.tolist()))
    return holders


def divide_by_class(labels: Tensor, holders: list[list[int]], rng: torch.Generator) -> list[Tensor]:
    """Divide the images of each class, in random order, evenly among the clients that hold the class."""
    rows_of: list[list[Tensor]] = [[] for _ in holders]
    for label in sorted({c for classes in holders for c in classes}):
        rows = torch.nonzero(labels == label).flatten()
        rows = rows[torch.randperm(len(rows), generator=rng)]
        keepers = [k for k, classes in enumerate(holders) if label in classes]
        for k, part in zip(keepers, rows.tensor_split(len(keepers)), strict=True):
            rows_of[k].append(part)
    return [torch.cat(parts) for parts in rows_of]


def _by_flower(config: Config, labels: Tensor) -> list[Tensor]:
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

    settings, count = config.partition, config.clients.count
    seed = seed_for(config.seed, "partition") % 2**32  # numpy accepts 32 bits
    partitioner = {
        "dirichlet": partial(DirichletPartitioner, alpha=settings.alpha, min_partition_size=2),
        "shards": partial(ShardPartitioner, num_shards_per_partition=settings.shards_per_client),
    }[settings.kind](num_partitions=count, partition_by="label", seed=seed)
    partitioner.dataset = _row_table(labels)
    try:
        parts = [torch.tensor(partitioner.load_partition(k)["row"]) for k in range(count)]
    except (ValueError, ZeroDivisionError) as error:  # empty shards cause a division by zero
        raise ConfigError(
            f"partition.kind = '{settings.kind}' cannot divide {len(labels)} images among {count} clients: "
            f"{str(error).splitlines()[0]} Use fewer clients or shards, or a larger partition.alpha."
        ) from None
    given = torch.zeros(len(labels), dtype=torch.bool)
    given[torch.cat(parts)] = True
    left = torch.nonzero(~given).flatten()  # images that do not fill a shard are distributed too
    return [torch.cat([part, left[k::count]]) for k, part in enumerate(parts)]


def _row_table(labels: Tensor) -> "Dataset":
    from datasets import Dataset

    columns: dict[str, Any] = {"label": labels.tolist(), "row": list(range(len(labels)))}
    return Dataset.from_dict(columns)
