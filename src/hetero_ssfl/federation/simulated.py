"""Participants simulated on one machine: each a row of a run folder's split.

A node's settings name its place (`run-dir`, `partition-id`); everything else comes from the config in the message.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..config import Config, parse_config
from ..data import Images, digest, load_images, load_rad, load_rad_alone, split_training_images
from ..errors import ConfigError, ProtocolError
from ..methods import method_class
from ..models import build_learner
from ..runs import RunFolder, load_tensors, save_tensors
from .participant import Participant

RUN_DIR_VARIABLE = "HETERO_SSFL_RUN_DIR"


def client_name(number: int) -> str:
    """Sorting by name is sorting by number, up to a million clients."""
    return f"client-{number:03d}" if number < 1000 else f"client-x{number:06d}"


@dataclass(frozen=True)
class Setup:
    """A run's data, divided. Made before anything is written, so that what cannot work leaves nothing behind."""

    rad: Tensor
    facts: dict[str, object]
    split: dict[str, Tensor] | None = None
    """None where participants bring their own images."""

    def write(self, folder: RunFolder) -> None:
        if self.split is not None:
            save_tensors(folder.path / "split.safetensors", self.split)
        save_tensors(folder.path / "rad.safetensors", {"pixels": self.rad}, {"digest": digest(self.rad)})
        folder.write_json("facts.json", self.facts)


def set_up(config: Config) -> Setup:
    """Divide the images and try every model once. Raises ConfigError or DataError with a remedy."""
    train, test = load_images(config.data, "train"), load_images(config.data, "test")
    split = split_training_images(config, train)
    rad = load_rad(config, train, split)
    check_device(config.engine.device)
    if method_class(config.method).needs_labels and train.labels is None:
        raise ConfigError(
            f"method '{config.method}' needs labels, but '{config.data.source}' has none. Choose another."
        )
    for model in {config.model_of(k) for k in range(config.clients.count)}:
        build_learner(model, config.ssl, *train.pixels.shape[1:3], config.seed)
    shares = {client_name(k): share for k, share in enumerate(split.clients)}
    facts: dict[str, object] = {
        "federation": uuid.uuid4().hex,
        "rad_digest": digest(rad),
        "classes": train.classes,
        "skipped_images": train.skipped + test.skipped,
    }
    if train.labels is not None:
        facts["holdings"] = {
            name: torch.bincount(train.labels[share], minlength=len(train.classes)).tolist()
            for name, share in shares.items()
        }
    return Setup(rad, facts, {"validation": split.validation, "rad": split.rad, **shares})


def set_up_for_nodes(config: Config, nodes: Sequence[Path] = ()) -> Setup:
    """Participants bring their own images and models: the server has the RAD, and their files' names if on one disk."""
    if config.rad.source is None:
        raise ConfigError(
            "rad.source is not set, but the server of a federation has no images of its own. "
            "Name the shared unlabeled data set with rad.source."
        )
    rad = load_rad_alone(config)
    facts: dict[str, object] = {"federation": uuid.uuid4().hex, "rad_digest": digest(rad), "skipped_images": 0}
    if nodes:
        facts["nodes"] = [str(path.resolve()) for path in nodes]
    return Setup(rad, facts)


def check_device(name: str) -> None:
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

    def participant(self, number: int) -> Participant:
        name = client_name(number)
        return Participant(
            name=name,
            config=self.config,
            model=self.config.model_of(number),
            seed_scope=("init", number),
            rad=self.rad,
            own=lambda: self.train.subset(self.rows[name]),
            states=self.folder.states(name),
            exports=self.folder.path / "models" / name,
            labeled=self.pool,
            held_out=self.held_out,
        )

    def pool(self) -> Images:
        """All clients' training images: the probe's training set."""
        rows = [rows for name, rows in self.rows.items() if name not in ("validation", "rad")]
        return self.train.subset(torch.cat(rows).unique())

    def held_out(self, split: str) -> Images:
        if split == "test":
            return load_images(self.config.data, "test")
        return self.train.subset(self.rows["validation"])


def run_dir_of(node_config: Mapping[str, object]) -> str:
    """Where the run folder is: a worker is told; an actor of Flower's simulation inherits it."""
    found = node_config.get("run-dir") or os.environ.get(RUN_DIR_VARIABLE)
    if not found:
        raise ProtocolError(
            f"this node has neither settings nor a run folder. Start it with node-config 'settings=\"node.toml\"', "
            f"or set {RUN_DIR_VARIABLE}."
        )
    return str(found)


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
