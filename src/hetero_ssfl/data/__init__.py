"""Load images, divide them among clients, and make random views for training."""

from .batches import take
from .cache import remembered
from .images import USUAL_SIDE, Counts, Images, UnequalSizesError, count_images, digest, load_images
from .leakage import without_trained
from .objects import Data, agree_on_classes, joined, read_given, read_rad, read_with_test
from .partition import assign_classes, partition
from .pixels import are_dark, float_images_remedy, is_pixels, largest_value, to_unit_range
from .snapshots import Snapshot, take_snapshot, what_changed
from .sources import is_here, same_source
from .splits import (
    Split,
    balanced_order,
    fit_rad,
    fit_to_data,
    kept_apart,
    load_rad,
    load_rad_alone,
    split_training_images,
    validation_size,
)
from .streams import image_sizes
from .views import MEAN, STD, random_view, to_input

__all__ = [
    "MEAN",
    "STD",
    "USUAL_SIDE",
    "Counts",
    "Data",
    "Images",
    "Snapshot",
    "Split",
    "UnequalSizesError",
    "agree_on_classes",
    "are_dark",
    "assign_classes",
    "balanced_order",
    "count_images",
    "digest",
    "fit_rad",
    "fit_to_data",
    "float_images_remedy",
    "image_sizes",
    "is_here",
    "is_pixels",
    "joined",
    "kept_apart",
    "largest_value",
    "load_images",
    "load_rad",
    "load_rad_alone",
    "partition",
    "random_view",
    "read_given",
    "read_rad",
    "read_with_test",
    "remembered",
    "same_source",
    "split_training_images",
    "take",
    "take_snapshot",
    "to_input",
    "to_unit_range",
    "validation_size",
    "what_changed",
    "without_trained",
]
