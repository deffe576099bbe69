"""A client under attack, and how close an encoder in the attacker's hands comes to its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...config import Config
from ...data import Images, random_view, to_input
from ...federation.participants.participant import Participant
from ...kernels.cka import factor_cka
from ...learning.features import extract_features
from ...learning.learner import Learner
from ...learning.probes import Labeled, few_labels, probe
from ...seeding import rng_for
from .membership import agreement

VIEWS_PER_CANDIDATE = 8
MAX_CANDIDATES = 500  # members, and as many non-members, of one client


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


class Victim:
    """A client whose encoder and images are known, to measure how close the attacker comes."""

    def __init__(self, participant: Participant, learner: Learner, test: Images, references: Sequence[Learner]) -> None:
        self.participant, self.config, self.test = participant, participant.config, test
        self.features = represented(learner, test.pixels, self.config)
        pool = participant.labeled()
        few = few_labels(labels_of(pool), self.config.evaluation.labels_per_class, self.config.seed)
        self.labeled = pool.subset(few)
        held = labels_of(participant.images).unique()
        same = test.pixels[torch.isin(labels_of(test), held)]
        self.candidates = [self._some(pixels) for pixels in (participant.images.pixels, same)]
        self.usual = [
            torch.stack([self._agreement(reference, pixels) for reference in references]).mean(0)
            for pixels in self.candidates
        ]

    def compare(self, learner: Learner) -> Compared:
        """Measure an encoder in the attacker's hands."""
        config, test = self.config, self.test
        likeness = factor_cka(represented(learner, test.pixels, config), self.features, debiased=True)
        fit = Labeled(extract_features(learner.encoder, self.labeled.pixels), labels_of(self.labeled))
        held_out = Labeled(extract_features(learner.encoder, test.pixels), labels_of(test))
        linear = config.evaluation.model_copy(update={"probes": ("linear",)})
        accuracy = probe(fit, held_out, linear, config.seed)["linear"]
        members, others = (
            self._agreement(learner, pixels) - usual for pixels, usual in zip(self.candidates, self.usual, strict=True)
        )
        return Compared(float(likeness), accuracy, members, others)

    def _some(self, pixels: Tensor) -> Tensor:
        rng = rng_for(self.config.seed, "audit", "candidates", self.participant.name)
        return pixels[torch.randperm(len(pixels), generator=rng)[:MAX_CANDIDATES]]

    @torch.no_grad()
    def _agreement(self, learner: Learner, pixels: Tensor) -> Tensor:
        """Return how much the features of random views of each image agree. All encoders see the same views."""
        config, rng = self.config, rng_for(self.config.seed, "audit", "views", self.participant.name)
        learner.eval()
        device = next(learner.parameters()).device
        features = []
        for _ in range(VIEWS_PER_CANDIDATE):
            parts = [random_view(rows.to(device), config.views, rng) for rows in pixels.split(512)]
            features.append(torch.cat([learner.encoder(part).float().cpu() for part in parts]))
        return agreement(features)


@torch.no_grad()
def represented(learner: Learner, pixels: Tensor, config: Config) -> Tensor:
    """Return the representations that are aligned, of images without augmentation."""
    learner.eval()
    device = next(learner.parameters()).device
    parts = [learner.represent(to_input(rows.to(device)), config.alignment.layer) for rows in pixels.split(512)]
    return torch.cat(parts).float().cpu()


def labels_of(images: Images) -> Tensor:
    assert images.labels is not None
    return images.labels
