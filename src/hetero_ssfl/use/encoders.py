"""The participants of an existing run: their encoders, probes of them on old or new data, and how alike they are."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..config import Config
from ..data import Data, Images, agree_on_classes, is_here, read_with_test, skip_with, without_trained
from ..errors import DataError, HeteroSSFLError, RunError
from ..federation.client.scoring import evaluate
from ..federation.participants import PassedData, Site, open_site
from ..federation.participants.node import RadMissingError
from ..federation.participants.participant import Participant
from ..federation.start import places_of, torch_threads, warn_of_changed_data
from ..kernels.cka import mutual_cka
from ..learning.features import extract_features
from ..learning.probes import Labeled, few_labels, probe
from ..plugins import check_place, check_trusted, is_missing, missing_object
from ..report.rad_features import MAX_CLIENTS, RadFeatures, left_out, shown_rows
from ..report.tables import without_folders
from ..runs.folder import RunFolder, resume_command
from .embed import as_in_run, check_alike

log = logging.getLogger(__name__)
Scores = Iterator[tuple[str, dict[str, float]]]
"""Names of clients, and the accuracies of their encoders."""


def participants(folder: RunFolder, site: Site, config: Config) -> Iterator[Participant]:
    """Yield the participants on this machine in their current state."""
    for number, client in enumerate(site.clients(folder)):
        yield participant_of(folder, site, config, number, client.encoder)


def participant_of(folder: RunFolder, site: Site, config: Config, number: int, spec: str) -> Participant:
    """Return one participant on this machine in its current state. `spec` is its encoder's.

    A run folder from elsewhere may name code to import, so that code must be trusted first.
    """
    check_trusted(config.method, "method")
    if is_missing(spec):
        raise RunError(f"{missing_object('encoder', spec)}: {resume_command(folder.path)}.")
    check_trusted(spec, "encoder")
    trained = {} if site.kind == "nodes" else (folder.committed() or {}).get("trained", {})
    try:
        participant = site.participant(folder, number, config)
        return replace(participant, trained=trained.get(participant.name))
    except RadMissingError as error:
        raise RunError(str(error)) from None


@dataclass(frozen=True)
class Encoders:
    """The encoders of a run that can be built in this process, and why the others cannot."""

    modules: dict[str, nn.Module]
    rad: Tensor
    missing: dict[str, str]


def encoders_of(folder: RunFolder, site: Site, trained: bool = True, clients: Sequence[int] | None = None) -> Encoders:
    """Build the clients' encoders, trained or untrained. It is an error only if none of them can be built."""
    config = folder.read_config()
    everyone, found, missing, rad = site.clients(folder), {}, {}, None
    for number in range(len(everyone)) if clients is None else clients:
        try:
            participant = participant_of(folder, site, config, number, everyone[number].encoder)
            found[participant.name], rad = participant.encoder(trained), participant.rad
        except (HeteroSSFLError, RuntimeError) as error:  # RuntimeError: the encoder's code has changed since training
            missing[everyone[number].name] = str(error)
    if rad is None:
        raise RunError(" ".join(dict.fromkeys(missing.values())))
    return Encoders(found, rad, missing)


def check_data(folder: RunFolder) -> None:
    """Raise ConfigError if the data of a run were not used on this machine: the folder may come from someone else."""
    for place in places_of(folder) if folder.read_facts().site != "nodes" else ():
        if not is_here(place):
            check_place(place, "data.source")


def reevaluate(folder: RunFolder, config: Config, split: str, site: Site | None = None) -> Scores:
    """Probe a run's models again, one client at a time. `config` may change settings of `[evaluation]`.

    Encoders that were passed as objects and do not exist in this process are left out, with a warning.
    """
    if type(getattr(site, "passed", None)) is not PassedData:  # objects of this program come from no folder
        check_data(folder)
    site = site or open_site(folder)
    with torch_threads(config.engine.threads):
        for number, client in enumerate(site.clients(folder)):
            if is_missing(client.encoder):
                log.warning("%s is left out: its encoder was passed as an object that does not exist here", client.name)
                continue
            participant = participant_of(folder, site, config, number, client.encoder)
            yield participant.name, evaluate(participant, participant.newest(), split)


def evaluate_on(built: Encoders, data: Data, labels: Any, test: Data, config: Config) -> tuple[Scores, int]:
    """Probe encoders on new labeled data: probes are fitted on one part of them and tested on the other.

    Also return the number of their classes, which need not be those of the run.
    """
    with skip_with(None):  # only the settings of evaluation can change here
        read = read_with_test(data, labels, test, as_in_run(config.data, built.rad), "the new data")
    if read[0].labels is None or not len(read[1]):
        raise DataError("the new data have no labels, but testing needs labels. Use a folder per class or pass labels.")
    check_alike(read[0].pixels, built.rad)
    train, held_out = agree_on_classes(read)
    part = "test samples of the new data"
    held_out = without_trained({part: held_out}, {"their training samples": train.pixels})[part]
    assert train.labels is not None
    few = train.subset(few_labels(train.labels, config.evaluation.labels_per_class, config.seed))
    scores = (
        (name, probe(_features(encoder, few), _features(encoder, held_out), config.evaluation, config.seed))
        for name, encoder in built.modules.items()
    )
    return scores, len(train.classes)


def _features(encoder: nn.Module, images: Images) -> Labeled:
    assert images.labels is not None
    return Labeled(extract_features(encoder, images.pixels), images.labels)


def read_rad_features(folder: RunFolder, trained: bool) -> RadFeatures:
    """Return the features of the trained or untrained encoders. Raises HeteroSSFLError if none is available."""
    site = open_site(folder)
    if trained:
        warn_of_changed_data(folder)
    count = len(site.clients(folder))
    built = encoders_of(folder, site, trained, range(min(count, MAX_CLIENTS)))
    rows = shown_rows(len(built.rad))
    features = [extract_features(encoder, built.rad[rows]) for encoder in built.modules.values()]
    limits = [left_out(count, len(built.rad))]
    limits += [without_folders(f"{name} is missing: {reason}") for name, reason in built.missing.items()]
    return RadFeatures(list(built.modules), features, " ".join(filter(None, limits)))


def mutual_cka_of(folder: RunFolder, site: Site, trained: bool) -> tuple[list[str], Tensor]:
    """Return names and mutual CKA on the RAD of the encoders that can be built, before or after training."""
    built = encoders_of(folder, site, trained)
    features = [extract_features(encoder, built.rad) for encoder in built.modules.values()]
    return list(built.modules), mutual_cka(features)
