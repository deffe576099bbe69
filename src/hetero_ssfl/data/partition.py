"""Divide training images among simulated clients.

Dirichlet and shards use the partitioners of flwr-datasets. The paper's rule (disjoint classes) is implemented here.
"""

from functools import partial

import torch
from torch import Tensor

from ..config import Config
from ..errors import ConfigError
from ..seeding import rng_for, seed_for


def partition(config: Config, labels: Tensor | None, size: int, n_classes: int) -> list[Tensor]:
    """Return one tensor of row numbers per client: disjoint, reproducible, complete if no client is limited."""
    settings, count, most = config.partition, config.clients.count, config.partition.images
    if settings.kind == "iid":
        parts = list(torch.randperm(size, generator=rng_for(config.seed, "partition")).tensor_split(count))
    elif labels is None:
        what = f"partition.kind = '{settings.kind}' divides by class, but the data has no labels"
        raise ConfigError(f"{what}. Set partition.kind = 'iid'.")
    elif settings.kind == "classes":
        holders = assign_classes(n_classes, count, settings.classes_per_client, config.seed)
        parts = divide_by_class(labels, holders, rng_for(config.seed, "partition"))
    else:
        parts = _by_flower(config, labels)
    for k, rows in enumerate(parts if most else ()):
        order = torch.randperm(len(rows), generator=rng_for(config.seed, "images of a client", k))
        parts[k] = rows[order[: most[k % len(most)]]]
    return parts


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
        needed = f"{count} clients with {wanted} disjoint classes each need {count * wanted} classes"
        remedy = f"Set partition.classes_per_client to at most {n_classes // count}"
        raise ConfigError(f"{needed}, but there are {n_classes}. {remedy}.")
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
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

    settings, count = config.partition, config.clients.count
    seed = seed_for(config.seed, "partition") % 2**32  # numpy accepts 32 bits
    partitioner = {
        "dirichlet": partial(DirichletPartitioner, alpha=settings.alpha, min_partition_size=2),
        "shards": partial(ShardPartitioner, num_shards_per_partition=settings.shards_per_client),
    }[settings.kind](num_partitions=count, partition_by="label", seed=seed)
    partitioner.dataset = Dataset.from_dict({"label": labels.tolist(), "row": list(range(len(labels)))})
    try:
        parts = [torch.tensor(partitioner.load_partition(k)["row"]) for k in range(count)]
    except (ValueError, ZeroDivisionError) as error:  # empty shards cause a division by zero
        what = f"partition.kind = '{settings.kind}' cannot divide {len(labels)} images among {count} clients"
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{what}: {reason} Use fewer clients or shards, or a larger partition.alpha.") from None
    given = torch.zeros(len(labels), dtype=torch.bool)
    given[torch.cat(parts)] = True
    left = torch.nonzero(~given).flatten()  # images that do not fill a shard are distributed too
    return [torch.cat([part, left[k::count]]) for k, part in enumerate(parts)]
