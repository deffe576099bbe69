"""Images, who holds which, and the views that train on them."""

from .images import Images, digest, load_images
from .partition import assign_classes, partition
from .splits import Split, load_rad, load_rad_alone, split_training_images
from .views import random_view, to_input

__all__ = [
    "Images",
    "Split",
    "assign_classes",
    "digest",
    "load_images",
    "load_rad",
    "load_rad_alone",
    "partition",
    "random_view",
    "split_training_images",
    "to_input",
]
