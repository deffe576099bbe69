"""One participant as its ClientApp sees it: its images, its model, its own disk. The same on every engine."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import __version__
from ..config import Config, ModelConfig, SslConfig
from ..data import MEAN, STD, Images, digest, to_input
from ..evaluation import Labeled, extract_features, few_labels, finetune, probe, share_of_labels
from ..methods import method_class
from ..models import BUILTIN, Learner, build_learner, count_parameters, parse_spec
from ..plugins import GIVEN
from ..runs import StateFolder, save_tensors, write_json
from ..training import Client


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


class Kept(NamedTuple):
    client: Client
    kind: Hashable
    size: int
    """Bytes of its networks and images."""


class ClientCache:
    """Clients in this process's memory, least recently used first out. Their state is always on disk too.

    Of each kind, the networks of the last one to leave serve the next one to come.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, Kept] = OrderedDict()
        self._spare: dict[Hashable, Learner] = {}

    def get(self, participant: Participant, limit: int) -> Client:
        """The client as it was after its newest round that is not after `limit`."""
        key, budget = participant.states.path, participant.config.engine.memory_mb * 2**20
        newest = participant.states.newest(limit)
        kept = self._kept.pop(key, None)
        if kept is None or kept.client.round != newest or kept.client.config != participant.config:
            labels = participant.images.labels if participant.classes else None
            learner = participant.learner(newest, self._spare.pop(participant.kind, None))
            pixels = participant.images.pixels
            client = Client(participant.name, participant.config, learner, pixels, participant.rad, labels, newest)
            kept = Kept(client, participant.kind, move_images(client, budget))
        self._kept[key] = kept
        self._shrink(budget)
        return kept.client

    def clear(self) -> None:
        self._kept.clear()
        self._spare.clear()

    def drop(self, participant: Participant) -> None:
        """Forget a client whose training was cut short: what is in memory belongs to no round."""
        self._kept.pop(participant.states.path, None)

    def _shrink(self, budget: int) -> None:
        while len(self._kept) > 1 and sum(kept.size for kept in self._kept.values()) > budget:
            _, oldest = self._kept.popitem(last=False)
            if oldest.kind:
                self._spare[oldest.kind] = oldest.client.learner


def move_images(client: Client, budget: int) -> int:
    """Keep images and RAD on the client's accelerator if they fit beside its networks; return the bytes it occupies."""
    networks, pixels, rad = map(_bytes_of, (client.learner.state_dict().values(), [client.pixels], [client.rad]))
    if client.device.type == "cpu":
        return networks + pixels  # the RAD is one tensor for all clients of this process
    if networks + pixels + rad > budget:
        return networks
    client.pixels, client.rad = client.pixels.to(client.device), client.rad.to(client.device)
    return networks + pixels + rad


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def evaluate(participant: Participant, learner: Learner, split: str) -> dict[str, float]:
    """Probe a frozen encoder on all classes and on the participant's own ones; nothing without labels."""
    config, own = participant.config, participant.images.labels
    train, held_out = participant.labeled(), participant.held_out(split)
    if train.labels is None or held_out.labels is None or not len(held_out):
        return {}
    train = train.subset(few_labels(train.labels, config.evaluation.labels_per_class, config.seed))
    assert train.labels is not None
    encoder = learner.encoder
    fit = Labeled(extract_features(encoder, train.pixels), train.labels)
    test = Labeled(extract_features(encoder, held_out.pixels), held_out.labels)
    results = {f"{name}_all": value for name, value in probe(fit, test, config.evaluation, config.seed).items()}
    held = train.labels[:0] if own is None else own.unique()
    if len(held) > 1 and len(test.only(held).y):  # one class alone is always right
        scores = probe(fit.only(held), test.only(held), config.evaluation, config.seed)
        results |= {f"{name}_own": value for name, value in scores.items()}
    for share in config.evaluation.label_shares if split == "test" else ():
        few = share_of_labels(fit.y, share, config.seed)
        scores = probe(Labeled(fit.x[few], fit.y[few]), test, config.evaluation, config.seed)
        results |= {f"{name}_{share:.0%}": value for name, value in scores.items()}
        tuned = finetune(encoder, train.subset(few), held_out, config.evaluation, config.seed)
        results[f"finetune_{share:.0%}"] = tuned
    return results


def export_model(participant: Participant, client: Client) -> None:
    """The trained encoder and a card that says what it is, on the participant's own disk."""
    encoder, config = client.learner.encoder, participant.config
    channels, side = participant.shape
    wants: dict[str, object] = {"shape": list(participant.rad.shape[1:])}
    if participant.rad.dtype == torch.uint8:
        wants |= {"channels": channels, "side": side, "mean": MEAN, "std": STD}
    card = {
        "client": participant.name,
        "encoder": participant.model.encoder,
        "parameters": count_parameters(encoder),
        "input": wants,
        "method": config.method,
        "round": client.round,
        "seed": config.seed,
        "rad_digest": digest(participant.rad),
        "hetero_ssfl": __version__,
    }
    save_tensors(participant.exports / "encoder.safetensors", encoder.state_dict(), card)
    write_json(participant.exports / "card.json", card)
