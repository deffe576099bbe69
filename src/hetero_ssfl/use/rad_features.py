"""Load a run's encoders and compute their features of the RAD for a report."""

from itertools import islice

from ..evaluation import extract_features
from ..federation import participants
from ..federation.sites import open_site
from ..report.rad_features import MOST_CLIENTS, RadFeatures, left_out, rad_of, shown_rows
from ..runs import RunFolder


def read_rad_features(folder: RunFolder, trained: bool) -> RadFeatures:
    """Return the features of the trained or untrained encoders. Raises HeteroSSFLError if they are not available."""
    names, features = [], []
    config, site = folder.config, open_site(folder)
    for participant in islice(participants(folder, site, config), MOST_CLIENTS):
        encoder = (participant.newest() if trained else participant.untrained()).encoder
        names.append(participant.name)
        features.append(extract_features(encoder, participant.rad[shown_rows(len(participant.rad))]))
    return RadFeatures(names, features, left_out(len(site.names(config)), len(rad_of(folder))))
