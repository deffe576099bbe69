"""Test a run's encoders on data that the run did not use."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..config import Config
from ..data import Data, Images, agree_on_classes, is_pixels, read_with_test, without_trained
from ..errors import DataError
from ..federation.participants import open_site
from ..learning.features import extract_features
from ..learning.probes import Labeled, few_labels, probe
from ..runs.folder import RunFolder
from .embed import check_alike
from .encoders import encoders_of


def read_new_data(data: Data, labels: Any, test: Data, config: Config, rad: Tensor) -> tuple[Images, Images]:
    """Read labeled data in the shape of the run's own, split into a part to fit probes on and a part to test on."""
    wanted: dict[str, Any] = {"image_column": None, "label_column": None, "limit": None}
    if is_pixels(rad.dtype):
        wanted |= {"channels": rad.shape[1], "side": rad.shape[-1]}
    train, held_out = read_with_test(data, labels, test, config.data.model_copy(update=wanted), "the new data")
    if train.labels is None or not len(held_out):
        raise DataError(
            "the new data have no labels, but testing needs labels. Use one folder per class, or pass labels; "
            "embed gives the features of data without labels."
        )
    check_alike(train.pixels, rad)
    train, held_out = agree_on_classes([train, held_out])
    part = "test samples of the new data"
    return train, without_trained({part: held_out}, {"their training samples": train.pixels})[part]


Scores = Iterator[tuple[str, dict[str, float]]]


def evaluate_run_on(folder: RunFolder, source: str, config: Config) -> tuple[Scores, dict[str, str], int]:
    """Test all encoders of a run that can be built here on another source.

    Also return the reasons for missing ones, and the number of classes.
    """
    built = encoders_of(folder, open_site(folder)).require()
    assert built.rad is not None
    train, test = read_new_data(source, None, None, config, built.rad)
    return evaluate_on(built.modules, train, test, config), built.missing, len(train.classes)


def evaluate_on(encoders: Mapping[str, nn.Module], train: Images, test: Images, config: Config) -> Scores:
    """Probe each encoder on new data: a probe is fitted on one part of them and tested on the other.

    The new data need not have the classes of the run, nor does this need the run's own images.
    """
    assert train.labels is not None
    assert test.labels is not None
    train = train.subset(few_labels(train.labels, config.evaluation.labels_per_class, config.seed))
    assert train.labels is not None
    for name, encoder in encoders.items():
        fit = Labeled(extract_features(encoder, train.pixels), train.labels)
        held_out = Labeled(extract_features(encoder, test.pixels), test.labels)
        yield name, probe(fit, held_out, config.evaluation, config.seed)
