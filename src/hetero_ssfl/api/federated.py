"""Federated self-supervised learning from Python, with your own data, encoders, views, kernel and method.

    from hetero_ssfl import Client, federate

    run = federate([Client("images/a", "resnet18(width=32)"), Client(array, MyNet())], rad="images/shared", rounds=10)
    run.table()
    run.encoder(0)

It uses the same server, client app and run folder as the command line. Objects are never pickled: on Linux, worker
processes are forked from this one; elsewhere, and with a GPU, clients train one after another in this process.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import is_lazy

from ..config import Config, DataConfig, ModelConfig, flat, load_config, preset_names, validate, with_settings
from ..data import (
    Data,
    Images,
    agree_on_classes,
    balanced_order,
    digest,
    read_rad,
    read_with_test,
    same_source,
    without_trained,
)
from ..errors import ConfigError
from ..events import Listener
from ..federation import new_folder, open_run, run_here
from ..federation.records import NAME
from ..federation.sites.python import PreparedClient, PythonSite
from ..methods import Method
from ..objectives import LocalLoss
from ..plugins import GIVEN, Given
from ..progress import RunView
from ..runs import RunFolder, client_name
from ..screen import Console
from ..seeding import rng_for
from .run import Run

View = Callable[[Tensor, Generator], Tensor]
"""Returns one random view of each sample of a batch. Images are in [0, 1], other data are passed unchanged."""
Kernel = Callable[[Tensor, Tensor], Tensor]
"""Returns K(p, q) for all rows p and q of two matrices of representations. Must be differentiable."""


@dataclass(frozen=True)
class Client:
    """A participant with its own data and its own encoder.

    Args:
        data: a folder of images, a data-set id, or parquet; an array or tensor (uint8: images, with channels first,
            last or none; other types are passed to the network unchanged); or a torch Dataset of x or (x, y)
        encoder: an nn.Module, which is copied and keeps its weights as the starting point; a class or function that
            returns one; or a name: `resnet18(width=32)`, `timm:NAME`, `package.module:callable`
        name: its name in tables and folders; by default client-000, client-001, ...
        labels: one per sample, a number or a string. They are used only for probes, not by self-supervised losses.
        test: the data to probe on: as `data`, or (data, labels). By default the source's own test split or, if there
            are labels, a fixed fifth of the data. Samples that any client trains on are removed, with a warning.
        projector: widths (hidden, output) of its projection head; by default as in the config's [ssl]
        predictor: hidden width of its prediction head; by default as in [ssl]
    """

    data: Data
    encoder: str | nn.Module | Callable[..., nn.Module]
    name: str | None = None
    labels: Any = None
    test: Data = None
    projector: tuple[int, int] | None = None
    predictor: int | None = None


def federate(
    clients: Sequence[Client],
    rad: Data,
    method: str | type[Method] | None = None,
    *,
    rounds: int | None = None,
    run_dir: str | Path | None = None,
    seed: int | None = None,
    views: str | View | None = None,
    kernel: str | Kernel | None = None,
    loss: str | LocalLoss | None = None,
    settings: Mapping[str, Any] | None = None,
    config: str | Config | None = None,
    progress: bool | Listener = True,
) -> Run:
    """Train the clients together and return the finished run.

    Args:
        clients: the participants
        rad: the unlabeled data that all clients receive, of the same kinds as a client's data; or the number of samples
            to take from the clients' own data, evenly: no client then trains its own loss on these samples
        method: a name (by default the config's, `hetero-ssfl`), `package.module:Class`, or a subclass of Method
        rounds: as in a config
        run_dir: the run folder; by default a new folder below `runs`. If federate is called again with the same
            arguments, it continues after the last finished round, or returns the finished run at once.
        seed: as in a config
        views: your own random views instead of the built-in ones for images: (batch, generator) -> batch
        kernel: your own kernel between representations: (a, b) -> K
        loss: a name (by default the config's, `byol`), or your own local loss: (learner, views) -> (loss, projections)
        settings: settings to change, as in a config: `{"alignment.mu": 4, "local_epochs": 2}`; `data.limit` is the
            number of training samples of each client
        config: the config to start from: a preset's name (without its `[data]`), a TOML file, or a Config. `clients`
            and `rad` replace its sources, partition and models.
        progress: whether to show progress; or a function that is called with each event
    """
    given, names = Given(), _names(clients)
    _check_settings(settings or {})
    base = load_config(config) if isinstance(config, str) else config or Config()
    if config is None or config in preset_names():
        base = base.model_copy(update={"data": DataConfig(validation=0)})
    named: dict[str, Any] = {"method": method, "rounds": rounds, "seed": seed, "ssl.kind": loss}
    named |= {"views.function": views, "alignment.kernel": kernel}
    chosen = {k: given.spec(v) if callable(v) else v for k, v in named.items() if v is not None}
    base = with_settings(base, {**(settings or {}), **chosen, "clients.count": len(names)})
    models = []
    for client, name in zip(clients, names, strict=True):
        heads = {"projector": client.projector, "predictor": client.predictor}
        models.append(validate({"encoder": _encoder_name(client.encoder, name, given), **heads}, ModelConfig))
    with given.at_hand():
        prepared, shared = _read(clients, names, models, rad, base)
        final = _fill_in(base, names, models, len(shared))
        path = new_folder(final) if run_dir is None else Path(run_dir)
        site = PythonSite(RunFolder(path), prepared, shared)
        folder = open_run(path, final, site)
        if callable(progress):
            run_here(folder, site, progress)
        else:
            with RunView(Console(stderr=True), final.name, quiet=not progress) as view:
                run_here(folder, site, view)
    return Run(folder, site, given)


# --- from arguments to a config and a site ---


def _names(clients: Sequence[Client]) -> list[str]:
    if not clients:
        raise ConfigError("federate got no clients, expected at least one Client(data, encoder).")
    names = [client.name or client_name(k) for k, client in enumerate(clients)]
    for name in names:
        if not NAME.fullmatch(name):
            raise ConfigError(f"a client has the name '{name}', expected letters, digits, '-', '_' or '.'. Rename it.")
        if names.count(name) > 1:
            raise ConfigError(f"two clients have the name '{name}', expected unique names. Rename one.")
    return names


TAKEN_FROM = {
    "data.source": "Client(data, ...)",
    "partition": "each client's own data",
    "rad.source": "rad=",
    "rad.size": "rad=",
    "clients.count": "the list of clients",
    "clients.models": "Client(data, encoder)",
}
"""Settings that `federate` takes from its other arguments."""


def _check_settings(settings: Mapping[str, Any]) -> None:
    for key in flat(settings):
        found = next((words for own, words in TAKEN_FROM.items() if f"{key}.".startswith(f"{own}.")), None)
        if found:
            raise ConfigError(f"settings has '{key}', which federate takes from {found} instead. Remove it.")


def _encoder_name(encoder: Any, who: str, given: Given) -> str:
    """Return the encoder's spec for the config. An instance is named by its class and a digest of its weights."""
    if isinstance(encoder, str):
        return encoder
    if not isinstance(encoder, nn.Module):
        if not callable(encoder):
            raise ConfigError(
                f"the encoder of {who} is a {type(encoder).__name__}, expected a torch.nn.Module, a function that "
                "returns one, or a name such as 'resnet18(width=32)'."
            )
        return given.spec(encoder)
    state = encoder.state_dict()
    if any(map(is_lazy, state.values())):
        raise ConfigError(
            f"the encoder of {who} has lazy layers without weights. Call it once on a batch of data first."
        )
    sha = sha256(repr(encoder).encode())
    for key, value in state.items():
        sha.update(f"{key} {value.dtype} ".encode() + digest(value.detach().cpu().float()).encode())
    name = f"{type(encoder).__name__}-{sha.hexdigest()[:8]}"
    return given.spec(encoder, name, keep=lambda own: copy.deepcopy(own).cpu())


def _read(
    clients: Sequence[Client], names: Sequence[str], models: Sequence[ModelConfig], rad: Data, config: Config
) -> tuple[list[PreparedClient], Tensor]:
    """Read and split the data of all clients, and build the RAD."""
    taken = 0
    if isinstance(rad, Integral) and not isinstance(rad, bool):
        taken = _enough(int(rad))
    else:
        _check_rad_source(rad, clients, names)
    shared = [] if taken else [read_rad(rad, config.data)]
    parts: list[Images] = []
    for k, (client, name) in enumerate(zip(clients, names, strict=True)):
        own, test = read_with_test(client.data, client.labels, client.test, config.data, name)
        if config.data.limit and len(own) > config.data.limit:
            order = balanced_order(own, rng_for(config.seed, "limit", name))
            own = own.subset(order[: config.data.limit].sort().values)
        give_away = taken // len(clients) + (k < taken % len(clients))
        apart = config.data.validation // len(clients) if own.labels is not None else 0
        if len(own) - give_away - apart < 2:
            raise ConfigError(
                f"{name} has {len(own)} training samples; {give_away} for the RAD and {apart} for validation leave "
                "fewer than 2. Add samples, or lower rad or data.validation."
            )
        order = torch.randperm(len(own), generator=rng_for(config.seed, "split", name))
        validation, given, rest = (rows.sort().values for rows in order.tensor_split([apart, apart + give_away]))
        shared += [own.pixels[given]] if give_away else []
        parts += [own.subset(rest) if apart + give_away else own, own.subset(validation), test]
    agreed = agree_on_classes(parts)
    prepared = [
        PreparedClient(name, model, *agreed[3 * k : 3 * k + 3])
        for k, (name, model) in enumerate(zip(names, models, strict=True))
    ]
    if len({part.shape[1:] for part in shared}) > 1:
        raise ConfigError(
            f"a RAD cannot be taken from data of shapes {sorted({tuple(part.shape[1:]) for part in shared})}, "
            "expected one shape. Set data.side and data.channels with settings=, or pass a RAD."
        )
    common = torch.cat(shared)
    return _tested_apart(prepared, common), common


def _check_rad_source(rad: Data, clients: Sequence[Client], names: Sequence[str]) -> None:
    if not isinstance(rad, (str, Path)):
        return
    for client, name in zip(clients, names, strict=True):
        sources = (client.data, *(client.test if isinstance(client.test, tuple) else (client.test,)))
        if any(isinstance(own, (str, Path)) and same_source(str(rad), str(own)) for own in sources):
            raise ConfigError(
                f"rad = '{rad}' is {name}'s own data, expected another data set. "
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


def _enough(rad_size: int) -> int:
    if rad_size < 4:
        raise ConfigError(
            f"a RAD of {rad_size} samples is too small, expected at least 4; a few hundred work well. Pass more."
        )
    return rad_size


def _fill_in(config: Config, names: Sequence[str], models: Sequence[ModelConfig], rad_size: int) -> Config:
    weights = config.clients.weights
    if isinstance(weights, tuple) and len(weights) == len(names):  # the roster is sorted by name
        weights = tuple(weights[k] for k in sorted(range(len(names)), key=names.__getitem__))
    changes = {
        "data.source": GIVEN,
        "rad.size": _enough(rad_size),
        "rad.source": None,
        "clients.models": [model.model_dump() for model in models],
        "clients.weights": weights,
    }
    return with_settings(config, changes)
