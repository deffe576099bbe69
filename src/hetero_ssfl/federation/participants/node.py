"""A participant of a real federation: its node settings, data and state are files on its own disk.

The server determines how to train (the config in each message). It cannot choose the images, the model or any files.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from flwr.app import Message
from torch import Tensor

from ... import __version__
from ...config import Config, EngineConfig
from ...data import Images, count_images, load_images, load_rad_alone, remembered, split_training_images
from ...errors import ConfigError, ProtocolError, RunError
from ...learning.encoders import BUILTIN, parse_spec
from ...learning.forward_cost import Work, work_of
from ...methods import METHODS, method_class
from ...methods.costs import Workload
from ...runs.folder import RunFolder, SiteKind
from ...runs.states import StateFolder
from ..wire import FEDERATION, check_size, fields_of
from .identity import open_identity
from .limits import MAX_FRACTIONS, check_costs, check_numbers, check_text
from .node_rad import blank_rad, check_rad, find_rad, save_rad
from .node_settings import NodeSettings, read_node
from .participant import NOBODY, Participant
from .site import ClientInfo, NodeConfig, Request, Setup


def check_instruction(node: NodeSettings, config: Config, rad_rows: int) -> None:
    """Raise ProtocolError if the config names what this node does not allow, or numbers beyond its limits."""
    limits = node.limits
    check_numbers(node.name, config)
    own = {*config.own_code.values(), config.method} - METHODS.keys()  # a method may be named by an entry point
    foreign = sorted(own - set(limits.code))
    if foreign:
        raise ProtocolError(
            f"{node.name} was asked to import '{foreign[0][:100]}', which is not listed in limits.code of its node "
            "settings. Add it there if you trust this code."
        )
    if method_class(config.method).averages_weights and not limits.weights_may_leave:
        raise ProtocolError(
            f"{node.name} does not send weights, but method '{config.method}' requires them. "
            "Use 'hetero-ssfl', or set limits.weights_may_leave = true in the node settings."
        )
    if limits.epsilon is not None and config.privacy.epsilon is None:
        raise ProtocolError(
            f"{node.name} takes part only with noise (limits.epsilon = {limits.epsilon:g} in its node settings), but "
            "the server asks for a round without. Set privacy.epsilon."
        )
    if limits.secure_only and not config.privacy.secure:
        raise ProtocolError(
            f"{node.name} takes part in secure sums only, but the server asks for its own contribution. "
            "Set privacy.secure = true, or limits.secure_only = false in the node settings."
        )
    for what, value, limit in (
        ("rounds", config.rounds, limits.rounds),
        ("local_epochs", config.local_epochs, limits.local_epochs),
        ("rad_images", max(rad_rows, config.rad.size), limits.rad_images),
    ):
        if value > limit:
            raise ProtocolError(
                f"{node.name} was asked for {what} = {value}, its limit is {limit}. "
                f"Lower it, or raise limits.{what} in the node settings."
            )
    fractions = len(config.evaluation.label_shares)
    if fractions > MAX_FRACTIONS:
        raise ProtocolError(
            f"{node.name} was asked for {fractions} evaluation.label_shares, expected at most {MAX_FRACTIONS}."
        )


def check_budget(node: NodeSettings, config: Config, federation: str, shape: Sequence[int]) -> None:
    """Raise ProtocolError if following the config would cost this node more than its limits allow."""
    channels, side = shape[0], shape[-1]
    other = _size_outside(_federation_folder(node, federation), node.home)
    encoder, images = _work_of(node.encoder.encoder, channels, side), count_images(node.data)
    work = Workload(encoder, images, channels, side, other, accelerated=node.device != "cpu")
    check_costs(node.name, node.limits, config, work)


def _size_outside(folder: Path, home: Path) -> int:
    """Return the bytes of all files in a node's home that are not in `folder`, in one walk."""
    total = 0
    for place, folders, files in os.walk(home):
        folders[:] = [name for name in folders if Path(place, name) != folder]
        for name in files:
            with suppress(OSError):  # another process of this node may have deleted it
                total += Path(place, name).stat().st_size
    return total


@lru_cache(maxsize=64)
def _work_of(encoder: str, channels: int, side: int) -> Work:
    """Return the cost of an encoder. Counting imports much of torch; a deployed node handles each message in a new
    process, so the result is kept in the cache. Other people's encoders may change under the same name."""
    if parse_spec(encoder)[0] not in BUILTIN:
        return work_of(encoder, channels, side)
    key = ["work", __version__, torch.__version__, encoder, channels, side]
    return Work(*remembered(key, lambda: work_of(encoder, channels, side)))


class RadMissingError(Exception):
    """This participant does not have the RAD that the server names."""


class NodeSite:
    """Participants described by node settings files on this machine. A client process has one file.

    A server whose participants are all on other machines has none.
    """

    kind: SiteKind = "nodes"

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self.paths = tuple(paths)

    @cached_property
    def settings(self) -> list[NodeSettings]:
        """The settings of all nodes. They are read once per process: restart the process to change them."""
        return [read_node(path) for path in self.paths]

    def set_up(self, config: Config) -> Setup:
        """Read every settings file, and the RAD, the only images that the server has."""
        _ = self.settings
        facts = {"skipped_images": 0, "nodes": [str(path.resolve()) for path in self.paths]}
        if config.rad.source is None:
            raise ConfigError(
                "rad.source is not set, but the server of a federation has no images of its own. "
                "Set rad.source to the shared unlabeled data set."
            )
        return Setup(load_rad_alone(config), facts)

    def difference(self, folder: RunFolder) -> str | None:
        before = folder.read_json("facts.json").get("nodes", [])
        return None if before == [str(path.resolve()) for path in self.paths] else "node settings files"

    def clients(self, folder: RunFolder) -> list[ClientInfo]:
        self._must_be_here()
        federation = str(folder.read_json("facts.json").get("federation"))
        models = {node.name: _federation_folder(node, federation) / "model" for node in self.settings}
        return [ClientInfo(node.name, node.encoder.encoder, models[node.name]) for node in self.settings]

    def nodes(self, folder: RunFolder) -> list[NodeConfig]:
        self._must_be_here()
        return [{"name": str(path), "settings": str(path.resolve())} for path in self.paths]

    def _must_be_here(self) -> None:
        if not self.paths:
            raise RunError(
                "the participants of this run and their models are on other machines. Run this command there. "
                "(Or their settings files are here, but were not used here: then list them in HETERO_SSFL_TRUST.)"
            )

    def participant(self, folder: RunFolder, number: int, request: Request) -> Participant:
        return answer_request(self.settings[number], request)


def check_message(node: NodeSettings, message: Message) -> None:
    """Raise ProtocolError for a message that this node refuses to parse."""
    check_size(message, node.limits.message_mb, "the server")
    check_text(node.limits, str(fields_of(message.content).get("config")))


def answer_request(node: NodeSettings, request: Request) -> Participant:
    """Return the participant if the config is within its limits. Only then is a RAD that was sent saved."""
    config, header, sent = request.config, request.header, request.rad_sent
    if header.round > config.rounds:
        raise ProtocolError(f"the message names round {header.round} of a run of {config.rounds} rounds.")
    if sent is not None:
        check_rad(node, header.rad, sent)
    rad = find_rad(node, header.rad) if sent is None else sent
    if rad is None and request.rad_shape:
        blank = blank_rad(node, *request.rad_shape)
        return replace(open_node(node, config, header.federation, blank), has_rad=False)
    if rad is None:
        raise RadMissingError(f"{node.name} does not have the RAD of this run. Continue the run first.")
    if len(rad) != config.rad.size:
        raise ProtocolError(f"the RAD has {len(rad)} images, but the config names rad.size = {config.rad.size}.")
    opened = open_node(node, config, header.federation, rad)
    if sent is not None:
        save_rad(node, header.rad, sent)
    return opened


def open_node(node: NodeSettings, asked: Config, federation: str, rad: Tensor) -> Participant:
    """Build the participant of a settings file, trained as the federation's config asks."""
    check_instruction(node, asked, len(rad))
    widths = {
        "projector": node.encoder.projector or asked.ssl.projector,
        "predictor": node.encoder.predictor or asked.ssl.predictor,
    }
    model = node.encoder.model_copy(update=widths)
    size = max(asked.rad.size, len(rad))  # before the RAD has arrived, `rad` is a single image
    effective = {"ssl": asked.ssl.model_copy(update=widths), "rad": asked.rad.model_copy(update={"size": size})}
    check_budget(node, asked.model_copy(update=effective), federation, rad.shape[1:])
    data = node.data.model_copy(update={"channels": rad.shape[1], "side": rad.shape[2]})
    config = asked.model_copy(
        update={
            "data": data,
            "clients": asked.clients.model_copy(update={"count": 1, "models": (model,)}),
            "partition": asked.partition.model_copy(update={"kind": "iid"}),
            "rad": asked.rad.model_copy(update={"source": "sent by the server", "size": len(rad)}),
            "engine": EngineConfig(
                device=node.device,
                precision=node.precision,
                threads=node.threads,
                memory_mb=min(EngineConfig().memory_mb, node.limits.memory_mb),
            ),
        }
    )
    place = _federation_folder(node, federation)
    # Another encoder starts with a new state.
    kind = "".join(c if c.isalnum() else "-" for c in model.encoder).strip("-")
    return Participant(
        name=node.name,
        config=config,
        model=model,
        seed_scope=("init", node.name),
        rad=rad,
        own=lambda: _images(config, "train"),
        states=StateFolder(place / kind),
        exports=place / "model",
        evaluates=node.limits.evaluation if node.limits.epsilon is None else (),
        balanced=True,
        labeled=lambda: _images(config, "train"),
        held_out=lambda split: _images(config, split),
        identity=open_identity(node.key, node.peers, node.limits.participants) if asked.privacy.secure else NOBODY,
        budget=None if node.limits.epsilon is None else (node.limits.epsilon, node.limits.delta),
    )


def _images(config: Config, split: str) -> Images:
    """Return the training images without the validation images, the validation images, or the test images, if any."""
    if split == "test":
        return load_images(config.data, "test")
    train = load_images(config.data, "train")
    rows = split_training_images(config, train)
    return train.subset(rows.validation if split == "validation" else rows.clients[0])


def _federation_folder(node: NodeSettings, federation: str) -> Path:
    if not FEDERATION.fullmatch(federation):
        raise ProtocolError(f"the federation is named {federation[:40]!r}, expected 32 hexadecimal digits.")
    return node.home / "federations" / federation
