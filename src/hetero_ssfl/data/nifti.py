"""Decode NIfTI files: volumes that are cut into slices."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..config import DataConfig
from .decoding import BadImageError
from .windows import ValueRange, brightness, to_picture

if TYPE_CHECKING:
    from PIL.Image import Image

NIFTI_SUFFIXES = (".nii", ".nii.gz")
AXES = {"sagittal": 0, "coronal": 1, "axial": 2}
"""The axis of an array of (left to right, back to front, feet to head) that is perpendicular to the slices."""


def is_nifti(path: Path) -> bool:
    return path.name.lower().endswith(NIFTI_SUFFIXES)


class Layout(NamedTuple):
    """How a NIfTI file becomes slices: turned to (left to right, back to front, feet to head), cut along an axis."""

    image: Any
    turn: np.ndarray
    axis: int
    slices: int
    volumes: int
    spacing: tuple[float, ...]
    """Millimetres between rows and between columns."""

    @property
    def images(self) -> int:
        return self.slices * self.volumes


def nifti_layout(path: Path, config: DataConfig) -> Layout:
    import nibabel
    from nibabel.filebasedimages import ImageFileError

    try:
        image = nibabel.load(path)
    except ImageFileError:
        raise BadImageError("is not a NIfTI file, despite its name") from None
    shape = [*image.shape, 1, 1, 1][: max(3, len(image.shape))]
    if len(shape) > 4 or min(shape) < 1:
        raise BadImageError(f"has the shape {image.shape}, expected 2 to 4 axes (split it first)")
    turn = nibabel.io_orientation(image.affine)
    order = turn[:, 0].argsort()
    sides = [shape[axis] for axis in order]
    lengths = [float([*image.header.get_zooms(), 1.0, 1.0][axis]) for axis in order]
    axis = sides.index(1) if sides.count(1) == 1 else AXES[config.axis]  # one picture has only one direction
    columns, rows = (length for place, length in enumerate(lengths) if place != axis)
    return Layout(image, turn, axis, sides[axis], shape[3] if len(shape) == 4 else 1, (rows, columns))


def open_nifti(path: Path, config: DataConfig) -> Callable[[int], "Image"]:
    import nibabel

    image, turn, axis, slices, volumes, spacing = nifti_layout(path, config)
    raw = np.asanyarray(image.dataobj.get_unscaled())
    colours = raw.dtype.names is not None
    if raw.dtype.kind == "c":
        raise BadImageError("has complex numbers, expected grey values or colours (take their magnitude first)")
    if colours:
        raw = np.stack([raw[name] for name in raw.dtype.names[:3]], -1)
    raw = raw.reshape(*image.shape[:3], *[1] * (3 - len(image.shape)), volumes, *raw.shape[-1:] * colours)
    raw = nibabel.apply_orientation(raw, turn)

    def plane(number: int) -> np.ndarray:
        """Return a slice as radiologists look at it: the patient's right at the left, front and head at the top."""
        cut = np.take(raw[:, :, :, number // slices], number % slices, axis)[::-1, ::-1].swapaxes(0, 1)
        return cut / 255 if colours else cut * np.float32(image.dataobj.slope) + np.float32(image.dataobj.inter)

    header = image.header
    known = (float(header["cal_min"]), float(header["cal_max"]))  # the window that the file's author wants, if any
    firsts = range(0, slices * volumes, slices)
    ranges = [ValueRange(plane, range(first, first + slices), known) for first in firsts]

    def shown(number: int) -> "Image":
        values = plane(number)
        return to_picture(values if colours else brightness(values, config, ranges[number // slices]), spacing)

    return shown
