"""Load images, divide them among clients, and make random views for training."""

from .cache import remembered
from .decoding import USUAL_SIDE, UnequalSizesError, UnreadableImageError, skip_with
from .images import Counts, Images, Skipped, SourceImage
from .images import count_images, digest, each_image, image_sizes, load_images, take
from .objects import Data, agree_on_classes, joined, read_given, read_rad, read_with_test
from .partition import assign_classes, partition
from .pixels import are_dark, float_images_remedy, is_pixels, largest_value, to_unit_range
from .snapshots import Snapshot, take_snapshot, what_changed
from .sources import is_here, same_source
from .splits import Split, balanced_order, fit_rad, fit_to_data, kept_apart, load_rad, load_rad_alone
from .splits import split_training_images, validation_size, without_trained
from .views import MEAN, STD, random_view, ten_crop, to_input
