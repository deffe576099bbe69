"""Split training images into validation, RAD and clients' parts, which never overlap; keep test data apart from them.

Labels, if any, are used here only to simulate clients: they balance the three parts and divide clients by class.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ..config import Config, DataConfig, with_settings
from ..errors import ConfigError, DataError
from ..seeding import rng_for
from .images import Images, load_images
from .partition import partition
from .sources import same_source

MIN_RAD = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """Row numbers of the training images."""

    validation: Tensor
    rad: Tensor
    clients: tuple[Tensor, ...]


def split_training_images(config: Config, train: Images) -> Split:
    """Split `data.limit` images into validation, RAD and one part per client, as determined by the seed."""
    order = balanced_order(train, rng_for(config.seed, "split"))[: config.data.limit]
    kept = kept_apart(config, train)
    reserved = kept.validation + kept.rad
    if len(order) - reserved < 2 * config.clients.count:
        raise ConfigError(
            f"{len(order)} training images minus data.validation = {kept.validation} and rad.size = {kept.rad} are too "
            f"few for clients.count = {config.clients.count}, which need 2 each. Change one of these, or data.limit."
        )
    validation, rad, pool = order.tensor_split([kept.validation, reserved])
    labels = None if train.labels is None else train.labels[pool]
    parts = partition(config, labels, len(pool), len(train.classes))
    smallest = min(range(len(parts)), key=lambda k: len(parts[k]))
    if len(parts[smallest]) < 2:
        found = f"client {smallest} gets {len(parts[smallest])} images of {len(pool)}, expected at least 2"
        raise ConfigError(f"{found}. Lower clients.count, use more images, or change partition.kind.")
    return Split(validation.sort().values, rad.sort().values, tuple(pool[rows].sort().values for rows in parts))


class HeldOut(NamedTuple):
    """Numbers of training images that no client trains on."""

    validation: int
    rad: int


def kept_apart(config: Config, train: Images) -> HeldOut:
    """Return how many training images are for validation, which needs labels, and for the RAD.

    Defaults are lower for small data sets, because nobody asked for them. Values that were set are kept.
    """
    count = min(len(train), config.data.limit or len(train))
    validation = validation_size(config.data, count) if train.labels is not None else 0
    fitting = config.rad.size if "size" in config.rad.model_fields_set else max(MIN_RAD, count // 5)
    return HeldOut(validation, 0 if config.rad.source else min(config.rad.size, fitting))


def validation_size(data: DataConfig, count: int) -> int:
    """Return the number of validation images among `count` labeled training images."""
    return data.validation if "validation" in data.model_fields_set else min(data.validation, count // 10)


def fit_to_data(config: Config) -> Config:
    """Return the config with the numbers of validation and RAD images that fit the data, unless they were set.

    The run folder then keeps these numbers, and they do not change with later versions.
    """
    if "validation" in config.data.model_fields_set and "size" in config.rad.model_fields_set:
        return config
    train = load_images(config.data, "train")
    kept = kept_apart(config, train)
    validation = kept.validation if train.labels is not None else config.data.validation
    size = fit_rad(config, *train.pixels.shape[1:3]).rad.size if config.rad.source else kept.rad
    lowered = [f"data.validation = {validation}"] if validation != config.data.validation else []
    lowered += [f"rad.size = {size}"] if size != config.rad.size and not config.rad.source else []
    if lowered:
        which = f"'{config.data.source}' has {min(len(train), config.data.limit or len(train))} training images to use"
        log.warning("%s, so the defaults are lowered: %s. Set them to change this.", which, ", ".join(lowered))
    return with_settings(config, {"data.validation": validation, "rad.size": size})


def fit_rad(config: Config, channels: int | None = None, side: int | None = None) -> Config:
    """Return the config with at most as many RAD images as `rad.source` has, unless their number was set."""
    if config.rad.source is None or "size" in config.rad.model_fields_set:
        return config
    count = len(_rad_images(config, channels, side))
    if count < MIN_RAD:
        found = f"rad.source = '{config.rad.source}' has {count} training images, expected at least {MIN_RAD}"
        raise ConfigError(f"{found}; a few hundred work well. Add images.")
    size = min(config.rad.size, count)
    return config.model_copy(update={"rad": config.rad.model_copy(update={"size": size})})


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
        what = f"rad.source = '{config.rad.source}' is the clients' own data"
        raise ConfigError(f"{what}. Leave it out: the RAD then consists of images that no client has.")
    return load_rad_alone(config, *train.pixels.shape[1:3])


def load_rad_alone(config: Config, channels: int | None = None, side: int | None = None) -> Tensor:
    """Return a random sample of `rad.source`, in the given shape, the shape in `[data]`, or the images' own."""
    images = _rad_images(config, channels, side)
    if len(images) < config.rad.size:
        available = f"the {len(images)} images of '{config.rad.source}'"
        raise ConfigError(f"rad.size = {config.rad.size} exceeds {available}. Lower it.")
    order = torch.randperm(len(images), generator=rng_for(config.seed, "rad"))
    return images.pixels[order[: config.rad.size].sort().values]


def _rad_images(config: Config, channels: int | None, side: int | None) -> Images:
    wanted = {"channels": channels or config.data.channels, "side": side or config.data.side}
    other = config.data.model_copy(update={"source": config.rad.source, "label_column": None, **wanted})
    return load_images(other, "train")


def without_trained(held_out: Mapping[str, Images], trained: Mapping[str, Tensor]) -> dict[str, Images]:
    """Remove from the held-out parts every sample that is bit-identical to a training sample, with a warning.

    Keys describe the parts in messages. A part that would become empty is an error.
    """
    digests = {part: _digests(images.pixels) for part, images in held_out.items()}
    wanted = {digest for part in digests.values() for digest in part}
    places: dict[bytes, str] = {}
    for place, samples in trained.items() if wanted else ():
        places = {digest: place for digest in _digests(samples) if digest in wanted} | places
    kept = dict(held_out)
    for part, images in held_out.items():
        rows = [k for k, digest in enumerate(digests[part]) if digest not in places]
        if len(rows) == len(images):
            continue
        found = sorted({places[digest] for digest in digests[part] if digest in places})
        where = " and ".join(found if len(found) < 4 else [*found[:2], f"{len(found) - 2} others"])
        if not rows:
            what = f"all {len(images)} {part} also occur in {where}, so they would measure nothing"
            raise DataError(f"{what}. Hold out other samples with test= or data.validation.")
        log.warning("%d of %d %s also occur in %s and are left out", len(images) - len(rows), len(images), part, where)
        kept[part] = images.subset(torch.tensor(rows))
    return kept


def _digests(samples: Tensor) -> list[bytes]:
    return [blake2b(sample.tobytes(), digest_size=16).digest() for sample in samples.numpy()]
