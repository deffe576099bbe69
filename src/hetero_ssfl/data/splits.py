"""Split training images into validation, RAD and clients' parts, which never overlap.

Labels, if any, are used here only to simulate clients: they balance the three parts and divide clients by class.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..config import Config
from ..errors import ConfigError
from ..seeding import rng_for
from .images import Images, load_images
from .partition import partition
from .sources import same_source


@dataclass(frozen=True)
class Split:
    """Row numbers of the training images."""

    validation: Tensor
    rad: Tensor
    clients: tuple[Tensor, ...]

    def pool(self) -> Tensor:
        """Return the rows of all clients."""
        return torch.cat(self.clients).unique()


def split_training_images(config: Config, train: Images) -> Split:
    """Split `data.limit` images into validation, RAD and one part per client, as determined by the seed."""
    order = balanced_order(train, rng_for(config.seed, "split"))[: config.data.limit]
    rad_size = 0 if config.rad.source else config.rad.size
    validation_size = 0 if train.labels is None else config.data.validation  # validation needs labels
    reserved = validation_size + rad_size
    if len(order) - reserved < 2 * config.clients.count:
        raise ConfigError(
            f"{len(order)} training images minus {validation_size} for validation and {rad_size} for the RAD "
            f"leave {max(0, len(order) - reserved)} for {config.clients.count} clients, expected at least 2 each. "
            "Lower rad.size or data.validation, or raise data.limit."
        )
    validation, rad, pool = order.tensor_split([validation_size, reserved])
    labels = None if train.labels is None else train.labels[pool]
    parts = partition(config, labels, len(pool), len(train.classes))
    smallest = min(range(len(parts)), key=lambda k: len(parts[k]))
    if len(parts[smallest]) < 2:
        raise ConfigError(
            f"client {smallest} gets {len(parts[smallest])} images of {len(pool)}, expected at least 2. "
            "Use fewer clients, more images or another partition.kind."
        )
    return Split(validation.sort().values, rad.sort().values, tuple(pool[rows].sort().values for rows in parts))


def balanced_order(train: Images, rng: Generator) -> Tensor:
    """Return a random order in which every prefix is balanced over the classes."""
    shuffled = torch.randperm(len(train), generator=rng)
    if train.labels is None:
        return shuffled
    labels = train.labels[shuffled]
    rank = torch.zeros(len(train), dtype=torch.long)
    for label in labels.unique():
        members = labels == label
        rank[members] = torch.arange(int(members.sum()))
    return shuffled[rank.argsort(stable=True)]


def load_rad(config: Config, train: Images, split: Split) -> Tensor:
    """Return the RAD's pixels: reserved training images, or a random sample of another data set."""
    if config.rad.source is None:
        return train.pixels[split.rad]
    if same_source(config.rad.source, config.data.source):
        raise ConfigError(
            f"rad.source = '{config.rad.source}' is the clients' own data, expected another data set. "
            "Leave rad.source out: the RAD then consists of images that no client has."
        )
    return load_rad_alone(config, *train.pixels.shape[1:3])


def load_rad_alone(config: Config, channels: int | None = None, side: int | None = None) -> Tensor:
    """Return a random sample of `rad.source`, in the given shape, the shape in `[data]`, or the images' own."""
    assert config.rad.source is not None
    wanted = {"channels": channels or config.data.channels, "side": side or config.data.side}
    other = config.data.model_copy(update={"source": config.rad.source, "label_column": None, **wanted})
    images = load_images(other, "train")
    if len(images) < config.rad.size:
        raise ConfigError(
            f"rad.size = {config.rad.size} exceeds the {len(images)} images of '{config.rad.source}'. Lower it."
        )
    order = torch.randperm(len(images), generator=rng_for(config.seed, "rad"))
    return images.pixels[order[: config.rad.size].sort().values]
