"""The run under attack: what the attacker has, and the attacks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...config import Config
from ...data import Images
from ...errors import RunError
from ...federation.participants import LocalSite, SplitData
from ...federation.participants.participant import Participant
from ...kernels.consensus import Averaging
from ...kernels.contribution import trace_of
from ...kernels.factor import kernel_factor
from ...kernels.mean import combine_sketches
from ...learning.learner import Learner
from ...learning.training import TrainingClient, rad_representations, train
from ...methods import HeteroSSFL, ServerState
from ...runs.folder import RunFolder
from ...seeding import rng_for
from ...use.encoders import participants
from ..kernel_runs import kernel_method, saved_state
from .class_mix import class_features, class_scores, guessed, held_classes
from .stealing import steal
from .victim import Compared, Victim, labels_of
from .views import View, seen, views

OWN, UNTRAINED = "the client's own encoder", "its initial weights only"
"""The first is more than any kernel on the RAD can give. The attacker has the second without any kernel."""


def open_scene(folder: RunFolder) -> "Scene":
    """Check that the run can be audited, and open it."""
    config = folder.read_config()
    if folder.read_facts().site != "simulated":
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
        return [held_classes(torch.bincount(labels_of(p.images), minlength=classes).tolist()) for p in self.everyone]

    # --- class mix ---

    def shadow(self, number: int, steps: int) -> Shadow:
        """Train a client of the attacker's own on public images of random classes."""
        order = torch.randperm(
            len(self.data.train.classes), generator=rng_for(self.config.seed, "audit", "shadow", number)
        )
        held = sorted(order[: len(self.held[number % len(self.held)])].tolist())
        pixels = self.public.pixels[torch.isin(labels_of(self.public), torch.tensor(held))]
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
        kernels = [shadow.kernel for shadow in shadows]
        held = torch.stack([torch.isin(torch.arange(classes), torch.tensor(shadow.held)) for shadow in shadows])

        def features(view: View, factors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
            recovered = [seen(view, factors, weights, k, self.config.seed) for k in range(len(factors))]
            return torch.stack([class_features(factor, labels, classes) for factor in recovered])

        guesses = {}
        for view in self.views:
            known = features(view, kernels, [1.0] * len(kernels))
            scores = class_scores(known, held, features(view, self.factors, self.weights))
            guesses[str(view)] = [guessed(row, len(own)) for row, own in zip(scores, self.held, strict=True)]
        return guesses

    # --- stealing and membership ---

    def attack(self, number: int, shadows: Sequence[Shadow], steps: int) -> dict[str, Compared]:
        """Compare the client's own encoder with the untrained one and with those stolen from each view."""
        participant, references = self.everyone[number], []
        for shadow in shadows:
            references.append(self.shadow_networks(shadow.number))
            references[-1].load_state_dict(shadow.weights)
        own = participant.learner(participant.states.newest(self.state.round))
        victim, stolen = Victim(participant, own, self.test, references), {}
        for view in self.views:
            learner = participant.untrained()
            factor = seen(view, self.factors, self.weights, number, self.config.seed)
            steal(learner, self.data.rad, factor, self.config, steps, participant.name, str(view))
            stolen[str(view)] = victim.compare(learner)
        return {OWN: victim.compare(own), UNTRAINED: victim.compare(participant.untrained()), **stolen}


def recovered(contribution: Mapping[str, Tensor], averaging: Averaging) -> Tensor:
    """Return a factor of the kernel that a client's contribution describes."""
    if "factor" in contribution:
        return contribution["factor"].float()
    precision = torch.finfo(contribution["sketch"].dtype).eps
    return combine_sketches(contribution["sketch"], trace_of(contribution), averaging.omega(), precision).factor
