"""Decode DICOM files. Of a header only what decoding needs is read: no name, id or date."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import DataConfig
from .decoding import BadImageError, UsableImageError
from .windows import ValueRange, brightness, to_picture, windowed

if TYPE_CHECKING:
    from PIL.Image import Image

DICOM_SUFFIXES = (".dcm", ".dic", ".dicom", ".ima")
MORE_DECODERS = "pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg"
ENVELOPE = bytes.fromhex("06092a864886f70d010703")  # an encrypted CMS message, as in the standard's secure DICOM files

PIXELS = (
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelSpacing", "PixelAspectRatio"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),  # a scale and a window for each frame
    *(f"{kind}PaletteColorLookupTable{what}" for kind in ("Red", "Green", "Blue") for what in ("Descriptor", "Data")),
    *(f"Segmented{colour}PaletteColorLookupTableData" for colour in ("Red", "Green", "Blue")),
    *("PixelData", "FloatPixelData", "DoubleFloatPixelData", "ExtendedOffsetTable", "ExtendedOffsetTableLengths"),
)
"""All that is read of a DICOM file."""


class MissingDecoderError(UsableImageError):
    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def is_dicom(path: Path) -> bool:
    """Tell DICOM by its suffix or, as many archives name files by numbers only, by its first bytes."""
    if path.suffix.strip(".0123456789") or path.name.upper() == "DICOMDIR":
        return path.suffix.lower() in DICOM_SUFFIXES
    return first_bytes(path)[128:] == b"DICM"


def first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(132)
    except OSError:
        return b""


def read_dicom(path: Path, tags: Iterable[str]) -> Any:
    from pydicom import dcmread
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    start = first_bytes(path)
    if start[128:] != b"DICM" and ENVELOPE in start:
        raise BadImageError("is encrypted, expected DICOM (decrypt it first)")
    dataset = dcmread(path, force=True, specific_tags=list(tags))  # old files lack the first 132 bytes
    if "TransferSyntaxUID" not in dataset.file_meta:
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit
    if not dataset and start[128:] != b"DICM":
        raise BadImageError("is not a DICOM file, despite its name")
    return dataset


def images_in_dicom(path: Path) -> int:
    return int(read_dicom(path, ["NumberOfFrames", "Rows"]).get("NumberOfFrames") or 1)


def open_dicom(path: Path, config: DataConfig) -> Callable[[int], "Image"]:
    from pydicom.pixels import apply_color_lut, apply_modality_lut, apply_voi

    dataset = read_dicom(path, PIXELS)
    if "Rows" not in dataset or not any(f"{kind}PixelData" in dataset for kind in ("", "Float", "DoubleFloat")):
        raise BadImageError("is a DICOM file without an image")
    _check_decoder(dataset.file_meta.TransferSyntaxUID)
    values, kind = _values(dataset), dataset.PhotometricInterpretation
    frames = int(dataset.get("NumberOfFrames") or 1)
    if kind == "PALETTE COLOR":
        values = apply_color_lut(values, dataset)
    spacing = tuple(float(side) for side in dataset.get("PixelSpacing") or dataset.get("PixelAspectRatio") or (1, 1))
    if values.ndim == 3 + (frames > 1):
        deep = values.dtype.itemsize > 1
        top = 2.0 ** (16 if kind == "PALETTE COLOR" else dataset.BitsStored) - 1 if deep else 255.0
        colours = values.reshape(frames, *values.shape[-3:])
        return lambda number: to_picture(colours[number] / top, spacing)
    values = values.reshape(frames, *values.shape[-2:])

    def rescaled(number: int) -> np.ndarray:
        own = _functional_group(dataset, number, "PixelValueTransformationSequence")
        return np.asarray(apply_modality_lut(values[number], own), dtype=np.float32)

    everything = ValueRange(rescaled, range(frames))

    def shown(number: int) -> "Image":
        plane, own = rescaled(number), _functional_group(dataset, number, "FrameVOILUTSequence")
        if config.window == "file" and own.get("WindowWidth") is not None:
            bright = windowed(plane, _first(own.WindowCenter), _first(own.WindowWidth), own.get("VOILUTFunction"))
        elif config.window == "file" and own.get("VOILUTSequence"):
            bright = apply_voi(plane, own) / (2.0 ** own.VOILUTSequence[0].LUTDescriptor[2] - 1)
        else:
            bright = brightness(plane, config, everything)
        return to_picture(1 - bright if kind == "MONOCHROME1" else bright, spacing)

    return shown


def _values(dataset: Any) -> np.ndarray:
    syntax = dataset.file_meta.TransferSyntaxUID
    try:
        return np.asarray(dataset.pixel_array)
    except RuntimeError:  # every decoder failed
        what = f"is damaged, or a kind of {syntax.name} that no installed package decodes"
        raise BadImageError(what if syntax.is_compressed else "is cut off or damaged") from None


def _functional_group(dataset: Any, number: int, name: str) -> Any:
    """Return where an enhanced file keeps a frame's scale or window; without such a place, the file itself."""
    for sequence, place in (("PerFrameFunctionalGroupsSequence", number), ("SharedFunctionalGroupsSequence", 0)):
        groups = dataset.get(sequence) or ()
        if place < len(groups) and groups[place].get(name):
            return groups[place].get(name)[0]
    return dataset


def _check_decoder(syntax: Any) -> None:
    from pydicom.pixels import get_decoder

    if not syntax.is_compressed or syntax.is_deflated:
        return
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise BadImageError(f"is compressed as {syntax.name}, which is not supported (convert it first)") from None
    if not decoder.is_available:
        what = f"is compressed as {syntax.name}, and no package that decodes this is installed"
        raise MissingDecoderError(what, f"Decompress it, or install some: {MORE_DECODERS}")


def _first(value: Any) -> float:
    """Return a number, or the first of several alternatives."""
    return float(value[0] if isinstance(value, Sequence) else value)
