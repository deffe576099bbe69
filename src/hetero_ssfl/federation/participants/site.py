"""The protocol of all sites, and the files that creating a run writes."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...config import Config
from ...data import Snapshot, digest, random_view
from ...errors import ConfigError, HeteroSSFLError, ProtocolError
from ...kernels.cka import gram
from ...plugins import place
from ...runs.files import save_tensors
from ...runs.folder import SOURCES, RunFolder, SiteKind
from ..wire import Header
from .participant import Participant

NodeConfig = dict[str, str | int | float]
"""The engine's config of one node: enough for the node's process to open the site and find its participant."""


class ClientInfo(NamedTuple):
    """What is known of a participant without reading its data."""

    name: str
    encoder: str
    """The spec of its encoder."""
    model: Path
    """The folder of its finished model."""


@dataclass(frozen=True)
class Request:
    """What a participant is opened for."""

    config: Config
    header: Header
    rad_shape: tuple[int, int] | None = None
    """Channels and side of the RAD's images, if a node may introduce itself before it has the RAD."""
    rad_sent: Tensor | None = None
    """A RAD that came with the message. A node saves it if it does not have it already."""


@dataclass(frozen=True)
class Setup:
    """A run's data, split. It is built before anything is written, so that a run that cannot work leaves no files."""

    rad: Tensor
    facts: Mapping[str, object]
    split: Mapping[str, Tensor] | None = None
    """The rows of each client, of the validation set and of the RAD, if this machine splits one data set."""
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Other tensors to keep with the run, by the names of their files."""
    files: Snapshot | None = None
    """The files of the data, if this machine splits one data set of files."""

    def write(self, folder: RunFolder, kind: SiteKind) -> None:
        """Write them with the facts that every run has: its kind of site, its name, and the digest of its RAD."""
        if self.split is not None:
            save_tensors(folder.path / "split.safetensors", self.split)
        if self.files is not None:
            folder.write_json(SOURCES, {"data": self.files})
        for name, tensors in self.tensors.items():
            save_tensors(folder.path / f"{name}.safetensors", tensors)
        common = {"site": kind, "federation": uuid.uuid4().hex, "rad_digest": digest(self.rad)}
        save_tensors(folder.path / "rad.safetensors", {"pixels": self.rad}, {"digest": common["rad_digest"]})
        folder.write_json("facts.json", {**common, **self.facts})


class Site(Protocol):
    """Who takes part in a run, and where their images and models are."""

    kind: SiteKind

    def set_up(self, config: Config) -> Setup:
        """Prepare and check the run's data and models. Raise ConfigError or DataError; write nothing."""

    def difference(self, folder: RunFolder) -> str | None:
        """Return what differs from the participants that the run started with; None if nothing does."""

    def clients(self, folder: RunFolder) -> list[ClientInfo]:
        """Return the participants by number. Raise RunError if they are not known on this machine."""

    def nodes(self, folder: RunFolder) -> list[NodeConfig]:
        """Return the engine's config of each node. Raise RunError if the participants cannot train here."""

    def participant(self, folder: RunFolder, number: int, request: Request) -> Participant:
        """Return one participant, trained as the request's config asks."""


def load_rad_of(folder: RunFolder) -> Tensor:
    """Return the RAD that a run folder keeps."""
    pixels, wanted = folder.rad()
    if digest(pixels) != wanted:
        raise ProtocolError(f"the RAD in '{folder.path}' does not match its digest {wanted[:12]}. Start the run again.")
    return pixels


def try_own_functions(config: Config, rad: Tensor) -> Tensor:
    """Call the views and the kernel once, which may be the user's own. Return two views of RAD samples."""
    trying = f"alignment.kernel = '{config.alignment.kernel}'"
    try:
        gram(torch.eye(4, 3), config.alignment)
        trying = f"views.function = '{config.views.function}'"
        return random_view(rad[:2], config.views, torch.Generator().manual_seed(0))
    except HeteroSSFLError:
        raise
    except Exception as error:  # of the user's own function
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{trying} failed: {type(error).__name__}: {reason}{place(error)}. Fix it.") from error


def holdings(rows: Mapping[str, Tensor | None], classes: int) -> dict[str, list[int]]:
    """Return the number of images of each class that each client with labels has."""
    counted = {name: labels for name, labels in rows.items() if labels is not None}
    return {name: torch.bincount(labels, minlength=classes).tolist() for name, labels in counted.items()}


def check_device(name: str) -> None:
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"engine.device = '{name}' cannot be used: {reason}. Set engine.device = 'cpu'.") from None
