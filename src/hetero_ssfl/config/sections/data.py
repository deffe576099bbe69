"""Sections about images: where they come from, who has which, the RAD, and random views."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Fraction, NamedCode, Section


class DataConfig(Section):
    source: str = "digits"
    """`digits`, `cifar10`, `cifar100`, `tiny-imagenet`, a local path, or a hub id."""
    side: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Resize (and centre-crop) every image to this many pixels; required for images of mixed sizes."""
    channels: Literal[1, 3] | None = None
    """Grey (1) or colour (3); by default as in the first image."""
    bit_depth: Annotated[int, Field(ge=8, le=16)] | None = None
    """Files with grey values of 16 bits: white is 2^bit_depth - 1. By default 16, and a source whose largest value is
    below an eighth of that, as in scans of 12 bits, is refused."""
    window: Literal["file", "percentiles"] | tuple[float, PositiveFloat] = "file"
    """DICOM and NIfTI: the values that are shown from black to white. `file`: the window that the file itself names or,
    without one, its percentiles 0.5 to 99.5; `percentiles`: always these; [center, width], such as [40, 400] for the
    soft tissue of every CT."""
    axis: Literal["axial", "coronal", "sagittal"] = "axial"
    """NIfTI: the direction of the slices that are images."""
    limit: PositiveInt | None = None
    """Use only this many training images, balanced over the classes and chosen by the seed."""
    validation: NonNegativeInt = 200
    """Training images held out for choosing settings; none without labels. By default at most a tenth of the images."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with an image that cannot be read: stop, or skip and count it."""
    image_column: str | None = None
    """The column of a parquet file or hub data set that contains the images; found by itself if there is one."""
    label_column: str | None = None
    """The column of a table's labels, numbers or words; by default `label` or `fine_label`. "none": use no labels."""


class PartitionConfig(Section):
    kind: Literal["iid", "classes", "dirichlet", "shards"] = "classes"
    """How images are divided: at random, by whole classes, by a Dirichlet distribution, or by shards."""
    classes_per_client: PositiveInt | None = None
    """For `classes`: by default the number of classes divided by the number of clients (at least 1)."""
    alpha: PositiveFloat = 0.5
    """For `dirichlet`: smaller values make the clients more unequal."""
    shards_per_client: PositiveInt = 2
    """For `shards`: the sorted images are cut into equal pieces, and each client gets this many."""
    images: tuple[PositiveInt, ...] = ()
    """Most images of each client: client k keeps at most entry k modulo the length of the list; by default all."""


class RadConfig(Section):
    """The Representation Alignment Dataset: unlabeled images that every participant has."""

    size: PositiveInt = 300
    """Number of RAD images; by default at most a fifth of the training images, or all of `rad.source`."""
    source: str | None = None
    """Another data set to take the RAD from; by default, training images that no client has."""
    in_ssl: bool = True
    """Also train the local self-supervised loss on the RAD images."""


class ViewsConfig(Section):
    """The random views of an image. A probability or range of 0 disables a transformation."""

    count: Annotated[int, Field(ge=2, le=16)] = 2
    """Views of each image in a step. The loss is the mean over all pairs of views."""

    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.2, 1.0)
    """Smallest and largest fraction of the area that a random resized crop keeps."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    rotate: NonNegativeFloat = 0.0
    """Degrees to either side."""
    translate: Fraction = 0.0
    """Largest shift in either direction, as a fraction of the side."""
    shear: NonNegativeFloat = 0.0
    """Degrees to either side."""
    jitter: Fraction = 0.8
    """Probability that brightness, contrast, saturation and hue are changed."""
    brightness: Fraction = 0.4
    """Largest relative change of the brightness."""
    contrast: Fraction = 0.4
    """Largest relative change of the contrast."""
    saturation: Fraction = 0.4
    """Largest relative change of the saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Largest shift of the hue, as a fraction of the colour circle."""
    grayscale: Fraction = 0.2
    """Probability that a view loses its colour."""
    blur: Fraction = 0.0
    """Probability of a Gaussian blur."""
    solarize: Fraction = 0.0
    """Probability that bright pixels are inverted."""
    function: Annotated[str, NamedCode()] | None = None
    """Your own views instead, as `package.module:callable`: (batch, generator) -> batch."""
