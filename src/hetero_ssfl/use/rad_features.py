"""Load a run's encoders and compute their features of the RAD for a report."""

from ..federation.participants import open_site
from ..federation.start import warn_of_changed_data
from ..learning.features import extract_features
from ..report.rad_features import MOST_CLIENTS, RadFeatures, left_out, rad_of, shown_rows
from ..report.reported_run import without_folders
from ..runs.folder import RunFolder
from .encoders import encoders_of


def read_rad_features(folder: RunFolder, trained: bool) -> RadFeatures:
    """Return the features of the trained or untrained encoders. Raises HeteroSSFLError if none is available."""
    site = open_site(folder)
    if trained:
        warn_of_changed_data(folder)
    count = len(site.clients(folder))
    built = encoders_of(folder, site, trained, range(min(count, MOST_CLIENTS))).require()
    assert built.rad is not None
    shown = built.rad[shown_rows(len(built.rad))]
    features = [extract_features(encoder, shown) for encoder in built.found.values()]
    limits = [left_out(count, len(rad_of(folder)))]
    limits += [without_folders(f"{name} is missing: {reason}") for name, reason in built.missing.items()]
    return RadFeatures(list(built.found), features, " ".join(filter(None, limits)))
