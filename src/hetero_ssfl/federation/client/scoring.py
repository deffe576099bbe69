"""Probe a participant's trained encoder, and export it as a model to the participant's own disk."""

from ... import __version__
from ...data import MEAN, STD, digest, is_pixels
from ...learning.features import extract_features
from ...learning.finetune import finetune, share_of_labels
from ...learning.learner import Learner, count_parameters
from ...learning.probes import Labeled, accuracy, balanced_accuracy, few_labels, probe
from ...learning.training import TrainingClient
from ...runs.files import save_tensors, write_json
from ..participants.participant import Participant
from .budget import Budget


def evaluate(participant: Participant, learner: Learner, split: str) -> dict[str, float]:
    """Probe a frozen encoder on all classes and on the participant's own classes.

    Return {} without labels, or if the owner does not allow probes on these images.
    """
    if split not in participant.evaluates:
        return {}
    config, own = participant.config, participant.images.labels
    measure = balanced_accuracy if participant.balanced else accuracy
    train, held_out = participant.labeled(), participant.held_out(split)
    if train.labels is None or held_out.labels is None or not len(held_out):
        return {}
    train = train.subset(few_labels(train.labels, config.evaluation.labels_per_class, config.seed))
    assert train.labels is not None
    encoder = learner.encoder
    fit = Labeled(extract_features(encoder, train.pixels), train.labels)
    test = Labeled(extract_features(encoder, held_out.pixels), held_out.labels)
    results = {
        f"{name}_all": value for name, value in probe(fit, test, config.evaluation, config.seed, measure).items()
    }
    if learner.classifier is not None:  # the supervised baseline's own answer, beside the probe
        guesses = learner.classifier(test.x.to(learner.classifier.weight.device)).argmax(1).cpu()
        results["classifier_all"] = measure(guesses, test.y)
    held = train.labels[:0] if own is None else own.unique()
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
