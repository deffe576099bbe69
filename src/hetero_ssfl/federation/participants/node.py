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
from torch import Tensor

from ... import __version__
from ...config import Config, EngineConfig
from ...data import Images, count_images, load_images, load_rad_alone, remembered, split_training_images
from ...errors import ConfigError, ProtocolError, RunError
from ...learning.encoders import BUILTIN, parse_spec
from ...learning.forward_cost import Work, work_of
from ...methods import METHODS, method_class
from ...methods.costs import Workload
from ...runs.folder import SKIPPED, RunFolder, SiteKind
from ...runs.states import StateFolder
from ..wire import Header, check_hex
from .identity import Identity, open_identity
from .limits import MAX_FRACTIONS, check_costs, check_numbers
from .node_rad import blank_rad, check_rad, find_rad, save_rad
from .node_settings import NodeSettings, read_node
from .participant import Participant
from .record import RecordFile
from .site import ClientInfo, NodeConfig, Setup, list_skipped


def check_instruction(node: NodeSettings, config: Config, rad_rows: int) -> None:
    """Raise ProtocolError if the config names what this node does not allow, or numbers beyond its limits."""
    limits = node.limits
    check_numbers(node.name, config)
    own = {*config.own_code.values(), config.method} - METHODS.keys()  # a method may be named by an entry point
    foreign = sorted(own - set(limits.code))
    if foreign:  # before anything of it is imported
        what = f"{node.name} was asked to import '{foreign[0][:100]}', which is not listed in limits.code"
        raise ProtocolError(f"{what} of its node settings. Add it there if you trust this code.")
    averages, privacy = method_class(config.method).averages_weights, config.privacy
    for refused, rule, limit, remedy in (
        (averages and not limits.weights_may_leave, "does not send weights", "weights_may_leave = false", "method"),
        (limits.epsilon and not privacy.epsilon, "takes part only with noise", "epsilon", "privacy.epsilon"),
        (limits.secure_only and not privacy.secure, "takes part in secure sums only", "secure_only", "privacy.secure"),
    ):
        if refused:
            raise ProtocolError(f"{node.name} {rule} (limits.{limit} in its node settings). Change {remedy} or that.")
    if privacy.secure:
        check_sums(node, config)
    node.check_limit("rounds", config.rounds)
    node.check_limit("local_epochs", config.local_epochs or 0)  # see also _training_images
    node.check_limit("rad_images", max(rad_rows, config.rad.size))
    shares = len(config.evaluation.label_shares)
    if shares > MAX_FRACTIONS:
        raise ProtocolError(f"{node.name} got {shares} evaluation.label_shares, expected at most {MAX_FRACTIONS}.")


def check_sums(node: NodeSettings, config: Config) -> None:
    """Raise ProtocolError if the secure sums of this config protect too little. The server may lie about the number of
    participants: their keys are counted in the list that this node gets."""
    clients = config.clients
    expected = clients.selected_per_round(clients.count + clients.newcomers) // config.privacy.groups
    settings = ("participants", expected, "clients.count"), ("threshold", config.privacy.threshold, "privacy.threshold")
    for name, value, setting in settings:
        if value < (limit := getattr(node.limits, name)):
            remedy = f"Raise {setting}, or lower limits.{name} in the node settings."
            raise ProtocolError(
                f"{node.name} was asked for secure sums with {name} = {value:g}, its limit is {limit:g}. {remedy}"
            )


def _size_outside(folder: Path, node: NodeSettings) -> int:
    """Return the bytes of all files in a node's home that are not in `folder`, in one walk."""
    total = 0
    for place, folders, files in os.walk(node.home):
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
    """Participants described by node settings files on this machine: none if all are on other machines."""

    kind: SiteKind = "nodes"

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self.paths = tuple(paths)
        self.places = [str(path.resolve()) for path in self.paths]

    @cached_property
    def settings(self) -> list[NodeSettings]:
        """The settings of all nodes. They are read once per process: restart the process to change them."""
        return [read_node(path) for path in self.paths]

    def set_up(self, config: Config) -> Setup:
        """Read every settings file, and the RAD, the only images that the server has."""
        _ = self.settings
        if config.rad.source is None:
            raise ConfigError("rad.source is not set. Set it to the shared unlabeled data set.")
        return Setup(load_rad_alone(config), {"skipped_images": 0, "nodes": self.places})

    def difference(self, folder: RunFolder) -> str | None:
        return None if folder.read_facts().nodes == self.places else "node settings files"

    def clients(self, folder: RunFolder) -> list[ClientInfo]:
        self._must_be_here()
        federation = folder.read_facts().federation
        models = {node.name: _federation_folder(node, federation) / "model" for node in self.settings}
        return [ClientInfo(node.name, node.encoder.encoder, models[node.name]) for node in self.settings]

    def nodes(self, folder: RunFolder) -> list[NodeConfig]:
        self._must_be_here()
        return [{"name": str(path), "settings": place} for path, place in zip(self.paths, self.places, strict=True)]

    def _must_be_here(self) -> None:
        if not self.paths:
            trusted = "or list their settings files in HETERO_SSFL_TRUST if they are here"
            raise RunError(f"the participants of this run are on other machines. Run this command there, {trusted}.")

    def participant(self, folder: RunFolder, number: int, config: Config) -> Participant:
        facts = folder.read_facts()
        return answer_request(self.settings[number], config, Header(facts.federation, 0, facts.rad_digest))


def answer_request(
    node: NodeSettings,
    config: Config,
    header: Header,
    rad_shape: tuple[object, object] | None = None,
    sent: Tensor | None = None,
) -> Participant:
    """Return the participant if the config is within its limits. Only then is a RAD that was `sent` saved.

    `rad_shape` is channels and side of the RAD, if a node may introduce itself before it has the RAD.
    """
    if header.round > config.rounds:
        raise ProtocolError(f"the message names round {header.round} of a run of {config.rounds} rounds.")
    if sent is not None:
        check_rad(node, header.rad, sent)
    rad = find_rad(node, header.rad) if sent is None else sent
    if rad is None and rad_shape:
        blank = blank_rad(node, *rad_shape)
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
    record = RecordFile(node.home / f"privacy-{node.name}.json", federation, node.limits.federations)
    if asked.privacy.secure or asked.privacy.epsilon:
        record.check(record.read())
    widths = {
        "projector": node.encoder.projector or asked.ssl.projector,
        "predictor": node.encoder.predictor or asked.ssl.predictor,
    }
    model = node.encoder.model_copy(update=widths)
    size = max(asked.rad.size, len(rad))  # before the RAD has arrived, `rad` is a single image
    effective = {"ssl": asked.ssl.model_copy(update=widths), "rad": asked.rad.model_copy(update={"size": size})}
    place, channels, side = _federation_folder(node, federation), rad.shape[1], rad.shape[-1]
    encoder, other = _work_of(model.encoder, channels, side), _size_outside(place, node)
    work = Workload(encoder, count_images(node.data), channels, side, other, accelerated=node.device != "cpu")
    check_costs(node.name, node.limits, asked.model_copy(update=effective), work)
    data = node.data.model_copy(update={"channels": channels, "side": side})
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
    # Another encoder starts with a new state.
    kind = "".join(c if c.isalnum() else "-" for c in model.encoder).strip("-")
    return Participant(
        name=node.name,
        config=config,
        model=model,
        seed_scope=("init", node.name),
        rad=rad,
        own=lambda: _training_images(node, asked, config, place),
        states=StateFolder(place / kind),
        node_record=record,
        exports=place / "model",
        evaluates=node.limits.evaluation if node.limits.epsilon is None else (),
        balanced=True,
        labeled=lambda: _images(config, "train"),
        held_out=lambda split: _images(config, split),
        identity=open_identity(node.key, node.peers, node.limits.participants) if asked.privacy.secure else Identity(),
        budget=None if node.limits.epsilon is None else (node.limits.epsilon, node.limits.delta),
    )


def _training_images(node: NodeSettings, asked: Config, config: Config, place: Path) -> Images:
    """Return the images that a node trains on, unless the epochs that the server asks for with them are too many."""
    images = _images(config, "train")
    list_skipped(place / SKIPPED, images.skipped)
    node.check_limit("local_epochs", asked.epochs_of(len(images) + (asked.rad.size if asked.rad.in_ssl else 0)))
    return images


def _images(config: Config, split: str) -> Images:
    """Return the training images without the validation images, the validation images, or the test images, if any."""
    if split == "test":
        return load_images(config.data, "test")
    train = load_images(config.data, "train")
    rows = split_training_images(config, train)
    return train.subset(rows.validation if split == "validation" else rows.clients[0])


def _federation_folder(node: NodeSettings, federation: str) -> Path:
    return node.home / "federations" / check_hex("federation", federation, 32)
