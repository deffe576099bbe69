"""Participants passed from Python: their data and encoders are objects in the user's process (api/).

Objects are never pickled. The worker processes of such a run are forked from the user's process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import torch
from flwr.app import Message
from torch import Tensor

from ...config import Config, ModelConfig
from ...data import Images, digest, joined, random_view
from ...errors import ConfigError, DataError, RunError
from ...methods import method_class
from ...models import build_learner, output_width
from ...objectives import gram
from ...runs import RunFolder, SiteKind
from ..records import Header
from .participant import Participant, blank
from .site import NodeConfig, RadShape, Setup, check_device


@dataclass(frozen=True)
class PreparedClient:
    """A user's `Client` with its data read and split."""

    name: str
    model: ModelConfig
    train: Images
    validation: Images
    test: Images

    def fingerprint(self) -> dict[str, object]:
        """Return the facts that must be unchanged for a run to continue."""
        sha = sha256()
        for images in (self.train, self.validation, self.test):
            labels = [] if images.labels is None else images.labels.tolist()
            sha.update(f"{digest(images.pixels)} {images.pixels.dtype} {labels} {images.classes}".encode())
        return {"data": sha.hexdigest(), "encoder": self.model.encoder, "examples": len(self.train)}


class PythonSite:
    kind: ClassVar[SiteKind] = "python"
    may_be_away: ClassVar[bool] = False
    only_this_process: ClassVar[bool] = True
    runs_on_ray: ClassVar[bool] = False

    def __init__(self, folder: RunFolder, clients: Sequence[PreparedClient], rad: Tensor) -> None:
        self.folder, self.clients, self.rad = folder, tuple(clients), rad

    # --- before the run ---

    def set_up(self, config: Config) -> Setup:
        """Check the user's data, encoders, views and kernel by trying each of them once."""
        check_device(config.engine.device)
        _check_shapes(config, self)
        if method_class(config.method).needs_labels and any(c.train.labels is None for c in self.clients):
            raise ConfigError(
                f"method '{config.method}' needs labels, but not every client has them. Choose another method."
            )
        example = blank(self.rad.shape[1:], self.rad.dtype)
        view = random_view(self.rad[:2], config.views, torch.Generator().manual_seed(0))
        for client in self.clients:
            learner = build_learner(client.model, config.ssl, example.shape[1], example.shape[-1], 0, example=example)
            output_width(learner.encoder, client.model.encoder, view)
        gram(torch.eye(4, 3), config.alignment)
        facts: dict[str, object] = {
            "classes": self.clients[0].train.classes,
            "skipped_images": sum(c.train.skipped + c.test.skipped for c in self.clients),
            "given": self.fingerprints(),
        }
        holdings = {
            c.name: torch.bincount(c.train.labels, minlength=len(c.train.classes)).tolist()
            for c in self.clients
            if c.train.labels is not None
        }
        if holdings:
            facts["holdings"] = holdings
        return Setup(self.rad, facts)

    def fingerprints(self) -> dict[str, dict[str, object]]:
        return {c.name: c.fingerprint() for c in self.clients}

    def difference(self, folder: RunFolder) -> str | None:
        facts = folder.read_json("facts.json")
        before, now = facts.get("given", {}), self.fingerprints()
        if list(before) != list(now):
            return "clients"
        changed = next((name for name in now if before[name] != now[name]), None)
        if changed:
            return f"data or encoder of {changed}"
        return "RAD data" if facts["rad_digest"] != digest(self.rad) else None

    # --- who takes part ---

    def names(self, config: Config) -> list[str]:
        return [c.name for c in self.clients]

    def node_configs(self, config: Config) -> list[NodeConfig]:
        return [{"name": name, "number": k} for k, name in enumerate(self.names(config))]

    def admit(self, number: int, message: Message) -> None:
        pass

    def encoder(self, number: int, config: Config) -> str:
        return config.model_of(number).encoder

    def participant(
        self, number: int, config: Config, header: Header, rad_shape: RadShape = None, rad_sent: Tensor | None = None
    ) -> Participant:
        client = self.clients[number]
        return Participant(
            name=client.name,
            config=config,
            model=client.model,
            seed_scope=("init", number),
            rad=self.rad,
            own=lambda: client.train,
            states=self.folder.states(client.name),
            exports=self.folder.path / "models" / client.name,
            labeled=lambda: self.pool,
            held_out=self.held_out,
        )

    def model_folders(self, folder: RunFolder) -> dict[str, Path]:
        return {name: folder.path / "models" / name for name in self.names(folder.config)}

    # --- the data they hold together ---

    @cached_property
    def pool(self) -> Images:
        """The labeled training data of all clients, which probes are trained on."""
        return joined([c.train for c in self.clients])

    def held_out(self, split: str) -> Images:
        return joined([c.test if split == "test" else c.validation for c in self.clients])


class ReopenedPythonSite(PythonSite):
    """A run's participants in a process without their objects: only names and finished models are available."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def difference(self, folder: RunFolder) -> str | None:
        return None  # nothing is here to compare

    def names(self, config: Config) -> list[str]:
        return list(self.folder.read_json("facts.json")["given"])

    def node_configs(self, config: Config) -> list[NodeConfig]:
        raise self.missing()

    def participant(
        self, number: int, config: Config, header: Header, rad_shape: RadShape = None, rad_sent: Tensor | None = None
    ) -> Participant:
        raise self.missing()

    def missing(self) -> RunError:
        return RunError(
            f"the clients of '{self.folder.path}' are Python objects that do not exist in this process. "
            "Call federate(...) again with the same arguments."
        )


def _check_shapes(config: Config, site: PythonSite) -> None:
    wanted, dtype = tuple(site.rad.shape[1:]), site.rad.dtype
    parts = [(c.name, c.train.pixels) for c in site.clients]
    parts += [(f"the test data of {c.name}", c.test.pixels) for c in site.clients if len(c.test)]
    for who, data in parts:
        if tuple(data.shape[1:]) != wanted or data.dtype != dtype:
            remedy = "Every client must be able to read the RAD: convert all data to one shape and type"
            if dtype == data.dtype == torch.uint8:
                alike = {"data.side": max(wanted[1:]), "data.channels": wanted[0]}
                remedy = f"Pass settings={alike} to convert all images to one shape"
            raise DataError(
                f"{who} has samples of type {data.dtype} and shape {tuple(data.shape[1:])}, "
                f"but those of the RAD have {dtype} and {wanted}. {remedy}."
            )
    if config.views.function is None and (dtype != torch.uint8 or wanted[1] != wanted[2]):
        what = "not square" if dtype == torch.uint8 else f"{dtype}, not uint8 images"
        raise ConfigError(
            f"the data, of shape {wanted}, are {what}, but the built-in views support only square images. "
            "Pass your own with views=, a function (batch, generator) -> batch; or set data.side for images."
        )
