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
from functools import cached_property, lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import Config
from ...data import Images, random_view, to_input
from ...errors import RunError
from ...federation.engines.forkserver import end_with_parent
from ...federation.participants import LocalSite, SplitData
from ...federation.participants.participant import Participant
from ...federation.start import torch_threads
from ...kernels.cka import factor_cka
from ...kernels.consensus import Averaging
from ...kernels.contribution import trace_of
from ...kernels.factor import kernel_factor
from ...kernels.mean import combine_sketches
from ...learning.alignment import Alignment
from ...learning.features import extract_features
from ...learning.learner import Learner, build_learner
from ...learning.probes import Labeled, few_labels, probe
from ...learning.training import TrainingClient, rad_representations, train
from ...methods import HeteroSSFL, ServerState
from ...runs.folder import RunFolder
from ...seeding import rng_for
from ...use.encoders import participants
from ..theory.measure import kernel_method, saved_state
from .class_mix import class_features, class_scores, guessed, held_classes, hit_rate, hit_rate_of_chance
from .membership import agreement, area_under_curve, standardised, true_positive_rate, true_positive_rate_of_chance
from .stealing import steal
from .views import View, seen, views

ATTACKER = (
    "The attacker is the server: it follows the protocol, keeps what it receives, and no client helps it.",
    "It knows the config, the RAD, the mean kernel, and the last contribution of each client in the form of the view.",
    "It knows each client's architecture and its initial weights, which follow from the config's seed and the name.",
    "It has public images with labels that no client trains on: the validation images and the RAD.",
    "It is told how many classes each client holds, and candidate images of these classes, of which some are members.",
    "It does not use earlier rounds, losses, accuracies or times.",
)
VIEWS_PER_CANDIDATE = 8
REFERENCES = 4  # shadow clients that tell how much the views of an image agree anyway
MOST_CANDIDATES = 500  # members, and as many non-members, of one client


# --- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """An encoder in the attacker's hands, compared with the client's own."""

    cka: float
    """Debiased CKA of its features with the client's, on test images."""
    probe: float
    """Accuracy in percent of a linear probe on test images of all classes, trained as the run's own probes are."""
    members: Tensor
    """Membership scores of the client's training images."""
    others: Tensor
    """Membership scores of test images of the same classes."""


@dataclass(frozen=True)
class ClientAudit:
    held: Sequence[int]
    own: Compared
    """The client's own encoder: more than any kernel on the RAD can give."""
    untrained: Compared
    """The initial weights, which the attacker has without any kernel."""
    stolen: Mapping[str, Compared]
    """The encoder stolen from each view."""
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

    def hit_rate(self, view: str) -> float | None:
        if self.class_chance is None:
            return None
        return hit_rate([c.guessed[view] for c in self.clients.values()], [c.held for c in self.clients.values()])


def pooled(found: Sequence[Compared]) -> tuple[float, float]:
    """Return the true-positive rate at 1 % false positives and the area under the curve, over all clients' images."""
    pairs = [standardised(each.members, each.others) for each in found]
    members, others = torch.cat([m for m, _ in pairs]), torch.cat([o for _, o in pairs])
    return true_positive_rate(members, others), area_under_curve(members, others)


# --- all attacks -----------------------------------------------------------------------------------


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
        for shadow in run(partial(_shadow, path, steps), range(shadows)):
            hired.append(shadow)
            done(len(hired) * share)
        guesses = scene.guesses(hired)
        compared: list[Attacked] = []
        for found in run(partial(_attack, path, steps, hired[:REFERENCES]), range(count)):
            compared.append(found)
            done((shadows + len(compared) * len(scene.views)) * share)
    clients = {}
    for number, (own, untrained, stolen) in enumerate(compared):
        mix = {view: found[number] for view, found in guesses.items()}
        clients[scene.everyone[number].name] = ClientAudit(scene.held[number], own, untrained, stolen, mix)
    rng, classes = rng_for(scene.config.seed, "audit", "chance"), scene.data.train.classes
    return Audit(
        round=scene.state.round,
        form=scene.config.alignment.form,
        classes=classes,
        views=[str(view) for view in scene.views],
        clients=clients,
        class_chance=hit_rate_of_chance(scene.held, len(classes), rng) if guesses else None,
        member_chance=true_positive_rate_of_chance(
            sum(len(c.own.members) for c in clients.values()), sum(len(c.own.others) for c in clients.values()), rng
        ),
    )


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


def _shadow(path: Path, steps: int, number: int) -> "Shadow":
    scene = _scene(path)
    with torch_threads(scene.config.engine.threads):
        return scene.shadow(number, steps)


def _attack(path: Path, steps: int, shadows: Sequence["Shadow"], number: int) -> "Attacked":
    scene = _scene(path)
    with torch_threads(scene.config.engine.threads):
        return scene.attack(number, shadows, steps)


@lru_cache(maxsize=1)
def _scene(path: Path) -> "Scene":
    """Open a run once per process."""
    return open_scene(RunFolder.open(path))


def open_scene(folder: RunFolder) -> "Scene":
    """Check that the run can be audited, and open it."""
    config = folder.config
    if folder.site != "simulated":
        raise RunError(
            f"the clients of '{folder.path}' are not a split of one data set, and an audit needs the images of all "
            "clients to measure its success. Audit a run of `hetero-ssfl run CONFIG`."
        )
    method = kernel_method(folder, "the audit")
    if config.privacy.secure:
        raise RunError(
            f"'{folder.path}' was trained with privacy.secure = true, so its server has no single contribution. "
            "Audit the same config without it: the sums in the table are what a server then sees."
        )
    state = saved_state(folder)
    if state is None:
        raise RunError(f"'{folder.path}' has not finished a round of training. Continue it first.")
    site = LocalSite()
    data, everyone = site.data(folder), list(participants(folder, site, config))
    assert isinstance(data, SplitData)
    missing = [p.name for p in everyone if p.name not in state.clients]
    if missing:
        raise RunError(
            f"the server of '{folder.path}' has no contribution of {missing[0]}. Audit a run that kept all of them."
        )
    test = data.held_out("test")
    if data.train.labels is None or test.labels is None or not len(test):
        raise RunError(f"'{config.data.source}' has no labels or no test images, expected both. Audit another run.")
    return Scene(config, method, state, data, everyone, test)


@dataclass(frozen=True)
class Shadow:
    """A client that the attacker trained on public images."""

    number: int
    held: list[int]
    weights: dict[str, Tensor]
    kernel: Tensor
    """A factor of its kernel on the RAD."""


Attacked = tuple[Compared, Compared, dict[str, Compared]]
"""The client's own encoder, the untrained one, and those stolen from each view."""


@dataclass(frozen=True)
class Scene:
    """The run under attack."""

    config: Config
    method: HeteroSSFL
    state: ServerState
    data: SplitData
    everyone: list[Participant]
    test: Images

    # --- what the attacker has ---

    @cached_property
    def factors(self) -> list[Tensor]:
        """The clients' kernels as the server can recover them from their last contributions."""
        return [recovered(self.state.clients[p.name], self.method.averaging) for p in self.everyone]

    @cached_property
    def weights(self) -> list[float]:
        return [self.method.weight(self.state, p.name) for p in self.everyone]

    @property
    def views(self) -> list[View]:
        return views(len(self.everyone), len(self.data.rad))

    @cached_property
    def rad_labels(self) -> Tensor | None:
        """None for a RAD from another data set, which has other classes."""
        labels = self.data.train.labels
        return None if self.config.rad.source or labels is None else labels[self.data.rows["rad"]]

    @cached_property
    def public(self) -> Images:
        """Labeled images that no client trains on."""
        rows = [self.data.rows["validation"], *([] if self.rad_labels is None else [self.data.rows["rad"]])]
        return self.data.train.subset(torch.cat(rows))

    # --- the truth, to measure success ---

    @cached_property
    def held(self) -> list[list[int]]:
        classes = len(self.data.train.classes)
        return [held_classes(torch.bincount(_labels(p.images), minlength=classes).tolist()) for p in self.everyone]

    # --- class mix ---

    def shadow(self, number: int, steps: int) -> Shadow:
        """Train a client of the attacker's own on public images of random classes."""
        order = torch.randperm(
            len(self.data.train.classes), generator=rng_for(self.config.seed, "audit", "shadow", number)
        )
        held = sorted(order[: len(self.held[number % len(self.held)])].tolist())
        pixels = self.public.pixels[torch.isin(_labels(self.public), torch.tensor(held))]
        if len(pixels) < 2:  # there are no labeled public images of these classes
            pixels = self.data.rad
        batch = min(self.config.optim.batch, len(pixels))
        plan = {
            "rounds": 1,
            "local_epochs": max(1, round(steps / (len(pixels) // batch))),
            "rad": self.config.rad.model_copy(update={"in_ssl": False}),
        }
        config = self.config.model_copy(update=plan)
        client = TrainingClient(f"shadow-{number}", config, self.shadow_networks(number), pixels, self.data.rad)
        mu = config.alignment.mu
        train(client, 1, Alignment(client, self.state.shared["factor"], mu) if mu else None)
        kernel = kernel_factor(rad_representations(client), config.alignment).float()
        return Shadow(number, held, client.learner.state_dict(), kernel)

    def shadow_networks(self, number: int) -> Learner:
        """Return untrained networks of one of the clients' architectures, with weights of their own."""
        model, shape = self.everyone[number % len(self.everyone)].model, self.data.rad.shape
        scope = ("audit", "shadow", number)
        learner = build_learner(model, self.config.ssl, shape[1], shape[-1], self.config.seed, *scope)
        return learner.to(self.config.engine.device)

    def guesses(self, shadows: Sequence[Shadow]) -> dict[str, list[list[int]]]:
        """Return the guessed classes of each client, by view; {} if all hold all classes or the RAD has other ones."""
        classes, labels = len(self.data.train.classes), self.rad_labels
        if labels is None or all(len(own) == classes for own in self.held):
            return {}
        kernels = [shadow.kernel for shadow in shadows]
        held = torch.stack([torch.isin(torch.arange(classes), torch.tensor(shadow.held)) for shadow in shadows])

        def figures(view: View, factors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
            found = [seen(view, factors, weights, k, self.config.seed) for k in range(len(factors))]
            return torch.stack([class_features(factor, labels, classes) for factor in found])

        guesses = {}
        for view in self.views:
            known = figures(view, kernels, [1.0] * len(kernels))
            scores = class_scores(known, held, figures(view, self.factors, self.weights))
            guesses[str(view)] = [guessed(row, len(own)) for row, own in zip(scores, self.held, strict=True)]
        return guesses

    # --- stealing and membership ---

    def attack(self, number: int, shadows: Sequence[Shadow], steps: int) -> Attacked:
        """Compare the client's own encoder with the untrained one and with those stolen from each view."""
        participant, references = self.everyone[number], []
        for shadow in shadows:
            references.append(self.shadow_networks(shadow.number))
            references[-1].load_state_dict(shadow.weights)
        victim = Victim(self, participant, references)
        stolen = {}
        for view in self.views:
            learner = participant.untrained()
            factor = seen(view, self.factors, self.weights, number, self.config.seed)
            steal(learner, self.data.rad, factor, self.config, steps, participant.name, str(view))
            stolen[str(view)] = victim.compare(learner)
        return victim.compare(victim.learner), victim.compare(participant.untrained()), stolen


# --- one client ------------------------------------------------------------------------------------


class Victim:
    """A client whose encoder and images are known, to measure how close the attacker comes."""

    def __init__(self, scene: Scene, participant: Participant, references: Sequence[Learner]) -> None:
        self.scene, self.participant, config = scene, participant, scene.config
        self.learner = participant.learner(participant.states.newest(scene.state.round))
        self.features = represented(self.learner, scene.test.pixels, config)
        pool = participant.labeled()
        self.labeled = pool.subset(few_labels(_labels(pool), config.evaluation.labels_per_class, config.seed))
        held = _labels(participant.images).unique()
        same = scene.test.pixels[torch.isin(_labels(scene.test), held)]
        self.candidates = [self._some(pixels) for pixels in (participant.images.pixels, same)]
        self.usual = [
            torch.stack([self._agreement(reference, pixels) for reference in references]).mean(0)
            for pixels in self.candidates
        ]

    def compare(self, learner: Learner) -> Compared:
        """Measure an encoder in the attacker's hands."""
        config, test = self.scene.config, self.scene.test
        likeness = factor_cka(represented(learner, test.pixels, config), self.features, debiased=True)
        fit = Labeled(extract_features(learner.encoder, self.labeled.pixels), _labels(self.labeled))
        held_out = Labeled(extract_features(learner.encoder, test.pixels), _labels(test))
        linear = config.evaluation.model_copy(update={"probes": ("linear",)})
        accuracy = probe(fit, held_out, linear, config.seed)["linear"]
        members, others = (
            self._agreement(learner, pixels) - usual for pixels, usual in zip(self.candidates, self.usual, strict=True)
        )
        return Compared(float(likeness), accuracy, members, others)

    def _some(self, pixels: Tensor) -> Tensor:
        rng = rng_for(self.scene.config.seed, "audit", "candidates", self.participant.name)
        return pixels[torch.randperm(len(pixels), generator=rng)[:MOST_CANDIDATES]]

    @torch.no_grad()
    def _agreement(self, learner: Learner, pixels: Tensor) -> Tensor:
        """Return how much the features of random views of each image agree. All encoders see the same views."""
        config, rng = self.scene.config, rng_for(self.scene.config.seed, "audit", "views", self.participant.name)
        learner.eval()
        device = next(learner.parameters()).device
        found = []
        for _ in range(VIEWS_PER_CANDIDATE):
            parts = [random_view(rows.to(device), config.views, rng) for rows in pixels.split(512)]
            found.append(torch.cat([learner.encoder(part).float().cpu() for part in parts]))
        return agreement(found)


def recovered(contribution: Mapping[str, Tensor], averaging: Averaging) -> Tensor:
    """Return a factor of the kernel that a client's contribution describes."""
    if "factor" in contribution:
        return contribution["factor"].float()
    precision = torch.finfo(contribution["sketch"].dtype).eps
    return combine_sketches(contribution["sketch"], trace_of(contribution), averaging.omega(), precision).factor


@torch.no_grad()
def represented(learner: Learner, pixels: Tensor, config: Config) -> Tensor:
    """Return the representations that are aligned, of images without augmentation."""
    learner.eval()
    device = next(learner.parameters()).device
    parts = [learner.represent(to_input(rows.to(device)), config.alignment.layer) for rows in pixels.split(512)]
    return torch.cat(parts).float().cpu()


def _labels(images: Images) -> Tensor:
    assert images.labels is not None
    return images.labels
