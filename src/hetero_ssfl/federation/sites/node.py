"""A participant of a real federation: its node settings, data and state are files on its own disk.

    name = "hospital-a"
    encoder = "resnet18"            # its own architecture, independent of the others
    device = "cuda:0"
    home = "state"                  # RAD, networks after each round, finished models
    [data]
    source = "images"               # its own images; they never leave this machine
    [limits]
    weights_may_leave = false       # refuse methods that send weights

The server determines how to train (the config in each message). It cannot choose the images, the model or any files.
"""

import logging
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from flwr.app import Message
from pydantic import BeforeValidator, Field, PositiveInt
from torch import Tensor

from ...config import Config, DataConfig, ModelConfig, Precision, Section, as_model, validate
from ...data import Images, digest, load_images, load_rad_alone, split_training_images
from ...errors import ConfigError, ProtocolError, RunError
from ...methods import METHODS, method_class
from ...runs import RunFolder, SiteKind, StateFolder, load_tensors, save_tensors
from ..records import DIGEST, FEDERATION, NAME, Header, check_size
from .participant import Participant
from .site import NodeConfig, RadShape, Setup

log = logging.getLogger(__name__)

KEPT_RADS = 3


class LimitsConfig(Section):
    """What this node accepts from a server. Messages beyond these limits are refused."""

    weights_may_leave: bool = False
    """Whether to take part in methods that average weights."""
    message_mb: PositiveInt = 1024
    local_epochs: PositiveInt = 100
    rad_images: PositiveInt = 100_000
    code: tuple[str, ...] = ()
    """Views, kernels, losses and optimisers (`package.module:name`) and methods (`package.module:name`, or the name of
    an installed method) that a server may use in addition to the built-in ones. No other code is imported."""


class NodeSettings(Section):
    """The content of a participant's `node.toml`."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    encoder: Annotated[ModelConfig, BeforeValidator(as_model)]
    device: str = "cpu"
    precision: Precision = "float32"
    threads: PositiveInt = 1
    """Torch threads of its client processes. The number affects the last digits of the results."""
    home: Path = Path("state")
    data: DataConfig = DataConfig(validation=0)
    limits: LimitsConfig = LimitsConfig()


def read_node(path: Path) -> NodeSettings:
    """Read node settings. Paths in the file are relative to the file."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read node settings '{path}': {error}. Check the path and the file.") from None
    values.setdefault("data", {}).setdefault("validation", 0)
    node = validate(values, NodeSettings)
    source = path.parent / node.data.source
    data = node.data.model_copy(update={"source": str(source.resolve())}) if source.exists() else node.data
    return node.model_copy(update={"home": (path.parent / node.home).resolve(), "data": data})


def check_instruction(node: NodeSettings, config: Config, rad_rows: int) -> None:
    """Raise ProtocolError if the config exceeds this node's limits."""
    limits = node.limits
    named = (config.views.function or "", config.alignment.kernel, config.ssl.kind, config.optim.kind)
    own = [name for name in named if ":" in name]
    own += [] if config.method in METHODS else [config.method]
    foreign = [name for name in own if name not in limits.code]
    if foreign:
        raise ProtocolError(
            f"{node.name} was asked to import '{foreign[0]}', which is not listed in limits.code of its node settings. "
            "Add it there if you trust this code."
        )
    if method_class(config.method).averages_weights and not limits.weights_may_leave:
        raise ProtocolError(
            f"{node.name} does not send weights, but method '{config.method}' requires them. "
            "Use 'hetero-ssfl', or set limits.weights_may_leave = true in the node settings."
        )
    for what, value, limit in (
        ("local_epochs", config.local_epochs, limits.local_epochs),
        ("rad_images", rad_rows, limits.rad_images),
    ):
        if value > limit:
            raise ProtocolError(
                f"{node.name} was asked for {what} = {value}, its limit is {limit}. "
                f"Lower it, or raise limits.{what} in the node settings."
            )


class RadMissingError(Exception):
    """This participant does not have the RAD that the server names."""


class NodeSite:
    """Participants described by node settings files on this machine. A client process has one file.

    A server whose participants are all on other machines has none.
    """

    kind: ClassVar[SiteKind] = "nodes"
    may_be_away: ClassVar[bool] = True
    only_this_process: ClassVar[bool] = False
    runs_on_ray: ClassVar[bool] = False

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self.paths = tuple(paths)
        self._read: dict[Path, NodeSettings] = {}

    def settings(self, number: int) -> NodeSettings:
        """Return the node settings. They are read once per process: restart the process to change them."""
        path = self.paths[number]
        if path not in self._read:
            self._read[path] = read_node(path)
        return self._read[path]

    # --- before the run: on the server ---

    def set_up(self, config: Config) -> Setup:
        """Read every settings file, and the RAD, the only images that the server has."""
        for number in range(len(self.paths)):
            self.settings(number)
        if config.rad.source is None:
            raise ConfigError(
                "rad.source is not set, but the server of a federation has no images of its own. "
                "Set rad.source to the shared unlabeled data set."
            )
        rad = load_rad_alone(config)
        facts: dict[str, object] = {
            "skipped_images": 0,
            "nodes": [str(path.resolve()) for path in self.paths],
        }
        return Setup(rad, facts)

    def difference(self, folder: RunFolder) -> str | None:
        before = folder.read_json("facts.json").get("nodes", [])
        return None if before == [str(path.resolve()) for path in self.paths] else "node settings files"

    # --- who takes part ---

    def names(self, config: Config) -> list[str]:
        self._must_be_here()
        return [self.settings(k).name for k in range(len(self.paths))]

    def node_configs(self, config: Config) -> list[NodeConfig]:
        self._must_be_here()
        return [{"name": str(path), "settings": str(path.resolve())} for path in self.paths]

    def _must_be_here(self) -> None:
        if not self.paths:
            raise RunError("the participants of this run and their models are on other machines. Look there.")

    def admit(self, number: int, message: Message) -> None:
        check_size(message, self.settings(number).limits.message_mb, "the server")

    def keep_rad(self, number: int, pixels: Tensor, header: Header) -> None:
        keep_rad(self.settings(number), header.rad, pixels)

    def encoder(self, number: int, config: Config) -> str:
        return self.settings(number).encoder.encoder

    def participant(self, number: int, config: Config, header: Header, rad_shape: RadShape = None) -> Participant:
        node = self.settings(number)
        rad = find_rad(node, header.rad)
        if rad is None and rad_shape:
            return replace(open_node(node, config, header.federation, blank_rad(*rad_shape)), has_rad=False)
        if rad is None:
            raise RadMissingError(f"{node.name} does not have the RAD of this run. Continue the run first.")
        return open_node(node, config, header.federation, rad)

    def model_folders(self, folder: RunFolder) -> dict[str, Path]:
        federation = folder.read_json("facts.json")["federation"]
        nodes = [self.settings(k) for k in range(len(self.paths))]
        return {node.name: _federation_folder(node, federation) / "model" for node in nodes}


def open_node(node: NodeSettings, asked: Config, federation: str, rad: Tensor) -> Participant:
    """Build the participant of a settings file, trained as the federation's config asks."""
    check_instruction(node, asked, len(rad))
    model = node.encoder.model_copy(
        update={
            "projector": node.encoder.projector or asked.ssl.projector,
            "predictor": node.encoder.predictor or asked.ssl.predictor,
        }
    )
    data = node.data.model_copy(update={"channels": rad.shape[1], "side": rad.shape[2]})
    config = asked.model_copy(
        update={
            "data": data,
            "clients": asked.clients.model_copy(update={"count": 1, "models": (model,)}),
            "partition": asked.partition.model_copy(update={"kind": "iid"}),
            "rad": asked.rad.model_copy(update={"source": "sent by the server"}),
            "engine": asked.engine.model_copy(update={"device": node.device, "precision": node.precision}),
        }
    )
    place = _federation_folder(node, federation)
    kind = "".join(c if c.isalnum() else "-" for c in model.encoder).strip(
        "-"
    )  # another encoder starts with a new state
    return Participant(
        name=node.name,
        config=config,
        model=model,
        seed_scope=("init", node.name),
        rad=rad,
        own=lambda: _images(config, "train"),
        states=StateFolder(place / kind),
        exports=place / "model",
        labeled=lambda: _images(config, "train"),
        held_out=lambda split: _images(config, split),
    )


def _images(config: Config, split: str) -> Images:
    """Return the training images without the validation images, the validation images, or the test images, if any."""
    if split == "test":
        return load_images(config.data, "test")
    train = load_images(config.data, "train")
    rows = split_training_images(config, train)
    return train.subset(rows.validation if split == "validation" else rows.clients[0])


# --- the RAD: sent once, identified by its digest ---


def find_rad(node: NodeSettings, wanted: str) -> Tensor | None:
    """Return the RAD with this digest, or None if it is not on this disk or is damaged."""
    path = _rad_file(node, wanted)
    if not path.exists():
        return None
    pixels = load_tensors(path)[0]["pixels"]
    if digest(pixels) != wanted:
        log.warning("the RAD %s on disk does not match its digest; asking for it again", wanted[:12])
        path.unlink()
        return None
    return pixels


def keep_rad(node: NodeSettings, wanted: str, pixels: Tensor) -> Tensor:
    """Check a received RAD against its digest and this node's limits, and save it."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
        raise ProtocolError(
            f"the RAD sent to {node.name} is {pixels.dtype} of shape {tuple(pixels.shape)}, "
            "expected uint8 images (n, 1 or 3, side, side)."
        )
    if len(pixels) > node.limits.rad_images:
        raise ProtocolError(
            f"the RAD sent to {node.name} has {len(pixels)} images, its limit is {node.limits.rad_images}."
        )
    if digest(pixels) != wanted:
        raise ProtocolError(f"the RAD sent to {node.name} does not match its digest {wanted[:12]}. Send it again.")
    save_tensors(_rad_file(node, wanted), {"pixels": pixels})
    by_age = sorted((node.home / "rad").glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    for old in by_age[:-KEPT_RADS]:
        old.unlink(missing_ok=True)
    return pixels


def blank_rad(channels: int, side: int) -> Tensor:
    """Return one blank image, which stands for a RAD that has not arrived yet."""
    if channels not in (1, 3) or not 1 <= side <= 4096:
        raise ProtocolError(
            f"the server names a RAD with {channels} channels and side {side}, expected 1 or 3 and 1 to 4096."
        )
    return torch.zeros(1, channels, side, side, dtype=torch.uint8)


def _rad_file(node: NodeSettings, wanted: str) -> Path:
    """Nothing that a message or a run folder says may become a path before it is checked."""
    if not DIGEST.fullmatch(wanted):
        raise ProtocolError(f"the RAD is named {wanted[:40]!r}, expected a SHA-256 digest.")
    return node.home / "rad" / f"{wanted}.safetensors"


def _federation_folder(node: NodeSettings, federation: str) -> Path:
    if not FEDERATION.fullmatch(federation):
        raise ProtocolError(f"the federation is named {federation[:40]!r}, expected 32 hexadecimal digits.")
    return node.home / "federations" / federation
