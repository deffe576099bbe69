"""A participant of a real federation: its settings are a file on its own disk, and so is all it has.

    name = "hospital-a"
    encoder = "resnet18"            # its own architecture, whatever the others use
    device = "cuda:0"
    home = "state"                  # RAD, networks after each round, finished models
    [data]
    source = "images"               # its own images; they never leave
    [limits]
    weights_may_leave = false       # refuse methods that send weights

The server says how to train (the config in each message). It cannot say which images, which model or which files.
"""

import logging
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field, PositiveInt
from torch import Tensor

from ..config import Config, DataConfig, ModelConfig, Precision, Section, as_model, parse_config, validate
from ..data import Images, digest, load_images, split_training_images
from ..errors import ConfigError, ProtocolError
from ..methods import METHODS, method_class
from ..plugins import remember
from ..runs import StateFolder, load_tensors, save_tensors
from .participant import Participant
from .records import NAME

log = logging.getLogger(__name__)

KEPT_RADS = 3


class LimitsConfig(Section):
    """What this node does for no server."""

    weights_may_leave: bool = False
    """Take part in methods that average weights."""
    message_mb: PositiveInt = 1024
    local_epochs: PositiveInt = 100
    rad_images: PositiveInt = 100_000
    code: tuple[str, ...] = ()
    """Views, kernels, losses and optimisers (`package.module:name`) and methods (so, or as installed) that a server may
    name beside the built-in ones; no others are imported."""


class NodeSettings(Section):
    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    encoder: Annotated[ModelConfig, BeforeValidator(as_model)]
    device: str = "cpu"
    precision: Precision = "float32"
    home: Path = Path("state")
    data: DataConfig = DataConfig(validation=0)
    limits: LimitsConfig = LimitsConfig()


@lru_cache(maxsize=16)
def read_node(path: Path) -> NodeSettings:
    """Relative paths are relative to the file."""
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
    """Raise ProtocolError for what this node does for no server."""
    limits = node.limits
    named = (config.views.function or "", config.alignment.kernel, config.ssl.kind, config.optim.kind)
    own = [name for name in named if ":" in name]
    own += [] if config.method in METHODS else [config.method]
    foreign = [name for name in own if name not in limits.code]
    if foreign:
        raise ProtocolError(
            f"{node.name} was asked to import '{foreign[0]}', which is not among limits.code of its settings. "
            "Add it there if that code is known and trusted."
        )
    if method_class(config.method).averages_weights and not limits.weights_may_leave:
        raise ProtocolError(
            f"{node.name} does not send weights, which method '{config.method}' asks for. "
            "Use 'hetero-ssfl', or set limits.weights_may_leave = true in the node's settings."
        )
    for what, value, limit in (
        ("local_epochs", config.local_epochs, limits.local_epochs),
        ("rad_images", rad_rows, limits.rad_images),
    ):
        if value > limit:
            raise ProtocolError(
                f"{node.name} was asked for {what} = {value}, its limit is {limit}. "
                f"Lower it, or raise limits.{what} in the node's settings."
            )


def open_node(path: Path, config_toml: str, federation: str, rad: Tensor) -> Participant:
    """The participant behind a settings file, as a federation's config wants it to train."""
    node = read_node(path)
    asked = parse_config(config_toml)
    check_instruction(node, asked, len(rad))
    remember([node.encoder.encoder])
    model = node.encoder
    model = model.model_copy(
        update={
            "projector": model.projector or asked.ssl.projector,
            "predictor": model.predictor or asked.ssl.predictor,
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
    place = node.home / "federations" / federation
    kind = "".join(c if c.isalnum() else "-" for c in model.encoder).strip("-")  # another encoder begins anew
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
    """Training images without those kept for validation; those; or the test images, where the source has any."""
    if split == "test":
        return load_images(config.data, "test")
    train = load_images(config.data, "train")
    rows = split_training_images(config, train)
    return train.subset(rows.validation if split == "validation" else rows.clients[0])


# --- the RAD: sent once, known by its digest ---


def find_rad(node: NodeSettings, wanted: str) -> Tensor | None:
    """The RAD of this digest, if it is on this disk and whole."""
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
    """Check what the server sent against the digest it names, and keep it."""
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


def _rad_file(node: NodeSettings, wanted: str) -> Path:
    return node.home / "rad" / f"{wanted}.safetensors"
