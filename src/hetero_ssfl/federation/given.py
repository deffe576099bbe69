"""Participants handed over in Python: their data and encoders are objects of this process (api.py).

A node's settings name the run folder and the participant. Both are looked up among what this process was given; workers
have it too, because they are forked from this process.
"""

import uuid
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..config import Config, ModelConfig
from ..data import Images, digest, joined, random_view
from ..errors import ConfigError, DataError, RunError
from ..methods import method_class
from ..models import build_learner, output_width
from ..objectives import gram
from ..plugins import Given
from ..runs import RunFolder
from .participant import Participant, blank
from .simulated import Setup, check_device


@dataclass(frozen=True)
class Member:
    """One participant with its data, already divided."""

    name: str
    model: ModelConfig
    train: Images
    validation: Images
    test: Images

    def fingerprint(self) -> dict[str, object]:
        sha = sha256()
        for images in (self.train, self.validation, self.test):
            labels = [] if images.labels is None else images.labels.tolist()
            sha.update(f"{digest(images.pixels)} {images.pixels.dtype} {labels} {images.classes}".encode())
        return {"data": sha.hexdigest(), "encoder": self.model.encoder, "examples": len(self.train)}


@dataclass(frozen=True, eq=False)
class GivenSite:
    """The participants of one run that this process was given."""

    members: tuple[Member, ...]
    rad: Tensor
    given: Given
    """The user's own functions, classes and modules, which the config knows by name."""

    def participant(self, folder: RunFolder, number: int, config: Config) -> Participant:
        member = self.members[number]
        return Participant(
            name=member.name,
            config=config,
            model=config.model_of(number),
            seed_scope=("init", number),
            rad=self.rad,
            own=lambda: member.train,
            states=folder.states(member.name),
            exports=folder.path / "models" / member.name,
            labeled=lambda: self.pool,
            held_out=self.held_out,
        )

    @cached_property
    def pool(self) -> Images:
        """All labeled training data: what a probe may learn from."""
        return joined([m.train for m in self.members])

    def held_out(self, split: str) -> Images:
        return joined([m.test if split == "test" else m.validation for m in self.members])


# --- before a run ---


def set_up_given(config: Config, site: GivenSite) -> Setup:
    """Try everything once that a user may have brought. Raises ConfigError or DataError with a remedy."""
    check_device(config.engine.device)
    _check_shapes(config, site)
    if method_class(config.method).needs_labels and any(m.train.labels is None for m in site.members):
        raise ConfigError(f"method '{config.method}' needs labels, but not every client has them. Choose another.")
    example = blank(site.rad.shape[1:], site.rad.dtype)
    view = random_view(site.rad[:2], config.views, torch.Generator().manual_seed(0))
    for member in site.members:
        learner = build_learner(member.model, config.ssl, example.shape[1], example.shape[-1], 0, example=example)
        output_width(learner.encoder, member.model.encoder, view)
    gram(torch.eye(4, 3), config.alignment)
    facts: dict[str, object] = {
        "federation": uuid.uuid4().hex,
        "rad_digest": digest(site.rad),
        "classes": site.members[0].train.classes,
        "skipped_images": sum(m.train.skipped + m.test.skipped for m in site.members),
        "given": {m.name: m.fingerprint() for m in site.members},
    }
    holdings = {
        m.name: torch.bincount(m.train.labels, minlength=len(m.train.classes)).tolist()
        for m in site.members
        if m.train.labels is not None
    }
    if holdings:
        facts["holdings"] = holdings
    return Setup(site.rad, facts, {})


def _check_shapes(config: Config, site: GivenSite) -> None:
    wanted, dtype = tuple(site.rad.shape[1:]), site.rad.dtype
    parts = [(m.name, m.train.pixels) for m in site.members]
    parts += [(f"the test data of {m.name}", m.test.pixels) for m in site.members if len(m.test)]
    for who, data in parts:
        if tuple(data.shape[1:]) != wanted or data.dtype != dtype:
            remedy = "Every client must read the RAD: bring all data into one shape and type"
            if dtype == data.dtype == torch.uint8:
                alike = {"data.side": max(wanted[1:]), "data.channels": wanted[0]}
                remedy = f"settings={alike} makes all images alike"
            raise DataError(
                f"{who}: {data.dtype} of shape {tuple(data.shape[1:])}, but the RAD has {dtype} of {wanted}. {remedy}."
            )
    if config.views.function is None and (dtype != torch.uint8 or wanted[1] != wanted[2]):
        what = "not square" if dtype == torch.uint8 else f"{dtype}, not uint8 images"
        raise ConfigError(
            f"the data, of shape {wanted}, are {what}, and the built-in views know square images only. "
            "Give your own with views=, a function (batch, generator) -> batch; or set data.side for images."
        )


# --- which process has what ---

_sites: WeakValueDictionary[str, GivenSite] = WeakValueDictionary()


def host(folder: RunFolder, site: GivenSite) -> None:
    """For as long as `site` is kept alive, this process and those forked from it answer for the run."""
    _sites[str(folder.path.resolve())] = site


def site_of(run_dir: str) -> GivenSite:
    if run_dir not in _sites:
        raise RunError(
            f"the clients of '{run_dir}' were handed over from Python, and this process has not got them. "
            "Call federate(...) again with the same arguments."
        )
    return _sites[run_dir]
