"""Probe a participant's trained encoder, and export it as a model to the participant's own disk."""

from typing import NamedTuple

from torch import Tensor

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


class ProbeImages(NamedTuple):
    """The labeled images that a probe is trained and tested on."""

    train: Images
    train_labels: Tensor
    test: Images
    test_labels: Tensor


def probe_images(participant: Participant, split: str) -> ProbeImages | None:
    """Return None without labels, or if the owner does not allow probes on these images."""
    if split not in participant.evaluates:
        return None
    config, train, test = participant.config, participant.labeled(), participant.held_out(split)
    if train.labels is None or test.labels is None or not len(test):
        return None
    train = train.subset(few_labels(train.labels, config.evaluation.labels_per_class, config.seed))
    assert train.labels is not None
    return ProbeImages(train, train.labels, test, test.labels)


def evaluate(participant: Participant, learner: Learner, split: str) -> dict[str, float]:
    """Probe a frozen encoder on all classes and on the participant's own classes; {} without labels."""
    images, config, own = probe_images(participant, split), participant.config, participant.images.labels
    if images is None:
        return {}
    measure = balanced_accuracy if participant.balanced else accuracy
    train, train_labels, held_out, _ = images
    encoder = learner.encoder
    fit = Labeled(extract_features(encoder, train.pixels), train_labels)
    test = Labeled(extract_features(encoder, held_out.pixels), images.test_labels)
    results = {
        f"{name}_all": value for name, value in probe(fit, test, config.evaluation, config.seed, measure).items()
    }
    if learner.classifier is not None:  # the supervised baseline's own answer, beside the probe
        guesses = learner.classifier(test.x.to(learner.classifier.weight.device)).argmax(1).cpu()
        results["classifier_all"] = measure(guesses, test.y)
    held = train_labels[:0] if own is None else own.unique()
    if len(held) > 1 and len(test.only(held).y):  # a single class always scores 100 %
        scores = probe(fit.only(held), test.only(held), config.evaluation, config.seed, measure)
        results |= {f"{name}_own": value for name, value in scores.items()}
    for fraction in config.evaluation.label_shares if split == "test" else ():
        few = share_of_labels(fit.y, fraction, config.seed)
        scores = probe(Labeled(fit.x[few], fit.y[few]), test, config.evaluation, config.seed, measure)
        results |= {f"{name}_{fraction:.0%}": value for name, value in scores.items()}
        tuned = finetune(encoder, train.subset(few), held_out, config.evaluation, config.seed, measure)
        results[f"finetune_{fraction:.0%}"] = tuned
    return results


def floor_metrics(participant: Participant, floor: str, split: str) -> dict[str, float]:
    """Probe features that nobody trained, as `evaluate` does. Remembered: it depends on nothing but the data."""
    if floor not in FLOORS:
        raise ProtocolError(f"the message names the floor '{floor[:40]}', expected one of: {'; '.join(FLOORS)}.")
    images, config = probe_images(participant, split), participant.config
    if images is None or floor not in floors_for(images.train.pixels):
        return {}
    width = 0 if floor.endswith(FULL_WIDTH) else participant.width
    measure = balanced_accuracy if participant.balanced else accuracy

    def find_out() -> dict[str, float]:
        encoder = floor_encoder(floor, images.train.pixels, width, config.seed)
        fit = Labeled(extract_features(encoder, images.train.pixels), images.train_labels)
        test = Labeled(extract_features(encoder, images.test.pixels), images.test_labels)
        return {f"{name}_all": v for name, v in probe(fit, test, config.evaluation, config.seed, measure).items()}

    asked = config.evaluation.model_dump(mode="json")
    key = [
        floor,
        width,
        config.seed,
        measure.__name__,
        asked,
        __version__,
        *map(digest, (images.train.pixels, images.train_labels, images.test.pixels, images.test_labels)),
    ]
    metrics: dict[str, float] = remembered(key, find_out)
    return metrics


def export_model(participant: Participant, client: TrainingClient) -> None:
    """Write the trained encoder and its model card to the participant's own disk."""
    encoder, config = client.learner.encoder, participant.config
    channels, side = participant.shape
    wants: dict[str, object] = {"shape": list(participant.rad.shape[1:])}
    if is_pixels(participant.rad.dtype):
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
    spent = Budget(participant).facts()
    card |= {"privacy": spent} if spent else {}
    save_tensors(participant.exports / "encoder.safetensors", encoder.state_dict(), card)
    write_json(participant.exports / "card.json", card)
