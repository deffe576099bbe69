"""The data of participants passed from Python, which are objects in the user's process (api/).

Objects are never pickled. The worker processes of such a run are forked from the user's process.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Config
from ...data import Images, are_dark, digest, float_images_remedy, is_pixels, joined, largest_value
from ...errors import ConfigError, DataError, RunError
from ...learning.encoders import output_width
from ...learning.learner import build_learner
from ...methods import method_class
from ...plugins import GIVEN, find, is_at_hand, is_missing
from ...runs.files import load_tensors
from ...runs.folder import RunFolder, resume_command
from .participant import blank
from .reading import ClientData, PreparedClient, read_clients
from .site import Setup, check_device, holdings, load_rad_of, try_own_functions

log = logging.getLogger(__name__)


START = "start"
"""Folder of the weights from which encoders that were passed as module instances start."""


class PassedData:
    """The data and encoders of all clients."""

    classes = None  # they are read from the data

    def __init__(self, clients: Sequence[PreparedClient], rad: Tensor, sources: Mapping[str, Any]) -> None:
        self._clients, self._rad, self._sources = tuple(clients), rad, sources

    @property
    def clients(self) -> tuple[PreparedClient, ...]:
        return self._clients

    @property
    def rad(self) -> Tensor:
        return self._rad

    @cached_property
    def names(self) -> list[str]:
        return [c.name for c in self.clients]

    def own(self, name: str) -> Images:
        return self.clients[self.names.index(name)].train

    @cached_property
    def pool(self) -> Images:
        """The labeled training data of all clients, which probes are trained on."""
        return joined([c.train for c in self.clients])

    def held_out(self, split: str) -> Images:
        return joined([c.test if split == "test" else c.validation for c in self.clients])

    # --- before the run ---

    def set_up(self, config: Config) -> Setup:
        """Check the user's data, encoders, views and kernel by trying each of them once."""
        check_device(config.engine.device)
        _check_shapes(config, self)
        _warn_of_dark_images(self)
        if method_class(config.method).needs_labels and any(c.train.labels is None for c in self.clients):
            raise ConfigError(
                f"method '{config.method}' needs labels, but not every client has them. Choose another method."
            )
        example = blank(self.rad.shape[1:], self.rad.dtype)
        view = try_own_functions(config, self.rad)
        for client in self.clients:
            try:
                shape = example.shape[1], example.shape[-1]
                learner = build_learner(client.model, config.ssl, *shape, 0, example=example)
                output_width(learner.encoder, client.model.encoder, view)
            except ConfigError as error:
                raise ConfigError(f"{client.name}: {error}") from error
        classes = self.clients[0].train.classes
        facts: dict[str, object] = {
            "classes": classes,
            "skipped_images": sum(c.train.skipped + c.test.skipped for c in self.clients),
            "given": self.fingerprints,
            "sources": self._sources,
        }
        if any(c.train.labels is not None for c in self.clients):
            facts["holdings"] = holdings({c.name: c.train.labels for c in self.clients}, len(classes))
        starts = {f"{START}/{name}": module.state_dict() for name, module in self._instances(config).items()}
        return Setup(self.rad, facts, tensors=starts)

    def _instances(self, config: Config) -> dict[str, nn.Module]:
        """Return the encoders that were passed as module instances and exist in this process, by client."""
        specs = {name: config.model_of(k).encoder for k, name in enumerate(self.names)}
        objects = {name: find(spec, "encoder") for name, spec in specs.items() if is_at_hand(spec)}
        return {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}

    def load_starting_weights(self, folder: RunFolder) -> None:
        """Give instances the weights that the run started with: a script that is run again has other random ones."""
        changed = []
        for name, module in self._instances(folder.read_config()).items():
            saved = load_tensors(folder.path / START / f"{name}.safetensors")[0]
            if any(not torch.equal(value.cpu(), saved[key]) for key, value in module.state_dict().items()):
                changed.append(name)
            module.load_state_dict(saved)
        if changed:
            log.warning(
                "%s: the run in '%s' started from other weights than these encoders have now, and keeps its own. "
                "To start from these, choose another run_dir.",
                ", ".join(changed),
                folder.path,
            )

    @cached_property
    def fingerprints(self) -> dict[str, dict[str, object]]:
        return {c.name: fingerprint(c) for c in self.clients}

    def difference(self, folder: RunFolder) -> str | None:
        facts = folder.read_json("facts.json")
        before, now = facts.get("given", {}), self.fingerprints
        if list(before) != list(now):
            return f"clients ({', '.join(before)} there and {', '.join(now)} here)"
        for name in now:
            change = _change(name, before[name], now[name])
            if change:
                return change
        return "RAD data" if facts.get("rad_digest") != digest(self.rad) else None

    def check_objects(self) -> None:
        """Raise RunError if objects without which the clients cannot train do not exist in this process."""


class ReopenedData(PassedData):
    """The clients of an earlier run, in any process.

    Data and encoders that have a name are read again when they are needed. Objects exist only in the program that
    passed them.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @cached_property
    def clients(self) -> tuple[PreparedClient, ...]:
        sources = self._facts.get("sources", {"clients": dict.fromkeys(self._facts["given"])})
        objects = [f"the data of {name}" for name, source in sources["clients"].items() if source is None]
        if objects:
            raise self._missing(objects)
        config, taken = self.folder.read_config(), sources["rad_taken"]
        models = [config.model_of(k) for k in range(len(sources["clients"]))]
        again = [ClientData(name, own["data"], None, own["test"]) for name, own in sources["clients"].items()]
        prepared, _ = read_clients(again, models, self.rad if taken is None else taken, config)
        for client in prepared:
            change = _change(client.name, self._facts["given"][client.name], fingerprint(client), "then", "now")
            if change:
                raise DataError(
                    f"the {change} have changed since the run in '{self.folder.path}' began. "
                    "Restore them, or start a new run; evaluate(data) tests on other data."
                )
        return tuple(prepared)

    @cached_property
    def rad(self) -> Tensor:
        return load_rad_of(self.folder)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return self.folder.read_json("facts.json")

    @cached_property
    def names(self) -> list[str]:
        return list(self._facts.get("given", {}))

    def check_objects(self) -> None:
        config = self.folder.read_config()
        named = {"method": config.method, "views": config.views.function or "", "loss": config.ssl.kind}
        named |= {"kernel": config.alignment.kernel, "optimiser": config.optim.kind}
        named |= {f"encoder of {name}": config.model_of(k).encoder for k, name in enumerate(self.names)}
        objects = [f"the {what} ('{spec.partition(':')[2]}')" for what, spec in named.items() if is_missing(spec)]
        if objects:
            raise self._missing(objects)

    def _missing(self, objects: Sequence[str]) -> RunError:
        return RunError(
            f"'{self.folder.path}' was made with Python objects, which exist only in the program that passed them: "
            f"{' and '.join(objects)}. Call there: {resume_command(self.folder.path)}."
        )


def fingerprint(client: PreparedClient) -> dict[str, object]:
    """Return the facts that must be unchanged for a run to continue."""
    sha = sha256()
    for images in (client.train, client.validation, client.test):
        labels = [] if images.labels is None else images.labels.tolist()
        sha.update(f"{digest(images.pixels)} {images.pixels.dtype} {labels} {images.classes}".encode())
    return {"data": sha.hexdigest(), "encoder": client.model.encoder, "examples": len(client.train)}


def _change(
    name: str, before: Mapping[str, object], now: Mapping[str, object], then: str = "there", here: str = "here"
) -> str | None:
    """Return what differs between a client of a run and a client now; None if nothing does."""
    if before["encoder"] != now["encoder"]:
        old, new = (str(which["encoder"]).removeprefix(f"{GIVEN}:") for which in (before, now))
        return f"encoder of {name} ({old} {then} and {new} {here})"
    if before["data"] == now["data"]:
        return None
    if before["examples"] == now["examples"]:
        return f"data of {name} (other contents)"
    return f"data of {name} ({before['examples']} training samples {then} and {now['examples']} {here})"


def _check_shapes(config: Config, data: PassedData) -> None:
    wanted, dtype = tuple(data.rad.shape[1:]), data.rad.dtype
    parts = [(c.name, c.train.pixels) for c in data.clients]
    parts += [(f"the test data of {c.name}", c.test.pixels) for c in data.clients if len(c.test)]
    for who, pixels in parts:
        if tuple(pixels.shape[1:]) != wanted or pixels.dtype != dtype:
            remedy = "Every client must be able to read the RAD: convert all data to one shape and type"
            if dtype == pixels.dtype and is_pixels(dtype):
                alike = {"data.side": max(wanted[1:]), "data.channels": wanted[0]}
                remedy = f"Pass settings={alike} to convert all images to one shape"
            raise DataError(
                f"{who} has samples of type {pixels.dtype} and shape {tuple(pixels.shape[1:])}, "
                f"but those of the RAD have {dtype} and {wanted}. {remedy}."
            )
    if config.views.function is not None:
        return
    if not is_pixels(dtype):
        remedy = float_images_remedy(data.rad)
        raise ConfigError(
            f"the data, of shape {wanted}, are {dtype}, but the built-in views support only uint8 and uint16 images. "
            f"{remedy}{' ' * bool(remedy)}For data that are not images, pass your own views with views=, a function "
            "(batch, generator) -> batch."
        )
    if wanted[1] != wanted[2]:
        raise ConfigError(
            f"the data, of shape {wanted}, are not square, but the built-in views support only square images. "
            "Pass your own with views=, a function (batch, generator) -> batch; or set data.side for images."
        )


def _warn_of_dark_images(data: PassedData) -> None:
    parts = {c.name: c.train.pixels for c in data.clients} | {"the RAD": data.rad}
    dark = {name: largest_value(pixels) for name, pixels in parts.items() if are_dark(pixels)}
    if dark:
        log.warning(
            "the 16-bit images of %s have values up to %d of 65535, so the networks see them almost black. "
            "Rescale them first: scans of 12 bits times 16, for instance.",
            " and ".join(dark),
            max(dark.values()),
        )
