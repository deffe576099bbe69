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
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn
from torch.nn.parameter import is_lazy

from ..config import (
    Config,
    DataConfig,
    ModelConfig,
    differences,
    flat,
    load_config,
    preset_names,
    validate,
    with_settings,
)
from ..data import Data, skip_with
from ..errors import ConfigError
from ..federation.participants import LocalSite
from ..federation.participants.python_data import ClientData, check_rad_size, read_clients
from ..federation.start import Prepared, continue_with, default_folder, prepare
from ..federation.wire import NAME
from ..learning.encoders import check_name
from ..learning.losses import LocalLoss
from ..methods import Method
from ..plugins import GIVEN, Given, is_at_hand
from ..runs.events import Listener
from ..runs.folder import RunFolder, client_name
from ..terminal import Console
from .run import Run, train_here
from .short_errors import short_errors

View = Callable[[Tensor, Generator], Tensor]
"""Returns one random view of each sample of a batch. Images are in [0, 1], other data are passed unchanged."""
Kernel = Callable[[Tensor, Tensor], Tensor]
"""Returns K(p, q) for all rows p and q of two matrices of representations. Must be differentiable."""


@dataclass(frozen=True)
class Client:
    """A participant with its own data and its own encoder.

    Args:
        data: a folder of images, a data-set id, or parquet; an array or tensor (uint8 and uint16: images, with
            channels first, last or none; other types are passed to the network unchanged); or a torch Dataset of x or
            (x, y)
        encoder: an nn.Module, which is copied and keeps its weights as the starting point (they are saved with the
            run, so that the same script continues it although its random weights differ); a class or function that
            returns one, and gets `in_channels` and `side` if it has such arguments; or a name: `resnet18(width=32)`,
            `timm:NAME`, `package.module:callable`
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


AGAIN = " (finished before; to train again, pass another run_dir)"


@short_errors
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
    more: bool = False,
    progress: bool | Listener = True,
    watch: bool = False,
) -> Run:
    """Train the clients together and return the finished run.

    Args:
        clients: the participants
        rad: the unlabeled data that all clients receive, of the same kinds as a client's data; or the number of samples
            to take from the clients' own data, evenly: no client then trains its own loss on these samples
        method: a name (by default the config's, `hetero-ssfl`), `package.module:Class`, or a subclass of Method
        rounds: as in a config
        run_dir: the run folder, by default one below `runs`. Called again with the same arguments, federate continues
            after the last finished round, or returns the finished run; without `run_dir`, if nobody is training in it.
        seed: as in a config
        views: your own random views instead of the built-in ones for images: (batch, generator) -> batch
        kernel: your own kernel between representations: (a, b) -> K
        loss: a name (by default the config's: `simclr`), or your own: (learner, views) -> (loss, projections)
        settings: settings to change: `{"alignment.mu": 4}`; `data.limit` counts the training samples of each client
        config: the config to start from: a preset's name (without its `[data]`), a TOML file, or a Config. `clients`
            and `rad` replace its sources, partition and models.
        more: continue the run in `run_dir`, finished or not, with more `rounds` or other settings (lower `optim.lr`)
        progress: whether to show progress; or a function that is called with each event
        watch: show a live page of the run, on this machine; its address is printed
    """
    given, names = Given(), _names(clients)
    chosen: dict[str, Any] = {"method": method, "rounds": rounds, "seed": seed, "ssl.kind": loss}
    chosen |= {"views.function": views, "alignment.kernel": kernel}
    specs = {key: given.spec(value) if callable(value) else value for key, value in chosen.items() if value is not None}
    base = _base_config(config, settings or {}, {**specs, "clients.count": len(names)})
    models = [_model_of(client, name, given) for client, name in zip(clients, names, strict=True)]
    with given.at_hand(), skip_with("settings={'data.on_bad_image': 'skip'}"):
        data = [ClientData(name, own.data, own.labels, own.test) for name, own in zip(names, clients, strict=True)]
        passed = read_clients(data, models, rad, base)
        final = _fill_in(base, names, models, len(passed.rad))
        site, path = LocalSite(passed), None if run_dir is None else Path(run_dir)
        if more:
            path = path or default_folder(final, site)[0]
            continue_with(RunFolder.open(path), differences(RunFolder.open(path).read_config(), final))
        run = prepare(final, path, site=site)
        say = Console(stderr=True, quiet=progress is not True, highlight=False, markup=False, soft_wrap=True).print
        _say_before(say, run, names, chosen=path is not None)
        passed.load_starting_weights(run.folder)
        was_finished = run.folder.finished
        train_here(run, progress, watch)
        _say_after(say, run, was_finished)
    return Run(run.folder, site, given)


def _say_after(say: Callable[[str], None], run: Prepared, was_finished: bool) -> None:
    if not was_finished and not run.folder.read_json("results.json")["mean"]:
        say("no labels, so no accuracy: look at run.report() and hetero-ssfl neighbours")
    say(f"run folder: {run.folder.path}{AGAIN * was_finished}")


def _say_before(say: Callable[[str], None], run: Prepared, names: Sequence[str], chosen: bool) -> None:
    """Say what a user must know before training. `chosen`: whether the user chose the folder."""
    if run.continues:
        if not chosen and not run.folder.finished:
            say(f"continuing the unfinished run in {run.folder.path}")
        return
    if run.other:
        path, difference = run.other
        say(f"{path} holds a run with different {difference}; this is a new run in {run.folder.path}")
    config = run.folder.read_config()
    only_here = ", ".join(name for k, name in enumerate(names) if is_at_hand(config.model_of(k).encoder))
    if only_here:
        say(f"{only_here}: encoders of this process only; others can open a class or function of a module")


def _names(clients: Sequence[Client]) -> list[str]:
    if isinstance(clients, Client) or not clients or not all(isinstance(client, Client) for client in clients):
        raise ConfigError(f"clients is {str(clients)[:60]}, expected a list: [Client(data, encoder), ...].")
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


def _base_config(config: str | Config | None, settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> Config:
    """Return the config to start from, without the data of a preset. Only a config that says so has validation data."""
    for key in flat(settings):
        source = next((argument for own, argument in TAKEN_FROM.items() if f"{key}.".startswith(f"{own}.")), None)
        if source:
            raise ConfigError(f"settings has '{key}', which federate takes from {source} instead. Remove it.")
    base = load_config(config) if isinstance(config, str) else config or Config()
    if config is None or config in preset_names():
        base = base.model_copy(update={"data": DataConfig(validation=0)})
    elif "validation" not in base.data.model_fields_set:
        base = with_settings(base, {"data.validation": 0})
    return with_settings(base, {**settings, **arguments})


def _model_of(client: Client, name: str, given: Given) -> ModelConfig:
    heads = {"projector": client.projector, "predictor": client.predictor}
    return validate({"encoder": _encoder_name(client.encoder, name, given), **heads}, ModelConfig)


def _encoder_name(encoder: Any, who: str, given: Given) -> str:
    """Return the encoder's spec for the config.

    An instance is named by its class and a digest of its description. Its weights are not part of the name, because
    they differ each time a script is run; the run keeps those that it started with.
    """
    if isinstance(encoder, str):
        check_name(encoder)
        return encoder
    if not isinstance(encoder, nn.Module):
        if not callable(encoder):
            wanted = "a torch.nn.Module, a function that returns one, or a name such as 'resnet18(width=32)'"
            raise ConfigError(f"the encoder of {who} is a {type(encoder).__name__}, expected {wanted}.")
        return given.spec(encoder)
    state = encoder.state_dict()
    if any(map(is_lazy, state.values())):
        raise ConfigError(f"the encoder of {who} has lazy layers without weights. Call it once on a batch of data.")
    shapes = [(key, str(value.dtype), tuple(value.shape)) for key, value in state.items()]
    name = f"{type(encoder).__name__}-{sha256(repr((encoder, shapes)).encode()).hexdigest()[:8]}"
    return given.spec(encoder, name, keep=lambda own: copy.deepcopy(own).cpu())


def _fill_in(config: Config, names: Sequence[str], models: Sequence[ModelConfig], rad_size: int) -> Config:
    weights = config.clients.weights
    if isinstance(weights, tuple) and len(weights) == len(names):  # the roster is sorted by name
        weights = tuple(weights[k] for k in sorted(range(len(names)), key=names.__getitem__))
    changes = {"data.source": GIVEN, "rad.size": check_rad_size(rad_size), "rad.source": None}
    dumped = [model.model_dump() for model in models]
    return with_settings(config, {**changes, "clients.models": dumped, "clients.weights": weights})
