"""The settings file of a participant, `node.toml`:

name = "hospital-a"
encoder = "resnet18"            # its own architecture, independent of the others
device = "cuda:0"
home = "state"                  # RAD, networks after each round, finished models
[data]
source = "images"               # its own images; they never leave this machine
[limits]
weights_may_leave = false       # refuse methods that send weights
"""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from ...config import DataConfig, ModelConfig, Precision, Section, validate
from ...errors import ConfigError, ProtocolError
from ..wire import NAME
from .limits import LimitsConfig


class NodeSettings(Section):
    """The content of a participant's `node.toml`."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    encoder: ModelConfig
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

    def check_limit(self, name: str, value: int) -> None:
        """Raise ProtocolError if a number that the server asks for is above this node's limit."""
        limit = getattr(self.limits, name)
        if value > limit:
            remedy = f"Lower it, or raise limits.{name} in the node settings."
            raise ProtocolError(f"{self.name} was asked for {name} = {value}, its limit is {limit}. {remedy}")


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
    named = {"key": node.key, "peers": node.peers, "home": node.home}
    places = {name: (path.parent / place).resolve() for name, place in named.items() if place}
    return node.model_copy(update={**places, "data": data})
