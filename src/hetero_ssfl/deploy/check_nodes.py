"""Checks of a federation's config and of node settings: images, RAD, encoders, names, limits. Nothing is trained.

Images are decoded for some seconds at most. Code that a folder names is imported only if the user trusts it.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..config import Config, DataConfig
from ..data import count_images, load_images, validation_size
from ..data.sources import locate, open_rows
from ..data.streams import each_image
from ..errors import ConfigError, DataError
from ..federation.participants.limits import check_text
from ..federation.participants.node import open_node
from ..federation.participants.node_rad import blank_rad
from ..federation.participants.node_settings import NodeSettings
from ..learning.work import work_of
from ..plugins import TRUST_VARIABLE, is_trusted
from .findings import UNCHECKED, Part

DECODE_SECONDS = 3.0  # for the images of one machine; a run decodes all of them
ENOUGH = 2  # images that a node needs at least
SIDE = 32  # for an encoder whose images' size is not known
KINDS = {1: "grey", 3: "colour"}
Shape = tuple[int, int]
"""Channels and side of the images that encoders get."""


class Pictures:
    """The first images of a source as they are, and what is known of the others."""

    def __init__(self, data: DataConfig, beside: Path, seconds: float = DECODE_SECONDS) -> None:
        """Decode images of a source, or raise DataError for the first bad one. `beside` is the folder of the settings,
        where relative paths start."""
        found = _located(data.source, beside) if data.source != "digits" else None
        self.remote = isinstance(found, str)
        self.shapes: set[tuple[int, ...]] = set()
        self.total = self.decoded = self.skipped = 0
        if self.remote:
            return
        plain = data.model_copy(update={"side": None, "channels": None})
        self.total, images = each_image(plain)
        deadline, rows = time.monotonic() + seconds, 0
        for image in images:
            self.shapes.add(tuple(image.pixels.shape))
            self.decoded, rows = self.decoded + 1, image.row + 1
            if time.monotonic() > deadline:
                break
        else:
            rows = self.total
        self.skipped = rows - self.decoded

    @property
    def shape(self) -> Shape | None:
        """The shape of the first images, if all have the same and are square."""
        one = next(iter(self.shapes), (0, 0, 0))
        return (one[0], one[2]) if len(self.shapes) == 1 and one[1] == one[2] else None

    def text(self) -> str:
        sides = sorted(min(shape[1:]) for shape in self.shapes)
        size = f"{sides[0]}" if sides[0] == sides[-1] else f"{sides[0]} to {sides[-1]}"
        kinds = " and ".join(KINDS[channels] for channels in sorted({shape[0] for shape in self.shapes}))
        tried = "all" if self.decoded + self.skipped == self.total else f"the first {self.decoded:,}"
        bad = f", {self.skipped:,} bad ones skipped" if self.skipped else ""
        return f"{self.total:,} {kinds} images of {size} pixels ({tried} decoded{bad})"


def _located(source: str, beside: Path) -> Path | str:
    try:
        return locate(source)
    except DataError as error:
        raise DataError(f"{error} A relative path starts in '{beside}'.") from None


# --- the server ---


def rad_pictures(config: Config, server: Path) -> tuple[DataConfig, Pictures]:
    """Open the RAD as the server does, which looks for a folder next to its config."""
    if config.rad.source is None:
        raise ConfigError("rad.source is not set. Set it to the shared unlabeled data set.")
    beside = server / config.rad.source
    source = str(beside) if beside.exists() else config.rad.source
    data = config.data.model_copy(update={"source": source, "label_column": None})
    return data, Pictures(data, server)


def check_rad(config: Config, data: DataConfig, pictures: Pictures) -> Iterator[Part]:
    if pictures.remote:
        yield "warning", f"'{data.source}' is not on this machine. It is downloaded when the run starts."
        return
    count = pictures.total
    if data.source == "digits":
        count = len(load_images(data, "train"))
    elif isinstance(source := locate(data.source), Path):
        count = open_rows(data, source, "train").count
    if config.rad.size > count and "size" in config.rad.model_fields_set:  # otherwise it is fitted
        yield "stops", f"rad.size = {config.rad.size} exceeds the {count} training images of '{data.source}'. Lower it."
    if data.side is None and pictures.shape is None:
        yield (
            "stops",
            f"the images of '{data.source}' are not squares of one size. Set data.side, for example {SIDE}, to crop "
            "and resize all images.",
        )
    yield "ok", pictures.text()


def rad_shape(config: Config, pictures: Pictures | None) -> Shape | None:
    """Return the shape of the RAD's images, which all images of the nodes get; None if it is not known yet."""
    first = next(iter(pictures.shapes), None) if pictures else None
    own = pictures.shape if pictures else None
    channels, side = config.data.channels or (first and first[0]), config.data.side or (own and own[1])
    return (channels, side) if channels and side else None


def check_names(config: Config, folders: Sequence[str], nodes: Mapping[str, NodeSettings]) -> Iterator[Part]:
    """Check who takes part. `folders` are all nodes of the deployment, `nodes` the settings that are here."""
    clients, names = config.clients, [node.name for node in nodes.values()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        twice = " and ".join(folder for folder, node in nodes.items() if node.name == name)
        yield "stops", f"{twice} are both named '{name}' in node.toml. Give each node its own name."
    for folder, node in nodes.items():
        if clients.seats and node.name not in [seat.name for seat in clients.seats]:
            yield "stops", f"{folder} is named '{node.name}', which is not in clients.seats. Add it there."
    if folders and clients.count > len(folders):
        yield (
            "stops",
            f"a run starts when clients.count = {clients.count} nodes are connected, but there are {len(folders)}. "
            "Lower it, or add nodes with: hetero-ssfl deploy add-node",
        )
    if len(folders) > clients.count + clients.newcomers:
        yield (
            "warning",
            f"{len(folders)} nodes have keys, but there are {clients.count + clients.newcomers} seats: the last nodes "
            "are refused. Raise clients.count or clients.newcomers.",
        )


def check_code(config: Config) -> Iterator[Part]:
    """Name the code of the config that was not checked."""
    if not is_trusted(config.method):
        yield "warning", _untrusted("method", config.method)


# --- a node ---


def check_settings(node: NodeSettings) -> Iterator[Part]:
    try:
        torch.zeros(1, device=node.device)
    except (RuntimeError, AssertionError) as error:  # torch raises both for a device that does not exist
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        yield "stops", f"device = '{node.device}' cannot be used here: {reason}. Change it in node.toml."
    existing = next(path for path in (node.home, *node.home.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield "stops", f"home = '{node.home}' cannot be written by this account. Change it in node.toml."


def check_images(node: NodeSettings, pictures: Pictures, shape: Shape | None) -> Iterator[Part]:
    if pictures.remote:
        yield "warning", f"'{node.data.source}' is not on this machine. It is downloaded when the run starts."
        return
    counts = count_images(node.data)
    kept = validation_size(node.data, counts.train) if counts.classes > 1 else 0
    if counts.train - kept < ENOUGH:
        yield (
            "stops",
            f"'{node.data.source}' has {counts.train} images, and {kept} are kept for validation: fewer than {ENOUGH} "
            "are left to train on. Add images, or lower data.validation.",
        )
    yield "ok", pictures.text()
    if shape is not None:
        yield from _conversions(node, pictures, shape)


def _conversions(node: NodeSettings, pictures: Pictures, shape: Shape) -> Iterator[Part]:
    """Name what becomes of images that do not have the shape of the RAD."""
    channels, side = shape
    own = {found[0] for found in pictures.shapes}
    if own != {channels}:
        found = " and ".join(KINDS[count] for count in sorted(own))
        yield "warning", f"its images are {found}, those of the RAD are {KINDS[channels]}: its images are converted."
    smallest = min(min(found[1:]) for found in pictures.shapes)
    if smallest < side:
        yield "ok", f"its smallest image has {smallest} pixels and is enlarged to {side}, as the config asks."
    for key, asked in (("channels", channels), ("side", side)):
        if getattr(node.data, key) not in (None, asked):
            value = getattr(node.data, key)
            yield "warning", f"data.{key} = {value} in node.toml has no effect: the RAD has {key} = {asked}."


def check_encoder(node: NodeSettings, shape: Shape) -> Iterator[Part]:
    spec = node.encoder.encoder
    if not is_trusted(spec):
        yield "warning", _untrusted("encoder", spec)
        return
    work = work_of(spec, *shape)
    channels, side = shape
    yield "ok", f"{spec}: {work.width} features of {channels}x{side}x{side} images, {work.parameters:,} parameters"


def check_limits(node: NodeSettings, config: Config, shape: Shape) -> Iterator[Part]:
    """Ask the node's own checks what it would answer to this config."""
    if not is_trusted(config.method) or not is_trusted(node.encoder.encoder):
        return  # judging costs builds them; another finding says so
    check_text(node.limits, config.to_toml())
    open_node(node, config, "0" * 32, blank_rad(node, *shape))
    channels, side = shape
    rad_mb = config.rad.size * channels * side**2 / 2**20
    if rad_mb > node.limits.message_mb:
        yield (
            "stops",
            f"the RAD has {rad_mb:,.0f} MB, the node's limit for a message is {node.limits.message_mb} MB. "
            "Lower rad.size, or raise limits.message_mb in node.toml.",
        )
    yield "ok", "the config is within this node's limits"


def check_peers(node: NodeSettings, names: Sequence[str]) -> Iterator[Part]:
    """Check that a node knows the keys of all others, which it asks for in secure sums."""
    missing = [name for name in names if node.peers and not (node.peers / f"{name}.pub").exists()]
    if missing:
        yield (
            "stops",
            f"'{node.peers}' has no public key of {', '.join(missing)}, so this node refuses secure sums with them. "
            "Copy their node.pub there as NAME.pub.",
        )


def encoder_shape(node: NodeSettings, shape: Shape | None, pictures: Pictures | None) -> Shape:
    """Return the RAD's shape or, where the config is on another machine, that of the node's own images."""
    if shape is not None:
        return shape
    first = next(iter(pictures.shapes), None) if pictures else None
    own = pictures.shape if pictures else None
    return node.data.channels or (first[0] if first else 3), node.data.side or (own[1] if own else SIDE)


def _untrusted(what: str, spec: str) -> str:
    module = spec.partition(":")[0]
    return (
        f"{what} '{spec}' {UNCHECKED}: it is code that you have not trained with on this machine. "
        f"If you trust it, set {TRUST_VARIABLE}={module} in the environment."
    )
