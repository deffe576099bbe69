"""DICOM and NIfTI files as scanners and hospitals' archives write them, made by pydicom and nibabel."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid
from sklearn.datasets import load_digits

DIGITS = load_digits()
PATIENT = {"PatientName": "Planted^Name", "PatientID": "PLANTED-ID-0417", "PatientBirthDate": "19170804"}
"""What no file, message or log may contain."""


def dicom(values: np.ndarray, **fields: Any) -> FileDataset:
    """Return a DICOM data set of one image or, with a third axis in front, of several frames."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[values.tobytes().hex()[:64]])
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID, dataset.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    colours = values.ndim > 2 and values.shape[-1] == 3
    dataset.SamplesPerPixel = 3 if colours else 1
    dataset.PhotometricInterpretation = "RGB" if colours else "MONOCHROME2"
    if colours:
        dataset.PlanarConfiguration = 0
    frames, rows, columns = values.shape[-3 - colours : -2 - colours], *values.shape[-2 - colours :][:2]
    dataset.Rows, dataset.Columns = rows, columns
    if frames:
        dataset.NumberOfFrames = frames[0]
    dataset.BitsAllocated = dataset.BitsStored = 8 * values.dtype.itemsize
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(values.dtype.kind == "i")
    dataset.PixelData = values.tobytes()
    for name, value in {**PATIENT, "StudyDate": "19170805", "InstitutionName": "Planted Clinic", **fields}.items():
        setattr(dataset, name, value)
    return dataset


def item(**fields: Any) -> Dataset:
    dataset = Dataset()
    for name, value in fields.items():
        setattr(dataset, name, value)
    return dataset


def save_dicom(path: Path, values: np.ndarray, **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    dicom(values, **fields).save_as(path, enforce_file_format=True)
    return path


def save_nifti(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine)
    image.header["descrip"] = PATIENT["PatientID"].encode()
    nibabel.save(image, path)
    return path


def write_scans(folder: Path, first: int, count: int, classes: int = 0) -> None:
    """Write digits as CT images in Hounsfield units with a window, optionally with one folder per class."""
    for number in range(first, first + count):
        place = folder / f"class-{DIGITS.target[number] % classes}" if classes else folder
        values = (DIGITS.images[number] * 64).astype(np.int16).repeat(2, 0).repeat(2, 1)
        window = {"RescaleSlope": 1, "RescaleIntercept": -1024, "WindowCenter": -512, "WindowWidth": 1024}
        save_dicom(place / f"IM{number:05}.dcm", values, **window)
