"""Participants simulated on one machine: each a row of a run folder's split.

A node's settings name its place (`run-dir`, `partition-id`); everything else comes from the config in the message.
Processes keep clients in memory up to a budget; a client that was dropped, or trained elsewhere since, is read back
from its own folder.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..config import Config, parse_config
from ..data import Images, digest, load_images, load_rad, split_training_images
from ..errors import ConfigError, ProtocolError
from ..evaluation import Labeled, extract_features, few_labels, finetune, probe, share_of_labels
from ..methods import METHODS
from ..models import Learner, build_learner, count_parameters
from ..runs import RunFolder, load_tensors, save_tensors
from ..training import Client


def client_name(number: int) -> str:
    """Sorting by name is sorting by number, up to a million clients."""
    return f"client-{number:03d}" if number < 1000 else f"client-x{number:06d}"


@dataclass(frozen=True)
class Setup:
    """A run's data, divided. Made before anything is written, so that what cannot work leaves nothing behind."""

    split: dict[str, Tensor]
    rad: Tensor
    facts: dict[str, object]

    def write(self, folder: RunFolder) -> None:
        save_tensors(folder.path / "split.safetensors", self.split)
        save_tensors(folder.path / "rad.safetensors", {"pixels": self.rad}, {"digest": digest(self.rad)})
        folder.write_json("facts.json", self.facts)


def set_up(config: Config) -> Setup:
    """Divide the images and try every model once. Raises ConfigError or DataError with a remedy."""
    train, test = load_images(config.data, "train"), load_images(config.data, "test")
    split = split_training_images(config, train)
    rad = load_rad(config, train, split)
    _check_device(config.engine.device)
    if METHODS[config.method].needs_labels and train.labels is None:
        raise ConfigError(
            f"method '{config.method}' needs labels, but '{config.data.source}' has none. Choose another."
        )
    for model in {config.model_of(k) for k in range(config.clients.count)}:
        build_learner(model, config.ssl, *train.pixels.shape[1:3], config.seed)
    shares = {client_name(k): share for k, share in enumerate(split.clients)}
    facts: dict[str, object] = {
        "rad_digest": digest(rad),
        "classes": train.classes,
        "skipped_images": train.skipped + test.skipped,
    }
    if train.labels is not None:
        facts["holdings"] = {
            name: torch.bincount(train.labels[share], minlength=len(train.classes)).tolist()
            for name, share in shares.items()
        }
    return Setup({"validation": split.validation, "rad": split.rad, **shares}, rad, facts)


def _check_device(name: str) -> None:
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"engine.device = '{name}' cannot be used: {reason}. Set engine.device = 'cpu'.") from None


@dataclass(frozen=True)
class Site:
    """What the simulated participants of one run have in common in one process."""

    folder: RunFolder
    config: Config
    train: Images
    rows: dict[str, Tensor]
    rad: Tensor

    def shape(self) -> tuple[int, int]:
        return self.train.pixels.shape[1], self.train.pixels.shape[2]

    def untrained(self, number: int) -> Learner:
        """The client's networks before any training: each client has a beginning of its own."""
        model, config = self.config.model_of(number), self.config
        classes = len(self.train.classes) if METHODS[config.method].needs_labels else None
        learner = build_learner(model, config.ssl, *self.shape(), config.seed, "init", number, classes=classes)
        return learner.to(config.engine.device)

    def learner(self, number: int, round_number: int) -> Learner:
        """The client's networks as saved after a round; 0 is before any."""
        learner = self.untrained(number)
        if round_number:
            learner.load_state_dict(self.folder.load_client(client_name(number), round_number))
        return learner

    def pool(self) -> Tensor:
        """All clients' training images: the probe's training set."""
        return torch.cat([r for name, r in self.rows.items() if name not in ("validation", "rad")]).unique()


@lru_cache(maxsize=4)
def open_site(run_dir: str, config_toml: str) -> Site:
    """The run's data as this process sees it; read once per config."""
    folder, config = RunFolder(Path(run_dir)), parse_config(config_toml)
    rad, about = load_tensors(folder.path / "rad.safetensors")
    if digest(rad["pixels"]) != about["digest"]:
        raise ProtocolError(
            f"the RAD in '{run_dir}' does not match its digest {about['digest'][:12]}. Start the run again."
        )
    rows = load_tensors(folder.path / "split.safetensors")[0]
    return Site(folder, config, load_images(config.data, "train"), rows, rad["pixels"])


class ClientCache:
    """Clients in this process's memory, least recently used first out. Their state is always on disk too."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Client] = OrderedDict()

    def get(self, site: Site, number: int, limit: int) -> Client:
        """The client as it was after its newest round that is not after `limit`."""
        name = client_name(number)
        key = (str(site.folder.path), name)
        newest = site.folder.newest_client_round(name, limit)
        client = self._kept.pop(key, None)
        if client is None or client.round != newest or client.config != site.config:
            learner = site.learner(number, newest)
            own = site.train.subset(site.rows[name])
            labels = own.labels if METHODS[site.config.method].needs_labels else None
            client = Client(name, site.config, learner, own.pixels, site.rad, labels, newest)
        self._kept[key] = client
        self._shrink(site.config.engine.memory_mb * 2**20)
        return client

    def drop(self, site: Site, number: int) -> None:
        """Forget a client whose training was cut short: what is in memory belongs to no round."""
        self._kept.pop((str(site.folder.path), client_name(number)), None)

    def _shrink(self, budget: int) -> None:
        while len(self._kept) > 1 and sum(map(_bytes_of, self._kept.values())) > budget:
            self._kept.popitem(last=False)


def _bytes_of(client: Client) -> int:
    tensors = [client.pixels, *client.learner.state_dict().values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def evaluate(site: Site, number: int, learner: Learner, split: str) -> dict[str, float]:
    """Probe a frozen encoder on all classes and on the client's own ones; nothing without labels."""
    train, config = site.train, site.config
    if train.labels is None:
        return {}
    pool = site.pool()
    pool = pool[few_labels(train.labels[pool], config.evaluation.labels_per_class, config.seed)]
    held_out = load_images(config.data, "test") if split == "test" else train.subset(site.rows["validation"])
    if held_out.labels is None or not len(held_out):
        return {}
    encoder = learner.encoder
    fit = Labeled(extract_features(encoder, train.pixels[pool]), train.labels[pool])
    test = Labeled(extract_features(encoder, held_out.pixels), held_out.labels)
    results = {f"{name}_all": value for name, value in probe(fit, test, config.evaluation, config.seed).items()}
    own = train.labels[site.rows[client_name(number)]].unique()
    if len(own) > 1 and len(test.only(own).y):  # one class alone is always right
        scores = probe(fit.only(own), test.only(own), config.evaluation, config.seed)
        results |= {f"{name}_own": value for name, value in scores.items()}
    for share in config.evaluation.label_shares if split == "test" else ():
        few = share_of_labels(fit.y, share, config.seed)
        scores = probe(Labeled(fit.x[few], fit.y[few]), test, config.evaluation, config.seed)
        results |= {f"{name}_{share:.0%}": value for name, value in scores.items()}
        tuned = finetune(encoder, train.subset(pool[few]), held_out, config.evaluation, config.seed)
        results[f"finetune_{share:.0%}"] = tuned
    return results


def export_model(site: Site, number: int, client: Client) -> None:
    """The trained encoder and a card that says what it is, in the participant's own folder."""
    name = client_name(number)
    model = site.config.model_of(number)
    encoder = client.learner.encoder
    card = {
        "client": name,
        "encoder": model.encoder,
        "parameters": count_parameters(encoder),
        "input": {"channels": site.shape()[0], "side": site.shape()[1], "mean": 0.5, "std": 0.25},
        "method": site.config.method,
        "round": client.round,
        "seed": site.config.seed,
        "rad_digest": digest(site.rad),
        "hetero_ssfl": __version__,
    }
    save_tensors(site.folder.path / "models" / name / "encoder.safetensors", encoder.state_dict(), card)
    site.folder.write_json(f"models/{name}/card.json", card)


def final_learner(site: Site, number: int) -> Learner:
    """The client's networks as they are after its last round."""
    return site.learner(number, site.folder.newest_client_round(client_name(number), site.config.rounds))


def rad_features(site: Site, trained: bool) -> list[Tensor]:
    """Every client's encoder output on the RAD, before or after training: the input of `mutual_cka`."""
    learners = (final_learner(site, k) if trained else site.untrained(k) for k in range(site.config.clients.count))
    return [extract_features(learner.encoder, site.rad) for learner in learners]
