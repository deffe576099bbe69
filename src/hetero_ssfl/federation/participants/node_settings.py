"""The settings file of a participant, `node.toml`:

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

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveInt

from ...config import DataConfig, ModelConfig, Precision, Section, as_model, validate
from ...errors import ConfigError
from ..wire import NAME
from .limits import LimitsConfig


class NodeSettings(Section):
    """The content of a participant's `node.toml`."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    encoder: Annotated[ModelConfig, BeforeValidator(as_model)]
    device: str = "cpu"
    precision: Precision = "float32"
    threads: PositiveInt = 1
    """Torch threads of its client processes. The number affects the last digits of the results."""
    home: Path = Path("state")
    key: Path | None = None
    """The key of this SuperNode. With it the node signs its keys of a secure sum."""
    peers: Path | None = None
    """A folder with the public key NAME.pub of every participant. With it the node takes part only in secure sums of
    participants that signed with these keys."""
    data: DataConfig = DataConfig(validation=0)
    limits: LimitsConfig = LimitsConfig()


def read_node(path: Path) -> NodeSettings:
    """Read node settings. Paths in the file are relative to the file."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read node settings '{path}': {reason}. Check the path and the file.") from None
    values.setdefault("data", {}).setdefault("validation", 0)
    node = validate(values, NodeSettings)
    source = path.parent / node.data.source
    data = node.data.model_copy(update={"source": str(source.resolve())}) if source.exists() else node.data
    places = {
        name: place and (path.parent / place).resolve() for name, place in (("key", node.key), ("peers", node.peers))
    }
    return node.model_copy(update={**places, "home": (path.parent / node.home).resolve(), "data": data})
