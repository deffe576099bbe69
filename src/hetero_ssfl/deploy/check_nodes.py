"""Checks of a federation's config and of node settings: images, RAD, encoders, names, limits. Nothing is trained.

Images are decoded for some seconds at most. Code that a folder names is imported only if the user trusts it.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..config import Config, DataConfig
from ..data import count_images, each_image, load_images, validation_size
from ..data.sources import locate, open_rows
from ..errors import ConfigError, DataError
from ..federation.participants.limits import check_text
from ..federation.participants.node import open_node
from ..federation.participants.node_rad import blank_rad
from ..federation.participants.node_settings import NodeSettings
from ..learning.forward_cost import work_of
from ..plugins import check_trusted, is_trusted
from .check_machine import Part

DECODE_SECONDS = 3.0  # for the images of one machine; a run decodes all of them
ENOUGH = 2  # images that a node needs at least
SIDE = 32  # for an encoder whose images' size is not known
KINDS = {1: "grey", 3: "colour"}
REMOTE: Part = ("warning", "the images are not on this machine. They are downloaded when the run starts.")
Shape = tuple[int, int]
"""Channels and side of the images that encoders get; 0 for what is not known."""


class ImageSample:
    """The first images of a source as they are, and what is known of the others."""

    def __init__(self, data: DataConfig, beside: Path, seconds: float = DECODE_SECONDS) -> None:
        """Decode images, or raise DataError for the first bad one. Relative paths start in the folder `beside`."""
        self.shapes: set[tuple[int, ...]] = set()
        self.total = self.decoded = self.skipped = 0
        try:
            self.remote = data.source != "digits" and isinstance(locate(data.source), str)
        except DataError as error:
            raise DataError(f"{error} A relative path starts in '{beside}'.") from None
        if self.remote:
            return
        self.total, images = each_image(data.model_copy(update={"side": None, "channels": None}))
        deadline = time.monotonic() + seconds
        for image in images:
            self.shapes.add(tuple(image.pixels.shape))
            self.decoded += 1
            if time.monotonic() > deadline:
                self.skipped = image.row + 1 - self.decoded
                return
        self.skipped = self.total - self.decoded

    def text(self) -> str:
        sides = sorted(min(shape[1:]) for shape in self.shapes)
        size = " to ".join(str(side) for side in dict.fromkeys((sides[0], sides[-1])))
        kinds = " and ".join(KINDS[channels] for channels in sorted({shape[0] for shape in self.shapes}))
        tried = "all" if self.decoded + self.skipped == self.total else f"the first {self.decoded:,}"
        bad = f", {self.skipped:,} bad ones skipped" if self.skipped else ""
        return f"{self.total:,} {kinds} images of {size} pixels ({tried} decoded{bad})"


def image_shape(data: DataConfig, sample: ImageSample | None) -> Shape:
    """Return the shape of images with these settings or, without settings, of squares of one size as they are."""
    shapes = sample.shapes if sample else set()
    channels, height, width = next(iter(shapes), (0, 0, 0))
    return data.channels or channels, data.side or (width if len(shapes) == 1 and height == width else 0)


# --- the server ---


def rad_data(config: Config, server: Path) -> DataConfig:
    """Return where the RAD is. The server first looks for a folder next to its config."""
    if config.rad.source is None:
        raise ConfigError("rad.source is not set. Set it to the shared unlabeled data set.")
    beside = server / config.rad.source
    source = str(beside) if beside.exists() else config.rad.source
    return config.data.model_copy(update={"source": source, "label_column": None})


def check_rad(config: Config, data: DataConfig, sample: ImageSample) -> Iterator[Part]:
    if sample.remote:
        yield REMOTE
        return
    count = sample.total
    if data.source == "digits":
        count = len(load_images(data, "train"))
    elif isinstance(source := locate(data.source), Path):
        count = open_rows(data, source, "train").count
    if config.rad.size > count and "size" in config.rad.model_fields_set:  # otherwise it is fitted
        yield "stops", f"rad.size = {config.rad.size} exceeds the {count} training images of '{data.source}'. Lower it."
    if image_shape(data, sample)[1] == 0:
        yield "stops", f"the images of '{data.source}' are not squares of one size. Set data.side, for example {SIDE}."
    yield "ok", sample.text()


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
        yield "stops", f"a run waits for clients.count = {clients.count} nodes, but there are {len(folders)}. Lower it."
    if len(folders) > clients.count + clients.newcomers:
        seats = f"there are only {clients.count + clients.newcomers} seats for {len(folders)} nodes with keys"
        yield "warning", f"{seats}: the last nodes are refused. Raise clients.count or clients.newcomers."


def check_code(what: str, spec: str) -> Iterator[Part]:
    """Report code that was not checked, because importing it runs it."""
    try:
        check_trusted(spec, what)
    except ConfigError as error:
        yield "unchecked", str(error)


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


def check_images(node: NodeSettings, sample: ImageSample, shape: Shape) -> Iterator[Part]:
    """Check that there are enough images, and name what becomes of those that do not have the shape of the RAD."""
    if sample.remote:
        yield REMOTE
        return
    counts = count_images(node.data)
    kept = validation_size(node.data, counts.train) if counts.classes > 1 else 0
    if counts.train - kept < ENOUGH:
        what = f"'{node.data.source}' has {counts.train} images, of which data.validation keeps {kept}"
        yield "stops", f"{what}: fewer than {ENOUGH} are left to train on. Add images."
    yield "ok", sample.text()
    if not all(shape):
        return
    channels, side = shape
    own = {it[0] for it in sample.shapes}
    if own != {channels}:
        kinds = " and ".join(KINDS[count] for count in sorted(own))
        yield "warning", f"its images are {kinds}, those of the RAD are {KINDS[channels]}: its images are converted."
    for key, asked in (("channels", channels), ("side", side)):
        if (value := getattr(node.data, key)) not in (None, asked):
            yield "warning", f"data.{key} = {value} in node.toml has no effect: the RAD has {key} = {asked}."


def check_encoder(node: NodeSettings, shape: Shape, sample: ImageSample | None) -> Iterator[Part]:
    """Build the encoder for images of the RAD or, where the config is on another machine, for the node's own."""
    spec = node.encoder.encoder
    yield from check_code("encoder", spec)
    if not is_trusted(spec):
        return
    own = image_shape(node.data, sample)
    channels, side = shape if all(shape) else (own[0] or 3, own[1] or SIDE)
    work = work_of(spec, channels, side)
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
        what = f"the RAD has {rad_mb:,.0f} MB, the node's limits.message_mb is {node.limits.message_mb}"
        yield "stops", f"{what}. Lower rad.size, or raise the limit in node.toml."
    yield "ok", "the config is within this node's limits"


def check_peers(node: NodeSettings, names: Sequence[str]) -> Iterator[Part]:
    """Check that a node knows the keys of all others, which it asks for in secure sums."""
    missing = [name for name in names if node.peers and not (node.peers / f"{name}.pub").exists()]
    if missing:
        what = f"'{node.peers}' has no public key of {', '.join(missing)}"
        yield "stops", f"{what}, so this node refuses secure sums with them. Copy their node.pub there as NAME.pub."
