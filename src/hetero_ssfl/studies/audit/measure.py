"""Attack the clients of a finished run from what their server has, and measure how well it works.

1. The attacker trains shadow clients on public images, as the run trained its clients.
2. Class mix: a classifier learns from the shadow clients' kernels which classes a client holds.
3. Stealing: for each client and view, a network is trained until its kernel on the RAD is the client's.
4. Membership: an image counts as a member if the stolen encoder's features of its random views agree more than those
   of the shadow clients do.

ATTACKER says what the attacker knows. Everything else, such as the clients' networks, images and labels, is used only
to measure its success. The run folder is only read.

Shadow clients and attacked clients are independent of each other, so several processes share the work. The figures do
not depend on their number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch

from ...federation.engines.forkserver import end_with_parent
from ...federation.start import torch_threads
from ...runs.folder import RunFolder
from ...seeding import rng_for
from .class_mix import hit_rate, hit_rate_of_chance
from .membership import (
    FALSE_POSITIVES,
    area_under_curve,
    standardised,
    true_positive_rate,
    true_positive_rate_of_chance,
)
from .scene import OWN, UNTRAINED, Scene, Shadow, open_scene
from .victim import Compared

ATTACKER = (
    "The attacker is the server: it follows the protocol, keeps what it receives, and no client helps it.",
    "It knows the config, the RAD, the mean kernel, and the last contribution of each client in the form of the view.",
    "It knows each client's architecture and its initial weights, which follow from the config's seed and the name.",
    "It has public images with labels that no client trains on: the validation images and the RAD.",
    "It is told how many classes each client holds, and candidate images of these classes, of which some are members.",
    "It does not use earlier rounds, losses, accuracies or times.",
)
REFERENCES = 4  # shadow clients that tell how much the views of an image agree anyway


@dataclass(frozen=True)
class ClientAudit:
    held: Sequence[int]
    compared: Mapping[str, Compared]
    """The client's own encoder, the untrained one, and the one stolen from each view."""
    guessed: Mapping[str, Sequence[int]]
    """The classes guessed from each view; empty if there is nothing to guess."""


@dataclass(frozen=True)
class Audit:
    round: int
    form: str
    classes: tuple[str, ...]
    views: Sequence[str]
    clients: Mapping[str, ClientAudit]
    class_chance: tuple[float, float] | None
    """Hit rate of random guesses: mean, and what 5 % of them exceed at most. None if there is nothing to guess."""
    member_chance: float
    """The true-positive rate that 5 % of scores without information exceed at most."""

    def to_json(self) -> dict[str, Any]:
        """Return everything that a report shows. Every row of `views` is over all clients."""
        everyone = list(self.clients.values())
        own = [client.compared[OWN] for client in everyone]
        chance, limit = self.class_chance or (None, None)
        return {
            "round": self.round,
            "form": self.form,
            "views": [
                {"view": name, **_metrics([c.compared[name] for c in everyone]), "class_hits": self._hit_rate(name)}
                for name in (OWN, UNTRAINED, *self.views)
            ],
            "chance": {
                "class_hits": chance,
                "class_hits_95": limit,
                "members_found": FALSE_POSITIVES,
                "members_found_95": self.member_chance,
                "auc": 0.5,
            },
            "candidates": {"members": sum(len(c.members) for c in own), "others": sum(len(c.others) for c in own)},
            "clients": {name: self._client(client) for name, client in self.clients.items()},
        }

    def _hit_rate(self, view: str) -> float | None:
        if self.class_chance is None or view not in self.views:
            return None
        return hit_rate([c.guessed[view] for c in self.clients.values()], [c.held for c in self.clients.values()])

    def _client(self, client: ClientAudit) -> dict[str, Any]:
        def named(labels: Sequence[int]) -> list[str]:
            return [self.classes[label] for label in labels]

        metrics = {name: _metrics([compared]) for name, compared in client.compared.items()}
        views = {view: {**metrics[view], "guessed": named(client.guessed.get(view, ()))} for view in self.views}
        return {"holds": named(client.held), OWN: metrics[OWN], UNTRAINED: metrics[UNTRAINED], "views": views}


def _metrics(compared: Sequence[Compared]) -> dict[str, float]:
    """Return means over clients; membership is measured over the images of all."""
    members, others = (
        torch.cat(scores) for scores in zip(*(standardised(c.members, c.others) for c in compared), strict=True)
    )
    return {
        "members_found": true_positive_rate(members, others),
        "auc": area_under_curve(members, others),
        "cka": fmean(each.cka for each in compared),
        "probe": fmean(each.probe for each in compared),
    }


def measure(
    folder: RunFolder, steps: int, shadows: int, workers: int = 1, done: Callable[[float], None] = lambda _: None
) -> Audit:
    """Attack every client of a run. `steps` is the number of gradient steps of each shadow and each stolen network.

    `done` is called with the completed fraction of the work.
    """
    scene = open_scene(folder)
    path, count = folder.path.resolve(), len(scene.everyone)
    share = 1 / (shadows + count * len(scene.views))  # a stolen network takes about as long as a shadow client
    with _pool(workers) as run, torch_threads(scene.config.engine.threads):
        hired: list[Shadow] = []
        for shadow in run(partial(_call, path, Scene.shadow, steps=steps), range(shadows)):
            hired.append(shadow)
            done(len(hired) * share)
        guesses = scene.guesses(hired)
        attack = partial(_call, path, Scene.attack, shadows=hired[:REFERENCES], steps=steps)
        clients: dict[str, ClientAudit] = {}
        for compared in run(attack, range(count)):
            number = len(clients)
            mix = {view: by_client[number] for view, by_client in guesses.items()}
            clients[scene.everyone[number].name] = ClientAudit(scene.held[number], compared, mix)
            done((shadows + len(clients) * len(scene.views)) * share)
    rng, classes = rng_for(scene.config.seed, "audit", "chance"), scene.data.train.classes
    own = [client.compared[OWN] for client in clients.values()]
    return Audit(
        round=scene.state.round,
        form=scene.config.alignment.form,
        classes=classes,
        views=[str(view) for view in scene.views],
        clients=clients,
        class_chance=hit_rate_of_chance(scene.held, len(classes), rng) if guesses else None,
        member_chance=true_positive_rate_of_chance(
            sum(len(c.members) for c in own), sum(len(c.others) for c in own), rng
        ),
    )


T = TypeVar("T")
Run = Callable[[Callable[[int], Any], Sequence[int]], Iterator[Any]]
"""Yields the results of a function for some numbers, in their order."""


@contextmanager
def _pool(workers: int) -> Iterator[Run]:
    """Share calls among processes; one worker is this process."""
    if workers == 1:
        yield lambda function, numbers: map(function, numbers)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent) as pool:
        yield lambda function, numbers: pool.map(function, numbers)


def _call(path: Path, work: Callable[..., T], number: int, **options: Any) -> T:
    """Call a method of the scene, which every process opens once."""
    scene = _scene(path)
    with torch_threads(scene.config.engine.threads):
        return work(scene, number, **options)


@lru_cache(maxsize=1)
def _scene(path: Path) -> Scene:
    """Open a run once per process."""
    return open_scene(RunFolder.open(path))
