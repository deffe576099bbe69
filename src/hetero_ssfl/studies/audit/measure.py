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
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ...federation.engines.forkserver import end_with_parent
from ...federation.start import torch_threads
from ...runs.folder import RunFolder
from ...seeding import rng_for
from . import attacks
from .attacks import hit_rate, hit_rate_of_chance
from .scene import OWN, UNTRAINED, Compared, Scene, Shadow, open_scene

ATTACKER = (
    "The attacker is the server: it follows the protocol, keeps what it receives, and no client helps it.",
    "It knows the config, the RAD, the mean kernel, and the last contribution of each client in the form of the view.",
    "It knows each client's architecture and its initial weights, which follow from the config's seed and the name.",
    "It has public images with labels that no client trains on: the validation images and the RAD.",
    "It is told how many classes each client holds, and candidate images of these classes, of which some are members.",
    "It does not use earlier rounds, losses, accuracies or times.",
)
REFERENCES = 4  # shadow clients that tell how much the views of an image agree anyway


def results(
    scores: Mapping[str, Mapping[str, Compared]],
    held: Sequence[Sequence[int]],
    guesses: Mapping[str, Sequence[Sequence[int]]],
    views: Sequence[str],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Return the metrics of each view over all clients, and those of each client, as JSON.

    `scores` are those of a client's own encoder, of the untrained one, and of the one stolen from each view; `held`
    and `guesses` are the classes of each client, and those guessed from each view, if there is anything to guess.
    """

    def of_client(number: int, compared: Mapping[str, Compared]) -> dict[str, Any]:
        metrics = {name: _metrics([each]) for name, each in compared.items()}
        named = {view: [classes[label] for label in guesses[view][number]] if guesses else [] for view in views}
        found = {view: {**metrics.pop(view), "guessed": named[view]} for view in views}
        return {"holds": [classes[label] for label in held[number]], **metrics, "views": found}

    everyone = {name: [compared[name] for compared in scores.values()] for name in (OWN, UNTRAINED, *views)}
    hits = {view: hit_rate(of_clients, held) for view, of_clients in guesses.items()}
    own = everyone[OWN]
    return {
        "views": [{"view": name, **_metrics(each), "class_hits": hits.get(name)} for name, each in everyone.items()],
        "candidates": {"members": sum(len(c.members) for c in own), "others": sum(len(c.others) for c in own)},
        "clients": {name: of_client(number, compared) for number, (name, compared) in enumerate(scores.items())},
    }


def _metrics(compared: Sequence[Compared]) -> dict[str, float]:
    """Return means over clients; membership is measured over the images of all."""
    scores = [attacks.standardised(each.members, each.others) for each in compared]
    members, others = (torch.cat(parts) for parts in zip(*scores, strict=True))
    return {
        "members_found": attacks.true_positive_rate(members, others),
        "auc": attacks.area_under_curve(members, others),
        "cka": fmean(each.cka for each in compared),
        "probe": fmean(each.probe for each in compared),
    }


def measure(
    folder: RunFolder, steps: int, shadows: int, workers: int = 1, done: Callable[[float], None] = lambda _: None
) -> dict[str, Any]:
    """Attack every client of a run, and return what a report shows as JSON.

    `steps` is the number of gradient steps of each shadow and each stolen network. `done` is called with the completed
    fraction of the work.
    """
    scene, scores = open_scene(folder), dict[str, Mapping[str, Compared]]()
    work = shadows + len(scene.everyone) * len(scene.views)  # a stolen network takes about as long as a shadow client
    with _pool(scene, folder.path.resolve(), workers) as run, torch_threads(scene.config.engine.threads):
        hired: list[Shadow] = []
        for shadow in run(partial(Scene.shadow, steps=steps), range(shadows)):
            hired.append(shadow)
            done(len(hired) / work)
        guesses = scene.guesses(hired)
        attack = partial(Scene.attack, shadows=hired[:REFERENCES], steps=steps)
        for participant, compared in zip(scene.everyone, run(attack, range(len(scene.everyone))), strict=True):
            scores[participant.name] = compared
            done((shadows + len(scores) * len(scene.views)) / work)
    rng, classes = rng_for(scene.config.seed, "audit", "chance"), scene.data.train.classes
    found = results(scores, scene.held, guesses, [str(view) for view in scene.views], classes)
    hits, limit = hit_rate_of_chance(scene.held, len(classes), rng) if guesses else (None, None)
    chance = {
        "class_hits": hits,
        "class_hits_95": limit,
        "members_found": attacks.FALSE_POSITIVES,
        "members_found_95": attacks.true_positive_rate_of_chance(**found["candidates"], rng=rng),
        "auc": 0.5,
    }
    return {"round": scene.state.round, "form": scene.config.alignment.form, "chance": chance, **found}


Run = Callable[[Callable[..., Any], Sequence[int]], Iterator[Any]]
"""Yields the results of a method of the scene for some numbers, in their order."""


@contextmanager
def _pool(scene: Scene, path: Path, workers: int) -> Iterator[Run]:
    """Share calls among processes; one worker is this process."""
    if workers == 1:
        yield lambda method, numbers: map(partial(method, scene), numbers)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent) as pool:
        yield lambda method, numbers: pool.map(partial(_call, path, method), numbers)


def _call(path: Path, method: Callable[..., Any], number: int) -> Any:
    scene = _scene(path)
    with torch_threads(scene.config.engine.threads):
        return method(scene, number)


@lru_cache(maxsize=1)
def _scene(path: Path) -> Scene:
    """Open the scene once in every process."""
    return open_scene(RunFolder.open(path))
