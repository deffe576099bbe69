"""The run under attack: what the attacker has, the attacks, and how close they come to a client's own encoder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import Config
from ...data import Images, random_view
from ...errors import RunError
from ...federation.participants import LocalSite, SplitData
from ...federation.participants.participant import Participant
from ...kernels.cka import factor_cka
from ...kernels.consensus import Averaging
from ...kernels.contribution import trace_of
from ...kernels.factor import kernel_factor
from ...kernels.mean import combine_sketches
from ...learning.features import extract_features
from ...learning.learner import Learner
from ...learning.probes import Labeled, few_labels, probe
from ...learning.training import TrainingClient, rad_representations, train
from ...methods import HeteroSSFL, ServerState
from ...runs.folder import RunFolder
from ...seeding import rng_for
from ...use.encoders import participants
from ..kernel_runs import kernel_method, saved_state
from .attacks import agreement, class_features, class_scores, guessed, held_classes, steal
from .views import View, seen, views

VIEWS_PER_CANDIDATE = 8
MAX_CANDIDATES = 500  # members, and as many non-members, of one client
OWN, UNTRAINED = "the client's own encoder", "its initial weights only"
"""The first is more than any kernel on the RAD can give. The attacker has the second without any kernel."""


def open_scene(folder: RunFolder) -> "Scene":
    config = folder.read_config()
    if folder.read_facts().site != "simulated":
        raise RunError(
            f"the clients of '{folder.path}' are not a split of one data set. Audit a run of `hetero-ssfl run CONFIG`."
        )
    method = kernel_method(folder, "the audit")
    if config.privacy.secure:
        raise RunError(
            f"the server of '{folder.path}' has no single contribution, because of privacy.secure = true. "
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
        raise RunError(f"the server of '{folder.path}' has no contribution of {missing[0]}. Audit another run.")
    test = data.held_out("test")
    if data.train.labels is None or test.labels is None or not len(test):
        raise RunError(f"'{config.data.source}' has no labels or no test images. Audit another run.")
    return Scene(config, method, state, data, everyone, test)


class Shadow(NamedTuple):
    """A client that the attacker trained on public images."""

    number: int
    held: list[int]
    weights: dict[str, Tensor]
    kernel: Tensor  # a factor of its kernel on the RAD


class Compared(NamedTuple):
    """An encoder in the attacker's hands, compared with the client's own."""

    cka: float  # debiased, of its features with the client's, on test images
    probe: float  # accuracy in percent of a linear probe on test images of all classes, as the run's own probes
    members: Tensor  # membership scores of the client's training images
    others: Tensor  # membership scores of test images of the same classes


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

    @property
    def views(self) -> list[View]:
        return views(len(self.everyone), len(self.data.rad))

    def seen(self, view: View, number: int) -> Tensor:
        """Return the factor that the attacker recovers of a client's kernel."""
        weights = [self.method.weight(self.state, p.name) for p in self.everyone]
        return seen(view, self.factors, weights, number, self.config.seed)

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
        return [held_classes(torch.bincount(labels_of(p.images), minlength=classes).tolist()) for p in self.everyone]

    # --- class mix ---

    def shadow(self, number: int, steps: int) -> Shadow:
        """Train a client of the attacker's own on public images of random classes."""
        rng = rng_for(self.config.seed, "audit", "shadow", number)
        order = torch.randperm(len(self.data.train.classes), generator=rng)
        held = sorted(order[: len(self.held[number % len(self.held)])].tolist())
        pixels = self.public.pixels[torch.isin(labels_of(self.public), torch.tensor(held))]
        if len(pixels) < 2:  # there are no labeled public images of these classes
            pixels = self.data.rad
        epochs = max(1, round(steps / (len(pixels) // min(self.config.optim.batch, len(pixels)))))
        rad = self.config.rad.model_copy(update={"in_ssl": False})
        config = self.config.model_copy(update={"rounds": 1, "local_epochs": epochs, "rad": rad})
        client = TrainingClient(f"shadow-{number}", config, self.shadow_networks(number), pixels, self.data.rad)
        train(client, 1, self.method.term(client, self.state.shared, config.alignment.mu))
        kernel = kernel_factor(rad_representations(client), config.alignment).float()
        return Shadow(number, held, client.learner.state_dict(), kernel)

    def shadow_networks(self, number: int) -> Learner:
        """Return untrained networks of one of the clients' architectures, with weights of their own."""
        like = self.everyone[number % len(self.everyone)]
        return replace(like, seed_scope=("audit", "shadow", number)).untrained()

    def guesses(self, shadows: Sequence[Shadow]) -> dict[str, list[list[int]]]:
        """Return the guessed classes of each client, by view; {} if all hold all classes or the RAD has other ones."""
        classes, labels = len(self.data.train.classes), self.rad_labels
        if labels is None or all(len(own) == classes for own in self.held):
            return {}
        kernels, ones = [shadow.kernel for shadow in shadows], [1.0] * len(shadows)
        held = torch.stack([torch.isin(torch.arange(classes), torch.tensor(shadow.held)) for shadow in shadows])

        def features(factors: Iterable[Tensor]) -> Tensor:
            return torch.stack([class_features(factor, labels, classes) for factor in factors])

        guesses = {}
        for view in self.views:
            known = features(seen(view, kernels, ones, k, self.config.seed) for k in range(len(kernels)))
            scores = class_scores(known, held, features(self.seen(view, k) for k in range(len(self.everyone))))
            guesses[str(view)] = [guessed(row, len(own)) for row, own in zip(scores, self.held, strict=True)]
        return guesses

    # --- stealing and membership ---

    def attack(self, number: int, shadows: Sequence[Shadow], steps: int) -> dict[str, Compared]:
        """Compare the client's own encoder with the untrained one and with those stolen from each view."""
        participant, references, stolen = self.everyone[number], [], {}
        for shadow in shadows:
            references.append(self.shadow_networks(shadow.number))
            references[-1].load_state_dict(shadow.weights)
        victim = Victim(self, participant, references)
        for view in self.views:
            learner = participant.untrained()
            steal(learner, self.data.rad, self.seen(view, number), self.config, steps, participant.name, str(view))
            stolen[str(view)] = victim.compare(learner)
        return {OWN: victim.compare(victim.own), UNTRAINED: victim.compare(participant.untrained()), **stolen}


class Victim:
    """A client whose encoder and images are known, to measure how close the attacker comes."""

    def __init__(self, scene: Scene, participant: Participant, references: Sequence[Learner]) -> None:
        self.scene, self.name, self.config = scene, participant.name, participant.config
        self.own = participant.learner(participant.states.newest(scene.state.round))
        self.features = self._represented(self.own)
        pool, test, pixels = participant.labeled(), scene.test, participant.images.pixels
        few = few_labels(labels_of(pool), self.config.evaluation.labels_per_class, self.config.seed)
        self.labeled, self.candidates, self.usual = pool.subset(few), [], []
        same = test.pixels[torch.isin(labels_of(test), labels_of(participant.images).unique())]
        for rows in (pixels, same):
            order = torch.randperm(len(rows), generator=rng_for(self.config.seed, "audit", "candidates", self.name))
            chosen = rows[order[:MAX_CANDIDATES]]
            self.candidates.append(chosen)
            self.usual.append(torch.stack([self._agreement(reference, chosen) for reference in references]).mean(0))

    def compare(self, learner: Learner) -> Compared:
        likeness = factor_cka(self._represented(learner), self.features, debiased=True)
        fit, held_out = (
            Labeled(extract_features(learner.encoder, images.pixels), labels_of(images))
            for images in (self.labeled, self.scene.test)
        )
        linear = self.config.evaluation.model_copy(update={"probes": ("linear",)})
        accuracy = probe(fit, held_out, linear, self.config.seed)["linear"]
        pairs = zip(self.candidates, self.usual, strict=True)
        members, others = (self._agreement(learner, rows) - usual for rows, usual in pairs)
        return Compared(float(likeness), accuracy, members, others)

    def _represented(self, learner: Learner) -> Tensor:
        """Return the representations that are aligned, of the test images in place of the RAD."""
        test = self.scene.test.pixels
        return rad_representations(TrainingClient(self.name, self.config, learner, test, test))

    @torch.no_grad()
    def _agreement(self, learner: Learner, pixels: Tensor) -> Tensor:
        """Return how much the features of random views of each image agree. All encoders see the same views."""
        rng, device = rng_for(self.config.seed, "audit", "views", self.name), next(learner.parameters()).device
        learner.eval()
        features = []
        for _ in range(VIEWS_PER_CANDIDATE):
            parts = [random_view(rows.to(device), self.config.views, rng) for rows in pixels.split(512)]
            features.append(torch.cat([learner.encoder(part).float().cpu() for part in parts]))
        return agreement(features)


def labels_of(images: Images) -> Tensor:
    assert images.labels is not None
    return images.labels


def recovered(contribution: Mapping[str, Tensor], averaging: Averaging) -> Tensor:
    """Return a factor of the kernel that a client's contribution describes."""
    if "factor" in contribution:
        return contribution["factor"].float()
    precision = torch.finfo(contribution["sketch"].dtype).eps
    return combine_sketches(contribution["sketch"], trace_of(contribution), averaging.omega(), precision).factor
