"""One participant as its ClientApp sees it: its images, its model, its own disk. The same on every engine."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ...config import Config, ModelConfig, SslConfig
from ...data import Images, to_input
from ...methods import method_class
from ...models import BUILTIN, Learner, build_learner, count_parameters, parse_spec
from ...plugins import GIVEN
from ...runs import StateFolder


@dataclass(frozen=True)
class Participant:
    name: str
    config: Config
    model: ModelConfig
    seed_scope: tuple[str | int, ...]
    """Its first weights are drawn from the run's seed and this, so that each participant has a beginning of its own."""
    rad: Tensor
    own: Callable[[], Images]
    """What it trains on, read when it is needed."""
    states: StateFolder
    exports: Path
    """Where the finished model goes."""
    labeled: Callable[[], Images]
    """What a probe may learn from."""
    held_out: Callable[[str], Images]
    """What it is tested on: `validation` or `test`."""

    @cached_property
    def images(self) -> Images:
        return self.own()

    @property
    def shape(self) -> tuple[int, int]:
        """Channels and side of every image, which are the RAD's; of other data the first and the last axis."""
        return self.rad.shape[1], self.rad.shape[-1]

    @property
    def classes(self) -> int | None:
        """Of the supervised baseline's classifier."""
        return len(self.images.classes) if method_class(self.config.method).needs_labels else None

    def untrained(self) -> Learner:
        ssl, seed, scope = self.config.ssl, self.config.seed, self.seed_scope
        example = blank(self.rad.shape[1:], self.rad.dtype)
        learner = build_learner(self.model, ssl, *self.shape, seed, *scope, classes=self.classes, example=example)
        return learner.to(self.config.engine.device)

    @property
    def parameters(self) -> int:
        """Of its encoder; built once for all participants of a kind, of whom there may be a thousand in one process.

        The name of an object may stand for another one in the next run.
        """
        count = _parameters.__wrapped__ if self.model.encoder.startswith(f"{GIVEN}:") else _parameters
        return count(self.model, self.config.ssl, tuple(self.rad.shape[1:]), self.rad.dtype, self.config.engine.device)

    @property
    def kind(self) -> Hashable:
        """Equal for participants whose networks differ in nothing but saved tensors; only of ours can that be known."""
        if parse_spec(self.model.encoder)[0] not in BUILTIN:
            return None
        return self.model, self.config.ssl, self.shape, self.classes, self.config.engine.device

    def learner(self, round_number: int, spare: Learner | None = None) -> Learner:
        """The networks as saved after a round, 0 is before any; `spare` ones of this kind save building them."""
        learner = spare if spare and round_number else self.untrained()
        if round_number:
            learner.load_state_dict(self.states.load(round_number))
        return learner

    def newest(self) -> Learner:
        return self.learner(self.states.newest(self.config.rounds))


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Two inputs for a network to be tried on."""
    return to_input(torch.zeros(2, *shape, dtype=dtype))


@lru_cache(maxsize=64)
def _parameters(model: ModelConfig, ssl: SslConfig, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> int:
    learner = build_learner(model, ssl, shape[0], shape[-1], 0, example=blank(shape, dtype))
    return count_parameters(learner.to(device).encoder)  # the device is tried as well
