"""A ceiling of training together: each client is taught the true classes of the RAD images."""

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_ssfl.config import Config
from hetero_ssfl.data import load_images
from hetero_ssfl.data.splits import split_training_images
from hetero_ssfl.learning.alignment import Coordinates
from hetero_ssfl.learning.training import Regulariser, TrainingClient
from hetero_ssfl.methods import HeteroSSFL


@cache
def classes_of_rad(config: Config) -> Tensor:
    """Return one row per RAD image: a 1 at its class, as wide as the coordinates."""
    images = load_images(config.data, "train")
    assert images.labels is not None
    labels = images.labels[split_training_images(config, images).rad]
    return F.one_hot(labels, config.alignment.coordinates).to(torch.float32)


class RadLabels(HeteroSSFL):
    """Hetero-SSFL in which all RAD images of a class lie at one place, and those of different classes apart."""

    name = "rad-labels"

    def term(self, client: TrainingClient, arrays: Mapping[str, Tensor], mu: float) -> Regulariser | None:
        return Coordinates(client, classes_of_rad(self.config), mu) if arrays else None
