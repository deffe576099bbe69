"""What all sites have in common: the protocol, and what a run's creation writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from flwr.app import Message
from torch import Tensor

from ...config import Config
from ...data import digest
from ...errors import ConfigError
from ...runs import RunFolder, SiteKind, save_tensors
from ..records import Header
from .participant import Participant

NodeConfig = dict[str, str | int | float]
"""What the engine tells a node about its place: enough for the node's process to open the site and find itself."""


RadShape = tuple[int, int] | None
"""Channels and side of the RAD's images: all that a node needs to know of it to introduce itself."""


@dataclass(frozen=True)
class Setup:
    """A run's data, split. It is made before anything is written: a run that cannot work leaves nothing behind."""

    rad: Tensor
    facts: Mapping[str, object]
    split: Mapping[str, Tensor] | None = None
    """Which training image belongs to whom, where this machine splits one data set."""

    def write(self, folder: RunFolder) -> None:
        if self.split is not None:
            save_tensors(folder.path / "split.safetensors", self.split)
        save_tensors(folder.path / "rad.safetensors", {"pixels": self.rad}, {"digest": digest(self.rad)})
        folder.write_json("facts.json", self.facts)


class Site(Protocol):
    """Who takes part in a run, and where their images and models are.

    Server and clients use the same class. The server creates the run and tells each node its place (`node_configs`);
    the process that answers for a node opens the site again from there and asks for the participant.
    """

    kind: ClassVar[SiteKind]
    may_be_away: ClassVar[bool]
    """Whether a run continues without a participant that does not answer: on other machines yes, on this one no."""

    only_this_process: ClassVar[bool]
    """Whether the participants are objects of this process, so that others must be forked from it."""

    def set_up(self, config: Config) -> Setup:
        """Try everything that a run needs. Raises ConfigError or DataError with a remedy; writes nothing."""

    def difference(self, folder: RunFolder) -> str | None:
        """What differs from the participants that a run began with; None if nothing does."""

    def names(self, config: Config) -> list[str]:
        """The participants' names, in the order of their numbers. Raises RunError if they are not known here."""

    def node_configs(self, config: Config) -> list[NodeConfig]:
        """What the engine tells each node. Raises RunError if the participants are on other machines."""

    def admit(self, number: int, message: Message) -> None:
        """Raise ProtocolError for a message that this participant does not read at all."""

    def keep_rad(self, number: int, pixels: Tensor, header: Header) -> None:
        """Keep a RAD that came with a message."""

    def encoder(self, number: int, config: Config) -> str:
        """How the participant's settings name its encoder."""

    def participant(self, number: int, config: Config, header: Header, rad_shape: RadShape = None) -> Participant:
        """The participant as `config` asks it to train. With a `rad_shape`, one that has no RAD yet may lack it."""

    def model_folders(self, folder: RunFolder) -> dict[str, Path]:
        """Where each participant keeps its finished model, as far as this machine knows."""


def check_device(name: str) -> None:
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"engine.device = '{name}' cannot be used: {reason}. Set engine.device = 'cpu'.") from None
