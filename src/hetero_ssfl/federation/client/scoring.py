"""Probe a participant's trained encoder, and export it as a model to the participant's own disk."""

from functools import partial

import torch
from torch import Tensor, nn

from ... import __version__
from ...data import MEAN, STD, Images, digest, is_pixels, remembered
from ...errors import ProtocolError
from ...learning.features import extract_features
from ...learning.finetune import finetune, share_of_labels
from ...learning.floors import FLOORS, FULL_WIDTH, floor_encoder, floors_for
from ...learning.learner import Learner, count_parameters
from ...learning.probes import Labeled, accuracy, balanced_accuracy, few_labels, probe
from ...learning.training import TrainingClient
from ...runs.files import save_tensors, write_json
from ..participants.participant import Participant
from .budget import Budget


class Probing:
    """Probes of one participant's features on a split: what the images, the labels and the measure are."""

    def __init__(self, participant: Participant, train: Images, test: Images) -> None:
        assert train.labels is not None
        assert test.labels is not None
        self.config = participant.config.evaluation
        self.seed = participant.config.seed
        self.measure = balanced_accuracy if participant.balanced else accuracy
        self.train, self.train_labels, self.test, self.test_labels = train, train.labels, test, test.labels

    def features(self, encoder: nn.Module) -> tuple[Labeled, Labeled]:
        """Return the features that probes are fitted to, and those that they are tested on."""
        train, test = (extract_features(encoder, images.pixels) for images in (self.train, self.test))
        return Labeled(train, self.train_labels), Labeled(test, self.test_labels)

    def scores(self, fit: Labeled, test: Labeled, suffix: str) -> dict[str, float]:
        found = probe(fit, test, self.config, self.seed, self.measure)
        return {f"{name}_{suffix}": value for name, value in found.items()}


def open_probing(participant: Participant, split: str) -> Probing | None:
    """Return None without labels, or if the owner does not allow probes on these images."""
    if split not in participant.evaluates:
        return None
    config, train, test = participant.config, participant.labeled(), participant.held_out(split)
    if train.labels is None or test.labels is None or not len(test):
        return None
    few = few_labels(train.labels, config.evaluation.labels_per_class, config.seed)
    return Probing(participant, train.subset(few), test)


def evaluate(participant: Participant, learner: Learner, split: str) -> dict[str, float]:
    """Probe a frozen encoder on all classes and on the participant's own classes; {} without labels."""
    probing = open_probing(participant, split)
    if probing is None:
        return {}
    fit, test = probing.features(learner.encoder)
    results = probing.scores(fit, test, "all")
    if learner.head is not None and probing.config.common_space:
        there = [Labeled(coordinates_of(learner.head, seen.x), seen.y) for seen in (fit, test)]
        results |= probing.scores(there[0], there[1], "common")
    if learner.classifier is not None:  # the supervised baseline's own answer, beside the probe
        guesses = learner.classifier(test.x.to(learner.classifier.weight.device)).argmax(1).cpu()
        results["classifier_all"] = probing.measure(guesses, test.y)
    own = participant.images.labels
    held = fit.y[:0] if own is None else own.unique()
    if len(held) > 1 and len(test.only(held).y):  # a single class always scores 100 %
        results |= probing.scores(fit.only(held), test.only(held), "own")
    ask, seed = probing.config, probing.seed
    for fraction in ask.label_shares if split == "test" else ():
        few = share_of_labels(fit.y, fraction, seed)
        results |= probing.scores(Labeled(fit.x[few], fit.y[few]), test, f"{fraction:.0%}")
        tuned = finetune(learner.encoder, probing.train.subset(few), probing.test, ask, seed, probing.measure)
        results[f"finetune_{fraction:.0%}"] = tuned
    return results


@torch.no_grad()
def coordinates_of(head: nn.Linear, features: Tensor) -> Tensor:
    """Return what the head predicts from features: vectors of the space that all clients share."""
    predicted: Tensor = head(features.to(head.weight.device))
    return predicted.cpu()


def floor_metrics(participant: Participant, floor: str, split: str) -> dict[str, float]:
    """Probe features that nobody trained, as `evaluate` does. Remembered: it depends on nothing but the data."""
    if floor not in FLOORS:
        raise ProtocolError(f"the message names the floor '{floor[:40]}', expected one of: {'; '.join(FLOORS)}.")
    probing = open_probing(participant, split)
    if probing is None or floor not in floors_for(probing.train.pixels):
        return {}
    train, seed = probing.train.pixels, probing.seed
    width = 0 if floor.endswith(FULL_WIDTH) else participant.sizes[1]
    asked = probing.config.model_dump(mode="json")
    key = [floor, width, seed, probing.measure.__name__, asked, __version__]
    key += map(digest, (train, probing.train_labels, probing.test.pixels, probing.test_labels))
    encoder = partial(floor_encoder, floor, train, width, seed)
    metrics: dict[str, float] = remembered(key, lambda: probing.scores(*probing.features(encoder()), "all"))
    return metrics


def export_model(participant: Participant, client: TrainingClient) -> None:
    """Write the trained encoder and its model card to the participant's own disk."""
    encoder, config = client.learner.encoder, participant.config
    channels, side = participant.shape
    wants: dict[str, object] = {"shape": list(participant.rad.shape[1:])}
    if is_pixels(participant.rad.dtype):
        wants |= {"channels": channels, "side": side, "mean": MEAN, "std": STD}
        wants |= config.data.model_dump(mode="json", include={"bit_depth", "window", "axis"}, exclude_none=True)
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
    spent = Budget(participant).facts()
    card |= {"privacy": spent} if spent else {}
    save_tensors(participant.exports / "encoder.safetensors", encoder.state_dict(), card)
    write_json(participant.exports / "card.json", card)
