"""Federated self-supervised learning from Python, with your own data, encoders, views, kernel and method.

    from hetero_ssfl import Client, federate

    run = federate([Client("images/a", "resnet18(width=32)"), Client(array, MyNet())], rad="images/shared", rounds=10)
    run.table()
    run.encoder(0)

It uses the same server, client app and run folder as the command line. Objects are never pickled: on Linux, worker
processes are forked from this one; elsewhere, and with a GPU, clients train one after another in this process.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ..data import Data
from ..errors import ConfigError
from ..federation.continuing import continue_with
from ..federation.participants import LocalSite, PassedData
from ..federation.participants.reading import ClientData, check_rad_size, read_clients, sources_of
from ..federation.start import Prepared, default_folder, prepare
from ..federation.wire import NAME
from ..learning.encoders import check_name
from ..learning.losses import LocalLoss
from ..methods import Method
from ..plugins import GIVEN, Given, find, is_at_hand
from ..runs.events import Listener
from ..runs.folder import RunFolder, client_name
from ..terminal import Console
from .run import Run, train_here

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
) -> Run:
    """Train the clients together and return the finished run.

    Args:
        clients: the participants
        rad: the unlabeled data that all clients receive, of the same kinds as a client's data; or the number of samples
            to take from the clients' own data, evenly: no client then trains its own loss on these samples
        method: a name (by default the config's, `hetero-ssfl`), `package.module:Class`, or a subclass of Method
        rounds: as in a config
        run_dir: the run folder; by default a folder below `runs`. If federate is called again with the same arguments,
            it continues after the last finished round, or returns the finished run at once. Without `run_dir`, this
            is so if a run of the same arguments is there and no process is training in it; else a new run starts.
        seed: as in a config
        views: your own random views instead of the built-in ones for images: (batch, generator) -> batch
        kernel: your own kernel between representations: (a, b) -> K
        loss: a name (by default the config's, `byol`), or your own local loss: (learner, views) -> (loss, projections)
        settings: settings to change, as in a config: `{"alignment.mu": 4, "local_epochs": 2}`; `data.limit` is the
            number of training samples of each client
        config: the config to start from: a preset's name (without its `[data]`), a TOML file, or a Config. `clients`
            and `rad` replace its sources, partition and models.
        more: whether to continue the run in `run_dir`, finished or not, with other settings than it had: more `rounds`,
            or after its loss diverged a lower `optim.lr`. It continues from its last finished round.
        progress: whether to show progress; or a function that is called with each event
    """
    given, names = Given(), _names(clients)
    chosen: dict[str, Any] = {"method": method, "rounds": rounds, "seed": seed, "ssl.kind": loss}
    chosen |= {"views.function": views, "alignment.kernel": kernel}
    specs = {key: given.spec(value) if callable(value) else value for key, value in chosen.items() if value is not None}
    base = _base_config(config, {**_checked(settings or {}), **specs, "clients.count": len(names)})
    models = [_model_of(client, name, given) for client, name in zip(clients, names, strict=True)]
    with given.at_hand():
        data = [ClientData(name, own.data, own.labels, own.test) for name, own in zip(names, clients, strict=True)]
        prepared, shared = read_clients(data, models, rad, base)
        final = _fill_in(base, names, models, len(shared))
        passed = PassedData(prepared, shared, sources_of(data, rad))
        site, path = LocalSite(passed), None if run_dir is None else Path(run_dir)
        if more:
            path = path or default_folder(final, site, finished=True)[0]
            continue_with(RunFolder.open(path), differences(RunFolder.open(path).read_config(), final))
        run = prepare(final, path, site=site, finished=True)
        console = Console(stderr=True, quiet=progress is not True)
        _print_lines(console, _lines_before(run, names, chosen=path is not None))
        passed.load_starting_weights(run.folder)
        was_finished = run.folder.finished
        train_here(run, progress)
        _print_lines(console, _lines_after(run.folder, was_finished))
    return Run(run.folder, site, given)


# --- what is printed besides the progress of the rounds ---


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _lines_before(run: Prepared, names: Sequence[str], chosen: bool) -> Iterator[str]:
    """Yield what a user must know before training. `chosen`: whether the user chose the folder."""
    if run.continues:
        if not chosen and not run.folder.finished:
            yield f"continuing the unfinished run in {run.folder.path}"
        return
    if run.other:
        yield f"{run.other[0]} holds a run with different {run.other[1]}; this is a new run in {run.folder.path}"
    config = run.folder.read_config()
    specs = {name: config.model_of(k).encoder for k, name in enumerate(names)}
    only_here = {name: find(spec, "encoder") for name, spec in specs.items() if is_at_hand(spec)}
    if only_here:
        remedies = dict.fromkeys(map(_how_to_import, only_here.values()))
        whose = f"{', '.join(only_here)}: the encoder{'s' * (len(only_here) > 1)}"
        yield f"{whose} cannot be opened in another process. To change this, {' and '.join(remedies)}."


def _how_to_import(encoder: object) -> str:
    """Return how an encoder can be passed so that other processes find it, too."""
    if isinstance(encoder, nn.Module):
        return f"pass the class {type(encoder).__name__}, or a function, from a module"
    name = getattr(encoder, "__name__", type(encoder).__name__)
    return "pass a function from a module instead of a lambda" if name == "<lambda>" else f"define {name} in a module"


def _lines_after(folder: RunFolder, was_finished: bool) -> Iterator[str]:
    if not was_finished and not folder.read_json("results.json")["mean"]:
        yield "no labels, so no accuracy: look at run.report() and hetero-ssfl neighbours"
    again = " (finished before; to train again, pass another run_dir)" if was_finished else ""
    yield f"run folder: {folder.path}{again}"


# --- from arguments to a config and a site ---


def _names(clients: Sequence[Client]) -> list[str]:
    if not clients:
        raise ConfigError("federate got no clients, expected at least one Client(data, encoder).")
    if isinstance(clients, Client):
        raise ConfigError("federate got one Client, expected a list. Write [Client(data, encoder), ...].")
    for k, client in enumerate(clients):
        if not isinstance(client, Client):
            raise ConfigError(
                f"clients[{k}] is a {type(client).__name__}, expected a Client. Write Client(data, encoder)."
            )
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


def _base_config(config: str | Config | None, settings: Mapping[str, Any]) -> Config:
    """Return the config to start from, without the data of a preset. Only a config that says so has validation data."""
    base = load_config(config) if isinstance(config, str) else config or Config()
    if config is None or config in preset_names():
        base = base.model_copy(update={"data": DataConfig(validation=0)})
    elif "validation" not in base.data.model_fields_set:
        base = with_settings(base, {"data.validation": 0})
    return with_settings(base, settings)


def _checked(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings, unless one of them is an argument of `federate`."""
    for key in flat(settings):
        source = next((argument for own, argument in TAKEN_FROM.items() if f"{key}.".startswith(f"{own}.")), None)
        if source:
            raise ConfigError(f"settings has '{key}', which federate takes from {source} instead. Remove it.")
    return settings


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
    shapes = [(key, str(value.dtype), tuple(value.shape)) for key, value in state.items()]
    name = f"{type(encoder).__name__}-{sha256(repr((encoder, shapes)).encode()).hexdigest()[:8]}"
    return given.spec(encoder, name, keep=lambda own: copy.deepcopy(own).cpu())


def _fill_in(config: Config, names: Sequence[str], models: Sequence[ModelConfig], rad_size: int) -> Config:
    weights = config.clients.weights
    if isinstance(weights, tuple) and len(weights) == len(names):  # the roster is sorted by name
        weights = tuple(weights[k] for k in sorted(range(len(names)), key=names.__getitem__))
    changes = {
        "data.source": GIVEN,
        "rad.size": check_rad_size(rad_size),
        "rad.source": None,
        "clients.models": [model.model_dump() for model in models],
        "clients.weights": weights,
    }
    return with_settings(config, changes)
