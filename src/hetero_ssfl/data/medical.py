"""Decode DICOM and NIfTI files, whose images look as in a radiologist's viewer. One file may hold many images.

Of a header only what decoding needs is read: no name, id or date. What the libraries say of a file is not logged, since
it may quote values of the header.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..config import DataConfig
from ..errors import DataError
from ..plugins import install_command
from .cache import remembered
from .decoding import BadImageError
from .dicom import images_in_dicom, is_dicom, open_dicom
from .nifti import is_nifti, nifti_layout, open_nifti

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 1_000_000  # a header that claims more in a file is wrong


def is_medical(path: Path) -> bool:
    return is_nifti(path) or is_dicom(path)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the libraries from warning and logging: they may quote values of a header."""
    logs = [log for name in ("pydicom", "nibabel.global") if not (log := logging.getLogger(name)).disabled]
    for log in logs:
        log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log in logs:
            log.disabled = False


class Scan:
    """A medical file. It is decoded when the first of its images is asked for; so it fails only once, too."""

    def __init__(self, path: Path, images: int, config: DataConfig) -> None:
        self.path, self.images, self.config = path, images, config
        self._shown: Callable[[int], Image] | None = None
        self._error: Exception | None = None

    def picture(self, number: int) -> "Image":
        if self._error:
            raise self._error
        try:
            with _silent():
                if self._shown is None:
                    self._shown = (open_nifti if is_nifti(self.path) else open_dicom)(self.path, self.config)
                return self._shown(number)
        except BadImageError as error:
            self._error = error
        except Exception:  # the libraries raise many types for broken files
            self._error = BadImageError("is cut off or damaged")
        raise self._error


class ScanImage(NamedTuple):
    """One image of a medical file."""

    scan: Scan
    number: int

    def picture(self) -> "Image":
        return self.scan.picture(self.number)


def image_names(name: str, count: int) -> list[str]:
    """Return the names of the images of a file: its own or, if it has several, `scan.nii.gz#0` and so on."""
    return [name] if count == 1 else [f"{name}#{number}" for number in range(count)]


def count_in_files(files: Sequence[Path], config: DataConfig) -> list[int]:
    """Return how many images each file has. A file whose header cannot be read counts as one, which is unreadable."""
    medical = [file for file in files if is_medical(file)]
    for library, own in (("nibabel", is_nifti), ("pydicom", is_dicom)):
        missing = [file.name for file in medical if own(file)] if find_spec(library) is None else []
        if missing:
            what = f"files such as {missing[0]} need {library}, which is not installed"
            raise DataError(f"{what}. Install it: {install_command('medical')}")
    if not medical:
        return [1] * len(files)
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in medical]
    counts = remembered(["images in files", config.axis, stats], lambda: _counts(medical, config))
    known = dict(zip(medical, counts, strict=True))
    return [known.get(file, 1) for file in files]


def _counts(files: Iterable[Path], config: DataConfig) -> list[int]:
    counts = []
    for file in files:
        try:
            with _silent():
                count = nifti_layout(file, config).images if is_nifti(file) else images_in_dicom(file)
        except Exception:  # decoding it says what is wrong
            count = 1
        counts.append(count if 1 <= count <= MAX_IMAGES else 1)
    return counts


def images_in_files(files: Sequence[Path], counts: Sequence[int], config: DataConfig) -> Iterator[Path | ScanImage]:
    """Yield all images of all files. One medical file at a time is in memory."""
    for file, count in zip(files, counts, strict=True):
        if is_medical(file):
            scan = Scan(file, count, config)
            yield from (ScanImage(scan, number) for number in range(count))
        else:
            yield file
