"""The participants of an existing run: their encoders, their probes and how alike they are."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..config import Config
from ..data import is_here
from ..errors import HeteroSSFLError, RunError
from ..federation.client.scoring import evaluate
from ..federation.participants import PassedData, Request, Site, open_site
from ..federation.participants.node import RadMissingError
from ..federation.participants.participant import Participant
from ..federation.start import places_of, torch_threads, warn_of_changed_data
from ..federation.wire import Header
from ..kernels.cka import mutual_cka
from ..learning.features import extract_features
from ..plugins import check_place, check_trusted, is_missing, missing_object
from ..report.rad_features import MAX_CLIENTS, RadFeatures, left_out, shown_rows
from ..report.tables import without_folders
from ..runs.folder import RunFolder, resume_command

log = logging.getLogger(__name__)


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
    facts = folder.read_json("facts.json")
    header = Header(facts.get("federation", ""), 0, facts.get("rad_digest", ""))
    trained = {} if site.kind == "nodes" else (folder.committed() or {}).get("trained", {})
    try:
        participant = site.participant(folder, number, Request(config, header))
        return replace(participant, trained=trained.get(participant.name))
    except RadMissingError as error:
        raise RunError(str(error)) from None


@dataclass(frozen=True)
class Encoders:
    """The encoders of a run that can be built in this process, and why the others cannot."""

    modules: dict[str, nn.Module]
    rad: Tensor | None
    missing: dict[str, str]

    def require(self) -> "Encoders":
        """Raise RunError if there is none."""
        if not self.modules:
            raise RunError(" ".join(dict.fromkeys(self.missing.values())))
        return self


def encoders_of(folder: RunFolder, site: Site, trained: bool = True, clients: Sequence[int] | None = None) -> Encoders:
    """Build the clients' encoders, trained or untrained. One that cannot be built does not hide the others."""
    config = folder.read_config()
    everyone, found, missing, rad = site.clients(folder), {}, {}, None
    for number in range(len(everyone)) if clients is None else clients:
        try:
            participant = participant_of(folder, site, config, number, everyone[number].encoder)
            found[participant.name], rad = participant.encoder(trained), participant.rad
        except (HeteroSSFLError, RuntimeError) as error:  # RuntimeError: the encoder's code has changed since training
            missing[everyone[number].name] = str(error)
    return Encoders(found, rad, missing)


def check_data(folder: RunFolder) -> None:
    """Raise ConfigError if the data of a run were not used on this machine: the folder may come from someone else."""
    for place in places_of(folder) if folder.read_facts().site != "nodes" else ():
        if not is_here(place):
            check_place(place, "data.source")


def reevaluate(
    folder: RunFolder, config: Config, split: str, site: Site | None = None
) -> Iterator[tuple[str, dict[str, float]]]:
    """Probe a run's models again, one client at a time. `config` may change settings of `[evaluation]`.

    Encoders that were passed as objects and do not exist in this process are left out, with a warning.
    """
    if type(getattr(site, "passed", None)) is not PassedData:  # objects of this program come from no folder
        check_data(folder)
    site = site or open_site(folder)
    everyone = site.clients(folder)
    for client in (client for client in everyone if is_missing(client.encoder)):
        log.warning("%s is left out: its encoder was passed as an object that does not exist here", client.name)
    with torch_threads(config.engine.threads):
        for number, client in enumerate(everyone):
            if is_missing(client.encoder):
                continue
            participant = participant_of(folder, site, config, number, client.encoder)
            yield participant.name, evaluate(participant, participant.newest(), split)


def read_rad_features(folder: RunFolder, trained: bool) -> RadFeatures:
    """Return the features of the trained or untrained encoders. Raises HeteroSSFLError if none is available."""
    site = open_site(folder)
    if trained:
        warn_of_changed_data(folder)
    count = len(site.clients(folder))
    built = encoders_of(folder, site, trained, range(min(count, MAX_CLIENTS))).require()
    assert built.rad is not None
    rows = shown_rows(len(built.rad))
    features = [extract_features(encoder, built.rad[rows]) for encoder in built.modules.values()]
    limits = [left_out(count, len(built.rad))]
    limits += [without_folders(f"{name} is missing: {reason}") for name, reason in built.missing.items()]
    return RadFeatures(list(built.modules), features, " ".join(filter(None, limits)))


def mutual_cka_of(folder: RunFolder, site: Site, trained: bool) -> tuple[list[str], Tensor]:
    """Return names and mutual CKA on the RAD of the encoders that can be built, before or after training."""
    built = encoders_of(folder, site, trained).require()
    assert built.rad is not None
    features = [extract_features(encoder, built.rad) for encoder in built.modules.values()]
    return list(built.modules), mutual_cka(features)
