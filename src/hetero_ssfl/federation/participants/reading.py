"""Read and split the data of clients that a program passed, or named in an earlier run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import Config, ModelConfig
from ...data import (
    Data,
    Images,
    agree_on_classes,
    balanced_order,
    read_rad,
    read_with_test,
    same_source,
    without_trained,
)
from ...errors import ConfigError
from ...seeding import rng_for


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
        return {"data": _absolute(self.data), "test": None if self.test is None else _absolute(self.test)}


@dataclass(frozen=True)
class PreparedClient:
    """A user's client with its data read and split."""

    name: str
    model: ModelConfig
    train: Images
    validation: Images
    test: Images


def _absolute(source: str | Path) -> str:
    """Return a local source's absolute path, so that it can be read from another working folder."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else str(source)


def sources_of(given: Sequence[ClientData], rad: Data) -> dict[str, Any]:
    """Return what `facts.json` records of the sources: names, or null for data that were passed as objects.

    The RAD itself is in the run folder. Only the number of samples that the clients gave away for it is needed.
    """
    return {"clients": {own.name: own.source() for own in given}, "rad_taken": int(rad) if _is_count(rad) else None}


def _is_count(rad: Data) -> bool:
    return isinstance(rad, Integral) and not isinstance(rad, bool)


def read_clients(
    clients: Sequence[ClientData], models: Sequence[ModelConfig], rad: Data, config: Config
) -> tuple[list[PreparedClient], Tensor]:
    """Read and split the data of all clients, and build the RAD."""
    taken = 0
    if _is_count(rad):
        taken = check_rad_size(int(rad))
    else:
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
    if len({part.shape[1:] for part in shared}) > 1:
        raise ConfigError(
            f"a RAD cannot be taken from data of shapes {sorted({tuple(part.shape[1:]) for part in shared})}, "
            "expected one shape. Set data.side and data.channels with settings=, or pass a RAD."
        )
    common = torch.cat(shared)
    return _tested_apart(prepared, common), common


def _split(client: ClientData, give_away: int, count: int, config: Config) -> tuple[Images, Images, Tensor, Images]:
    """Return a client's training data, validation data, samples for the RAD, and test data."""
    own, test = read_with_test(client.data, client.labels, client.test, config.data, client.name)
    if config.data.limit and len(own) > config.data.limit:
        order = balanced_order(own, rng_for(config.seed, "limit", client.name))
        own = own.subset(order[: config.data.limit].sort().values)
    apart = config.data.validation // count if own.labels is not None else 0
    if len(own) - give_away - apart < 2:
        most = max(0, len(own) - 2 - apart) * count
        remedy = f"lower rad to at most {most}" if most >= 4 else "lower rad or data.validation"
        raise ConfigError(
            f"{client.name} has {len(own)} training samples; {give_away} for the RAD and {apart} for validation leave "
            f"fewer than 2. Add samples, or {remedy if give_away else 'lower data.validation'}."
        )
    order = torch.randperm(len(own), generator=rng_for(config.seed, "split", client.name))
    validation, given, rest = (rows.sort().values for rows in order.tensor_split([apart, apart + give_away]))
    return own.subset(rest) if apart + give_away else own, own.subset(validation), own.pixels[given], test


def _check_rad_source(rad: Data, clients: Sequence[ClientData]) -> None:
    if not isinstance(rad, (str, Path)):
        return
    for client in clients:
        sources = (client.data, *(client.test if isinstance(client.test, tuple) else (client.test,)))
        if any(isinstance(own, (str, Path)) and same_source(str(rad), str(own)) for own in sources):
            raise ConfigError(
                f"rad = '{rad}' is {client.name}'s own data, expected another data set. "
                "Pass a number of samples instead, such as rad=300: no client then trains on the RAD."
            )


def _tested_apart(prepared: Sequence[PreparedClient], rad: Tensor) -> list[PreparedClient]:
    """Remove held-out samples that any client trains on."""
    trained = {f"the training data of {m.name}": m.train.pixels for m in prepared} | {"the RAD": rad}
    tests = {f"test samples of {m.name}": m.test for m in prepared}
    validations = {f"validation samples of {m.name}": m.validation for m in prepared}
    kept = without_trained(tests | validations, trained)
    return [
        replace(m, test=kept[test], validation=kept[validation])
        for m, test, validation in zip(prepared, tests, validations, strict=True)
    ]


def check_rad_size(rad_size: int) -> int:
    if rad_size < 4:
        raise ConfigError(
            f"a RAD of {rad_size} samples is too small, expected at least 4; a few hundred work well. Pass more."
        )
    return rad_size
