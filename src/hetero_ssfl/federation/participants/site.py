"""The protocol of all sites, what they check, and the files that creating a run writes."""

import csv
import io
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...config import Config, ModelConfig
from ...data import Skipped, Snapshot, digest, random_view
from ...errors import ConfigError, HeteroSSFLError
from ...kernels.cka import gram
from ...learning.encoders import output_width
from ...learning.learner import build_learner
from ...methods import method_class
from ...plugins import place
from ...runs.files import save_tensors, write_atomically
from ...runs.folder import SKIPPED, SOURCES, RunFolder, SiteKind
from .participant import Participant, blank

log = logging.getLogger(__name__)

NodeConfig = dict[str, str | int | float]
"""The engine's config of one node: enough for the node's process to open the site and find its participant."""


class ClientInfo(NamedTuple):
    """What is known of a participant without reading its data."""

    name: str
    encoder: str  # the spec of its encoder
    model: Path  # the folder of its finished model


@dataclass(frozen=True)
class Setup:
    """A run's data, split. It is built before anything is written, so that a run that cannot work leaves no files."""

    rad: Tensor
    facts: Mapping[str, object]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # kept with the run, by file names
    skipped: Sequence[Skipped] = ()  # images that could not be read
    files: Snapshot | None = None  # the files of the data, if this machine splits one data set of files

    def write(self, folder: RunFolder, kind: SiteKind) -> None:
        """Write them with the facts that every run has: its kind of site, its name, and the digest of its RAD."""
        if self.files is not None:
            folder.write_json(SOURCES, {"data": self.files})
        for name, tensors in self.tensors.items():
            save_tensors(folder.path / f"{name}.safetensors", tensors)
        common = {"site": kind, "federation": uuid.uuid4().hex, "rad_digest": digest(self.rad)}
        save_tensors(folder.path / "rad.safetensors", {"pixels": self.rad}, {"digest": common["rad_digest"]})
        list_skipped(folder.path / SKIPPED, self.skipped)
        folder.write_json("facts.json", {**common, **self.facts})


def list_skipped(file: Path, skipped: Sequence[Skipped]) -> None:
    """Write which images could not be read, and why, to a table. Print the first five, once."""
    if not skipped or file.exists():
        return
    text = io.StringIO()
    csv.writer(text).writerows([Skipped._fields, *skipped])
    write_atomically(file, text.getvalue().encode())
    first = "; ".join(f"{image.image} {image.reason}" for image in skipped[:5])
    log.warning("%d images are skipped, all listed in %s: %s", len(skipped), file, first + "; ..." * (len(skipped) > 5))


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

    def participant(self, folder: RunFolder, number: int, config: Config) -> Participant:
        """Return one participant, trained as the config asks."""


def check_parts(
    config: Config, rad: Tensor, models: Mapping[str, ModelConfig], labels: Mapping[str, Tensor | None]
) -> None:
    """Try the device, the views, the kernel and each model once. They may be the user's own."""
    try:
        torch.zeros((), device=config.engine.device)
    except (RuntimeError, AssertionError) as error:
        what, reason = f"engine.device = '{config.engine.device}'", str(error).splitlines()[0]
        raise ConfigError(f"{what} cannot be used: {reason}. Set engine.device = 'cpu'.") from None
    unlabeled = [name for name, own in labels.items() if own is None]
    if method_class(config.method).needs_labels and unlabeled:
        raise ConfigError(f"method '{config.method}' needs labels, but {unlabeled[0]} has none. Choose another method.")
    view, example = _try_own_functions(config, rad), blank(rad.shape[1:], rad.dtype)
    first: dict[ModelConfig, str] = {}
    for name, model in models.items():
        first.setdefault(model, name)
    for model, name in first.items():
        try:
            learner = build_learner(model, config.ssl, rad.shape[1], rad.shape[-1], config.seed, example=example)
            output_width(learner.encoder, model.encoder, view)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


def _try_own_functions(config: Config, rad: Tensor) -> Tensor:
    """Call the views and the kernel once. Return two views of RAD samples."""
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


def facts_of(classes: tuple[str, ...], skipped: int, labels: Mapping[str, Tensor | None]) -> dict[str, object]:
    """Return the classes, the number of skipped images, and the images of each class that labeled clients have."""
    counted = {name: torch.bincount(own, minlength=len(classes)) for name, own in labels.items() if own is not None}
    holdings = {"holdings": {name: counts.tolist() for name, counts in counted.items()}} if counted else {}
    return {"classes": classes, "skipped_images": skipped, **holdings}
