"""The data of participants passed from Python, which are objects in the user's process (api/), or named by it.

Objects are never pickled. The worker processes of such a run are forked from the user's process.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Config, ModelConfig
from ...data import (
    Data,
    Images,
    agree_on_classes,
    are_dark,
    balanced_order,
    digest,
    float_images_remedy,
    is_pixels,
    joined,
    largest_value,
    read_rad,
    read_with_test,
    same_source,
    without_trained,
)
from ...errors import ConfigError, DataError, RunError
from ...plugins import GIVEN, find, is_at_hand, is_missing
from ...runs.files import load_tensors
from ...runs.folder import RunFolder, resume_command
from ...seeding import rng_for
from .site import Setup, check_parts, facts_of

log = logging.getLogger(__name__)

START = "start"  # folder of the weights from which encoders that were passed as module instances start


@dataclass(frozen=True)
class ClientData:
    """The data of one client as they were passed: names of sources, or objects."""

    name: str
    data: Data
    labels: Any = None
    test: Data = None

    def source(self) -> dict[str, str | None] | None:
        """Return the names of its sources, from which another process can read them again; None for objects."""
        named = isinstance(self.data, (str, Path)) and (self.test is None or isinstance(self.test, (str, Path)))
        if not named or self.labels is not None:
            return None

        def absolute(source: Any) -> str:  # to be read from another working folder, too
            path = Path(source).expanduser()
            return str(path.resolve() if path.exists() else source)

        return {"data": absolute(self.data), "test": None if self.test is None else absolute(self.test)}


@dataclass(frozen=True)
class PreparedClient:
    """A user's client with its data read and split."""

    name: str
    model: ModelConfig
    train: Images
    validation: Images
    test: Images


def read_clients(
    clients: Sequence[ClientData], models: Sequence[ModelConfig], rad: Data, config: Config
) -> "PassedData":
    """Read and split the data of all clients, and build the RAD, perhaps from a number of samples of the clients."""
    taken = check_rad_size(int(rad)) if isinstance(rad, Integral) and not isinstance(rad, bool) else 0
    _check_rad_source(rad, clients)
    shared = [] if taken else [read_rad(rad, config.data)]
    parts: list[Images] = []
    for k, client in enumerate(clients):
        give_away = taken // len(clients) + (k < taken % len(clients))
        rest, validation, given, test = _split(client, give_away, len(clients), config)
        shared += [given] if give_away else []
        parts += [rest, validation, test]
    agreed = agree_on_classes(parts)
    prepared = [
        PreparedClient(client.name, model, *agreed[3 * k : 3 * k + 3])
        for k, (client, model) in enumerate(zip(clients, models, strict=True))
    ]
    shapes = sorted({tuple(part.shape[1:]) for part in shared})
    if len(shapes) > 1:
        raise ConfigError(f"a RAD cannot be taken from data of shapes {shapes}, expected one shape. Set data.side.")
    common = torch.cat(shared)
    # The RAD itself is in the run folder: only the number of samples that the clients gave away for it is recorded.
    sources = {"clients": {client.name: client.source() for client in clients}, "rad_taken": taken or None}
    return PassedData(_tested_apart(prepared, common), common, sources)


def _split(client: ClientData, give_away: int, count: int, config: Config) -> tuple[Images, Images, Tensor, Images]:
    """Return a client's training data, validation data, samples for the RAD, and test data."""
    own, test = read_with_test(client.data, client.labels, client.test, config.data, client.name)
    if config.data.limit and len(own) > config.data.limit:
        order = balanced_order(own, rng_for(config.seed, "limit", client.name))
        own = own.subset(order[: config.data.limit].sort().values)
    apart = config.data.validation // count if own.labels is not None else 0
    if len(own) - give_away - apart < 2:
        raise ConfigError(
            f"{client.name} has {len(own)} training samples; {give_away} for the RAD and {apart} for validation leave "
            "fewer than 2. Add samples, or lower rad or data.validation."
        )
    order = torch.randperm(len(own), generator=rng_for(config.seed, "split", client.name))
    validation, given, rest = (rows.sort().values for rows in order.tensor_split([apart, apart + give_away]))
    return own.subset(rest) if apart + give_away else own, own.subset(validation), own.pixels[given], test


def _check_rad_source(rad: Data, clients: Sequence[ClientData]) -> None:
    for client in clients:
        sources = (client.data, *(client.test if isinstance(client.test, tuple) else (client.test,)))
        named = [str(own) for own in sources if isinstance(own, (str, Path)) and isinstance(rad, (str, Path))]
        if any(same_source(str(rad), own) for own in named):
            instead = "Pass a number of samples, such as rad=300, that no client then trains on."
            raise ConfigError(f"rad = '{rad}' is {client.name}'s own data, expected another data set. {instead}")


def _tested_apart(prepared: Sequence[PreparedClient], rad: Tensor) -> list[PreparedClient]:
    """Remove held-out samples that any client trains on."""
    trained = {f"the training data of {m.name}": m.train.pixels for m in prepared} | {"the RAD": rad}
    tests = {f"test samples of {m.name}": m.test for m in prepared}
    validations = {f"validation samples of {m.name}": m.validation for m in prepared}
    kept = without_trained(tests | validations, trained)
    names = zip(prepared, tests, validations, strict=True)
    return [replace(m, test=kept[test], validation=kept[validation]) for m, test, validation in names]


def check_rad_size(rad_size: int) -> int:
    if rad_size < 4:
        raise ConfigError(f"a RAD of {rad_size} samples is too small, expected at least 4. Pass more: a few hundred.")
    return rad_size


class PassedData:
    """The data and encoders of all clients."""

    classes = None  # they are read from the data

    def __init__(self, clients: Sequence[PreparedClient], rad: Tensor, sources: Mapping[str, Any]) -> None:
        self.clients, self.rad, self.sources = tuple(clients), rad, sources

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

    def set_up(self, config: Config) -> Setup:
        """Check the user's data, encoders, views and kernel by trying each of them once."""
        _check_shapes(config, self)
        parts = {c.name: c.train.pixels for c in self.clients} | {"the RAD": self.rad}
        dark = {name: largest_value(pixels) for name, pixels in parts.items() if are_dark(pixels)}
        if dark:
            log.warning(
                f"the 16-bit images of {' and '.join(dark)} have values up to {max(dark.values())} of 65535, so the "
                "networks see them almost black. Rescale them first: scans of 12 bits times 16, for instance."
            )
        labels = {c.name: c.train.labels for c in self.clients}
        check_parts(config, self.rad, {c.name: c.model for c in self.clients}, labels)
        skipped = [image for c in self.clients for image in c.train.skipped + c.test.skipped]
        facts = facts_of(self.clients[0].train.classes, len(skipped), labels)
        starts = {f"{START}/{name}": module.state_dict() for name, module in self._instances(config).items()}
        return Setup(self.rad, {**facts, "given": self.fingerprints, "sources": self.sources}, starts, skipped)

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
            who = f"{', '.join(changed)}: the run in '{folder.path}'"
            log.warning("%s started from other weights, and keeps its own. Choose another run_dir to use these.", who)

    @cached_property
    def fingerprints(self) -> dict[str, dict[str, object]]:
        return {c.name: fingerprint(c) for c in self.clients}

    def difference(self, folder: RunFolder) -> str | None:
        facts, now = folder.read_facts(), self.fingerprints
        before = facts.given
        if list(before) != list(now):
            return f"clients ({', '.join(before)} there and {', '.join(now)} here)"
        changes = [change for name in now if (change := _change(name, before[name], now[name]))]
        return next(iter(changes), None if facts.rad_digest == digest(self.rad) else "RAD data")


class ReopenedData(PassedData):
    """The clients of an earlier run, in any process. Data and encoders that have a name are read again when needed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.facts = folder, folder.read_facts()

    @cached_property
    def clients(self) -> tuple[PreparedClient, ...]:  # type: ignore[override]
        sources, given = self.facts.sources, self.facts.given
        passed = [name for name in given if sources is None or sources.clients.get(name) is None]
        if sources is None or passed:
            raise self._missing([f"the data of {name}" for name in passed])
        config, own = self.folder.read_config(), sources.clients
        again = [ClientData(name, named["data"], None, named["test"]) for name, named in own.items() if named]
        models = [config.model_of(k) for k in range(len(again))]
        prepared = read_clients(again, models, sources.rad_taken or self.rad, config).clients
        for client in prepared:
            change = _change(client.name, given[client.name], fingerprint(client))
            if change:
                began = f"the {change} have changed since the run in '{self.folder.path}' began"
                raise DataError(f"{began}. Restore them, or start a new run; evaluate(data) tests on other data.")
        return prepared

    @cached_property
    def rad(self) -> Tensor:  # type: ignore[override]
        return self.folder.rad()[0]

    @cached_property
    def names(self) -> list[str]:
        return list(self.facts.given)

    def check_objects(self) -> None:
        """Raise RunError if objects without which the clients cannot train do not exist in this process."""
        config = self.folder.read_config()
        named = config.own_code
        named |= {f"encoder of {name}": config.model_of(k).encoder for k, name in enumerate(self.names)}
        objects = [f"the {what} ('{spec.partition(':')[2]}')" for what, spec in named.items() if is_missing(spec)]
        if objects:
            raise self._missing(objects)

    def _missing(self, objects: Sequence[str]) -> RunError:
        made = f"'{self.folder.path}' was made with objects of another program: {' and '.join(objects)}"
        return RunError(f"{made}. Call there: {resume_command(self.folder.path)}.")


def fingerprint(client: PreparedClient) -> dict[str, object]:
    """Return the facts that must be unchanged for a run to continue."""
    sha = sha256()
    for images in (client.train, client.validation, client.test):
        labels = [] if images.labels is None else images.labels.tolist()
        sha.update(f"{digest(images.pixels)} {images.pixels.dtype} {labels} {images.classes}".encode())
    return {"data": sha.hexdigest(), "encoder": client.model.encoder, "examples": len(client.train)}


def _change(name: str, before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return what differs between a client of a run and a client now; None if nothing does."""
    if before["encoder"] != now["encoder"]:
        old, new = (str(which["encoder"]).removeprefix(f"{GIVEN}:") for which in (before, now))
        return f"encoder of {name} ({old} then and {new} now)"
    if before["data"] == now["data"]:
        return None
    if before["examples"] == now["examples"]:
        return f"data of {name} (other contents)"
    return f"data of {name} ({before['examples']} training samples then and {now['examples']} now)"


def _check_shapes(config: Config, data: PassedData) -> None:
    wanted, dtype = tuple(data.rad.shape[1:]), data.rad.dtype
    parts = [(c.name, c.train.pixels) for c in data.clients]
    parts += [(f"the test data of {c.name}", c.test.pixels) for c in data.clients if len(c.test)]
    for who, pixels in parts:
        if tuple(pixels.shape[1:]) != wanted or pixels.dtype != dtype:
            remedy = "Convert all data"
            if dtype == pixels.dtype and is_pixels(dtype):
                alike = {"data.side": max(wanted[1:]), "data.channels": wanted[0]}
                remedy = f"Pass settings={alike}"
            raise DataError(
                f"{who} has samples of type {pixels.dtype} and shape {tuple(pixels.shape[1:])}, but the RAD, which "
                f"every client must be able to read, has {dtype} and {wanted}. {remedy} to have one shape and type."
            )
    if config.views.function is None and (not is_pixels(dtype) or wanted[1] != wanted[2]):
        remedy = float_images_remedy(data.rad) if not is_pixels(dtype) else "Set data.side."
        raise ConfigError(
            f"the data, of shape {wanted}, are {dtype}, but the built-in views support only uint8 and uint16 images "
            f"that are square. {remedy}{' ' * bool(remedy)}For other data, pass your own views with views=, a function "
            "(batch, generator) -> batch."
        )
