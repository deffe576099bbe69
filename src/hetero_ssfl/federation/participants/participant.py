"""One participant as its ClientApp sees it: its images, its model and its files. The same on every engine."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ...config import Config, ModelConfig, SslConfig
from ...data import Images, to_input
from ...errors import ProtocolError
from ...learning.encoders import BUILTIN, parse_spec
from ...learning.encoders.whitening import fit_whitening
from ...learning.learner import Learner, build_learner, count_parameters
from ...methods import HeteroSSFL, method_class
from ...plugins import GIVEN
from ...runs.states import StateFolder
from .identity import Identity
from .record import RecordFile

NOBODY = Identity()  # without long-term keys


@dataclass(frozen=True)
class Participant:
    """What a client process works for: images, a model, the RAD and a folder, whatever the site."""

    name: str
    config: Config
    model: ModelConfig
    seed_scope: tuple[str | int, ...]
    """Seeds the initial weights together with the run's seed, so that participants start from different weights."""
    rad: Tensor
    own: Callable[[], Images]  # returns the training images. They are read when needed
    states: StateFolder
    exports: Path  # folder of the finished model
    labeled: Callable[[], Images]  # returns the images that a probe is trained on
    held_out: Callable[[str], Images]  # returns the images that a probe is tested on; takes `validation` or `test`
    evaluates: tuple[str, ...] = ("validation", "test")  # the splits on which its owner allows probes
    balanced: bool = False
    """Whether figures must not reveal how many images of a class it holds, because they leave its owner's machine."""
    has_rad: bool = True
    """False for a node that introduces itself before the RAD has arrived; `rad` is then one blank image."""
    identity: Identity = NOBODY
    node_record: RecordFile | None = None
    """What its node has spent and revealed in all federations; by default it is counted in each run folder."""
    budget: tuple[float, float] | None = None
    """The epsilon and delta that it may spend in all federations together, if its owner set a limit."""
    known_classes: int | None = None  # the number of classes of the run, if it is known without reading images
    trained: int | None = None
    """The last round in which it trained, if the run folder says so; its state of that round must exist."""

    @cached_property
    def images(self) -> Images:
        return self.own()

    @property
    def record(self) -> RecordFile:
        return self.node_record or RecordFile(self.states.path.parent / f"privacy-{self.name}.json")

    @property
    def shape(self) -> tuple[int, int]:
        """Channels and side of the RAD's images; for other data, the sizes of the first and the last axis."""
        return self.rad.shape[1], self.rad.shape[-1]

    @property
    def classes(self) -> int | None:
        """Number of classes for the supervised baseline; None for other methods."""
        if not method_class(self.config.method).needs_labels:
            return None
        return len(self.images.classes) if self.known_classes is None else self.known_classes

    @property
    def coordinates(self) -> int | None:
        """Number of coordinates that the method's head predicts; None if there is no head."""
        alignment = self.config.alignment
        uses = issubclass(method_class(self.config.method), HeteroSSFL) and alignment.distance == "coordinates"
        return alignment.coordinates if uses else None

    def untrained(self) -> Learner:
        ssl, seed, scope = self.config.ssl, self.config.seed, self.seed_scope
        example = blank(self.rad.shape[1:], self.rad.dtype)
        learner = build_learner(
            self.model, ssl, *self.shape, seed, *scope,
            classes=self.classes, coordinates=self.coordinates, example=example,
        )  # fmt: skip
        fit_whitening(learner, self.rad)
        return learner.to(self.config.engine.device)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of parameters and of features of its encoder.

        Cached per architecture, because a process may hold a thousand participants. Encoders passed as Python objects
        are not cached: their name may refer to another object in the next run.
        """
        measure = _sizes_of.__wrapped__ if self.model.encoder.startswith(f"{GIVEN}:") else _sizes_of
        shape, device = tuple(self.rad.shape[1:]), self.config.engine.device
        return measure(self.model, self.config.ssl, shape, self.rad.dtype, device)

    @property
    def kind(self) -> Hashable:
        """Equal for participants whose networks differ only in saved tensors; None if the encoder is not built in."""
        if parse_spec(self.model.encoder)[0] not in BUILTIN:
            return None
        return self.model, self.config.ssl, self.shape, self.classes, self.coordinates, self.config.engine.device

    def learner(self, round_number: int, spare: Learner | None = None) -> Learner:
        """Return the networks as saved after a round, loaded into `spare` ones of its kind; round 0 is untrained."""
        if not round_number:
            return self.untrained()
        learner = spare or self.untrained()
        try:
            learner.load_state_dict(self.states.load(round_number))
        except RuntimeError:
            raise ProtocolError(
                f"the networks that {self.name} saved in round {round_number} do not fit: its encoder's code or the "
                "config's [ssl] has changed since. Undo the change, or start another run."
            ) from None
        return learner

    def newest_round(self, limit: int) -> int:
        """Return the round of its newest state up to `limit`; 0 for an untrained participant."""
        return self.states.newest(limit) if self.trained is None else self.trained

    def newest(self) -> Learner:
        return self.learner(self.newest_round(self.config.rounds))

    def encoder(self, trained: bool) -> nn.Module:
        """Return only the encoder, in evaluation mode. Unlike all networks, it does not need the method or the data."""
        example = blank(self.rad.shape[1:], self.rad.dtype)
        ssl, seed = self.config.ssl, self.config.seed
        module = build_learner(self.model, ssl, *self.shape, seed, *self.seed_scope, example=example).encoder
        fit_whitening(module, self.rad)
        newest = self.states.newest(self.config.rounds) if trained else 0
        if newest:
            saved = self.states.load(newest).items()
            own = {key.removeprefix("encoder."): value for key, value in saved if key.startswith("encoder.")}
            module.load_state_dict(own)
        return module.to(self.config.engine.device).eval()


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a blank batch of two inputs, to try a network on."""
    return to_input(torch.zeros(2, *shape, dtype=dtype))


@lru_cache(maxsize=64)
def _sizes_of(
    model: ModelConfig, ssl: SslConfig, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[int, int]:
    learner = build_learner(model, ssl, shape[0], shape[-1], 0, example=blank(shape, dtype))
    first = learner.projector[0]
    assert isinstance(first, nn.Linear)
    return count_parameters(learner.to(device).encoder), first.in_features  # also checks the device
