"""DICOM and NIfTI files are shown as a radiologist's viewer shows them; a file may hold many images."""

import gzip
import io
import warnings
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import pkcs7
from nibabel import Nifti1Image
from nibabel.orientations import axcodes2ornt, ornt_transform
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.pixels import set_pixel_data
from pydicom.uid import HTJ2K, MPEG4HP41, JPEG2000Lossless, RLELossless

from helpers.scans import PATIENT, dicom, item, save_dicom, save_nifti
from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import count_images, each_image, load_images
from hetero_ssfl.data.dicom import PIXELS
from hetero_ssfl.data.medical import is_medical
from hetero_ssfl.errors import DataError
from hetero_ssfl.studies.describe import describe_data

RAMP = np.arange(64).reshape(8, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def seen(source: Path, **settings: Any) -> list[np.ndarray]:
    """Return all images of a source."""
    return [image.pixels.numpy() for image in each_image(DataConfig(source=str(source), **settings))[1]]


def only(source: Path, **settings: Any) -> np.ndarray:
    (image,) = seen(source, **settings)
    return image[0]


# --- grey values ---


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("LINEAR", np.clip((RAMP * 2.0 - 10 - (39.5 - 79 / 2)) / 79, 0, 1)),
        ("LINEAR_EXACT", np.clip((RAMP * 2.0 - 10) / 80, 0, 1)),
        ("SIGMOID", 1 / (1 + np.exp(-4 * (RAMP * 2.0 - 10 - 40) / 80))),
    ],
)
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_values_are_rescaled_and_windowed_as_the_standard_says(
    function: str, expected: np.ndarray, kind: str, tmp_path: Path
) -> None:
    scale = {"RescaleSlope": 2, "RescaleIntercept": -10, "WindowCenter": [40, 1], "WindowWidth": [80, 2]}
    more = {"VOILUTFunction": function, "PhotometricInterpretation": kind}
    found = only(save_dicom(tmp_path / "a.dcm", RAMP.astype(np.int16), **scale, **more))
    bright = 255 * (1 - expected if kind == "MONOCHROME1" else expected)
    assert np.abs(found - bright).max() <= 0.51


def test_a_window_of_the_config_comes_before_the_files_own(tmp_path: Path) -> None:
    path = save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint16), WindowCenter=5, WindowWidth=10)
    assert np.abs(only(path, window=(32, 64)) - RAMP / 64 * 255).max() <= 0.51
    spread = only(path, window="percentiles")
    low, high = np.percentile(RAMP, (0.5, 99.5))
    assert np.abs(spread - np.clip((RAMP - low) / (high - low), 0, 1) * 255).max() <= 0.51
    assert (only(path) == 255).sum() > 50


def test_tables_of_grey_values_and_of_colours_are_used(tmp_path: Path) -> None:
    table = item(LUTDescriptor=[64, 0, 8], LUTData=np.arange(252, -4, -4).astype(np.uint16).tobytes())
    table["LUTData"].VR = "OW"
    inverted = only(
        save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), ModalityLUTSequence=[table]), window=(126, 252)
    )
    assert inverted[0, 0] == 255
    assert inverted[-1, -1] == 0
    colours: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for number, colour in enumerate(("Red", "Green", "Blue")):
        colours |= {f"{colour}PaletteColorLookupTableDescriptor": [64, 0, 16]}
        entries = np.full(64, number * 32767, np.uint16)
        colours |= {f"{colour}PaletteColorLookupTableData": entries.tobytes()}
    (found,) = seen(save_dicom(tmp_path / "b.dcm", RAMP.astype(np.uint8), **colours))
    assert [int(channel.max()) for channel in found] == [0, 127, 255]


def test_frames_have_their_own_scales_and_windows(tmp_path: Path) -> None:
    frames = np.stack([RAMP, RAMP, RAMP]).astype(np.uint16)
    each = [
        item(PixelValueTransformationSequence=[item(RescaleSlope=slope, RescaleIntercept=0, RescaleType="US")])
        for slope in (1, 2, 3)
    ]
    shared = [item(FrameVOILUTSequence=[item(WindowCenter=32.5, WindowWidth=65)])]
    groups = {"PerFrameFunctionalGroupsSequence": each, "SharedFunctionalGroupsSequence": shared}
    found = seen(save_dicom(tmp_path / "a.dcm", frames, **groups))
    assert [int((image == 255).sum()) for image in found] == [0, 32, 42]
    assert found[2][0, 1, 2] == round(30 * 255 / 64)


@pytest.mark.parametrize("deep", [np.uint8, np.uint16])
def test_colour_frames_stay_coloured(deep: type, tmp_path: Path) -> None:
    top = np.iinfo(deep).max
    frames: np.ndarray = np.zeros((2, 8, 8, 3), deep)
    frames[0, ..., 0], frames[1, ..., 2] = top, top // 2
    red, blue = seen(save_dicom(tmp_path / "a.dcm", frames))
    assert red[:, 0, 0].tolist() == [255, 0, 0]
    assert blue[:, 3, 3].tolist()[:2] == [0, 0]
    assert blue[2, 3, 3] in (127, 128)


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless, None])
def test_compressed_files_and_files_without_a_preamble_have_the_same_pixels(syntax: Any, tmp_path: Path) -> None:
    plain = only(save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8)))
    dataset = dicom(RAMP.astype(np.uint8))
    if syntax == RLELossless:
        dataset.compress(syntax)
    elif syntax:
        picture, buffer = Image.fromarray(RAMP.astype(np.uint8)), io.BytesIO()
        picture.save(buffer, "JPEG2000", irreversible=False, no_jp2=True)
        dataset.PixelData, dataset.file_meta.TransferSyntaxUID = encapsulate([buffer.getvalue()]), syntax
    else:
        dataset.preamble = None
        del dataset.file_meta
        dataset.save_as(tmp_path / "b.dcm", implicit_vr=True, little_endian=True)
    if syntax:
        dataset.save_as(tmp_path / "b.dcm")
    assert np.array_equal(only(tmp_path / "b.dcm"), plain)


# --- slices ---


def volume() -> np.ndarray:
    """(left to right, back to front, feet to head): bright at the patient's right, brighter at the front."""
    values = np.zeros((6, 8, 10), np.int16)
    values[5], values[:, 7] = 50, 100
    values[:, :, 9] += 25
    return values


@pytest.mark.parametrize("code", ["RAS", "LPS", "ASL", "IPR"])
def test_slices_look_the_same_however_the_volume_is_stored(code: str, tmp_path: Path) -> None:
    image = Nifti1Image(volume(), np.eye(4))
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(tuple(code)))
    stored = image.as_reoriented(turn)
    path = save_nifti(tmp_path / "a.nii.gz", np.asanyarray(stored.dataobj), stored.affine)
    shown = {"window": (62.5, 125)}
    axial = seen(path, **shown)
    assert len(axial) == 10
    assert axial[0].shape == (1, 8, 6)
    assert np.unique(axial[0][0, 0]).tolist() == [204]  # the front is at the top
    assert axial[0][0, 3].tolist() == [102, 0, 0, 0, 0, 0]  # the patient's right is at the left
    assert int(axial[9][0, 3, 3]) - int(axial[8][0, 3, 3]) == 51
    coronal = seen(path, axis="coronal", **shown)
    assert (len(coronal), coronal[0].shape) == (8, (1, 10, 6))
    assert coronal[0][0, :, 0].tolist() == [153] + [102] * 9  # the head is at the top
    sagittal = seen(path, axis="sagittal", **shown)
    assert (len(sagittal), sagittal[0].shape) == (6, (1, 10, 8))
    assert sagittal[0][0, 5].tolist() == [204] + [0] * 7  # the front is at the left


def test_thick_slices_get_square_pixels(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "a.nii", volume(), np.diag([1, 1, 3, 1]))
    assert [image.shape for image in seen(path, axis="coronal")] == [(1, 30, 6)] * 8
    tall = save_dicom(tmp_path / "b.dcm", RAMP.astype(np.uint8), PixelAspectRatio=[2, 1])
    assert only(tall).shape == (16, 8)


def test_percentiles_are_those_of_one_volume_and_gaps_are_black(tmp_path: Path) -> None:
    first = np.linspace(0, 1, 8 * 8 * 4, dtype=np.float32).reshape(8, 8, 4)
    both = np.stack([first, 1000 * first], 3)
    both[0, 0] = np.nan
    found = seen(save_nifti(tmp_path / "a.nii.gz", both))
    assert len(found) == 8
    assert np.array_equal(found[:4], found[4:])
    assert found[3][0, -1, -1] == 0
    header = save_nifti(tmp_path / "b.nii", first)
    image = Nifti1Image(first, np.eye(4))
    image.header["cal_max"] = 0.5
    image.to_filename(header)
    assert (np.stack(seen(header)) == 255).mean() == pytest.approx(0.5, abs=0.02)


def test_a_single_slice_is_a_picture_in_any_direction(tmp_path: Path) -> None:
    save_nifti(tmp_path / "a.nii", volume()[:, :, 0])
    save_nifti(tmp_path / "b.nii", volume()[:, :1])
    for axis in ("axial", "sagittal"):
        assert [image.shape for image in seen(tmp_path, axis=axis)] == [(1, 8, 6), (1, 10, 6)]


def test_coloured_volumes_are_coloured_and_complex_ones_refused(tmp_path: Path) -> None:
    colours = np.zeros((8, 8, 2), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    colours["G"] = 200
    found = seen(save_nifti(tmp_path / "a.nii", colours))
    assert [image[:, 0, 0].tolist() for image in found] == [[0, 200, 0]] * 2
    with pytest.raises(DataError, match="complex numbers"):
        seen(save_nifti(tmp_path / "b.nii", np.zeros((8, 8, 2), np.complex64)))


# --- folders ---


def archive(root: Path) -> Path:
    """A folder as hospitals have it: names without suffixes, several images per file, an index, a photograph."""
    ramp = RAMP.astype(np.uint8)
    save_dicom(root / "p1" / "s1" / "IM000001", ramp)
    save_dicom(root / "p1" / "s2" / "1.2.826.0.1.3680043", np.stack([ramp, ramp]))
    save_nifti(root / "p2" / "brain.nii.gz", np.stack([ramp] * 3, 2))
    save_dicom(root / "DICOMDIR", ramp)
    (root / "._IM000001.dcm").write_bytes(b"left by another system")
    (root / "README").write_text("not an image")
    return root


def test_every_image_of_every_file_has_a_row_and_a_name(tmp_path: Path) -> None:
    source = archive(tmp_path / "archive")
    config = DataConfig(source=str(source))
    count, images = each_image(config)
    rows = [(image.row, image.path) for image in images]
    names = ["p1/s1/IM000001"] + [f"p1/s2/1.2.826.0.1.3680043#{k}" for k in range(2)]
    assert rows == list(enumerate(names + [f"p2/brain.nii.gz#{k}" for k in range(3)]))
    assert count == count_images(config).images == len(load_images(config, "train")) == 6
    facts = describe_data(str(source), [])
    assert (facts["train_images"], facts["shape"], facts["labels"]) == (6, [1, 8, 8], False)


def test_classes_are_folders_and_the_images_of_a_file_stay_together(tmp_path: Path) -> None:
    """Slices of one volume in both parts would let a test recognise patients."""
    for number in range(20):
        values = np.full((8, 8, 3), 10 * number, np.uint8)
        save_nifti(tmp_path / "scans" / f"class-{number % 2}" / f"{number:02}.nii", values)
    config = DataConfig(source=str(tmp_path / "scans"), window=(128, 256))
    train, test = (load_images(config, split) for split in ("train", "test"))
    assert (train.classes, len(train), len(test)) == (("class-0", "class-1"), 48, 12)
    assert train.labels is not None
    shades = {int(shade) for shade in train.pixels[:, 0, 0, 0]}
    assert len(shades) == 16
    assert not shades & {int(shade) for shade in test.pixels[:, 0, 0, 0]}
    assert train.labels.bincount().sum() == 48
    unlabeled = load_images(config.model_copy(update={"label_column": "none"}), "train")
    assert (unlabeled.labels, len(unlabeled)) == (None, 60)


def test_a_test_folder_is_for_tests_and_a_table_of_labels_is_refused(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        for number in range(count):
            for name in ("ill", "well"):
                save_dicom(tmp_path / part / name / f"{number}.dcm", RAMP.astype(np.uint8) + number)
    config = DataConfig(source=str(tmp_path))
    assert [len(load_images(config, split)) for split in ("train", "test", "all")] == [6, 4, 10]
    (tmp_path / "metadata.csv").write_text("file_name,label\n")
    with pytest.raises(DataError, match="has DICOM or NIfTI files and a metadata file"):
        load_images(config.model_copy(update={"side": 4}), "train")


def test_the_cache_depends_on_window_and_axis_and_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_nifti(tmp_path / "a" / "a.nii", volume())
    config = DataConfig(source=str(tmp_path / "a"))
    square = config.model_copy(update={"side": 4})
    sizes = [len(load_images(square.model_copy(update={"axis": axis}), "train")) for axis in ("axial", "coronal")]
    assert sizes == [10, 8]
    first = load_images(square, "train").pixels.clone()
    windowed = load_images(square.model_copy(update={"window": (10.0, 20.0)}), "train").pixels
    assert not np.array_equal(first, windowed)
    monkeypatch.setattr("hetero_ssfl.data.medical.open_nifti", None)
    assert np.array_equal(load_images(square, "train").pixels, first)


def test_a_file_is_decoded_once_and_only_one_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_ssfl.data import medical, nifti

    for name in ("a", "b"):
        save_nifti(tmp_path / f"{name}.nii.gz", volume())
    opened, usual = [], nifti.open_nifti

    def noted(path: Path, config: DataConfig) -> Any:
        opened.append(path.name)
        return usual(path, config)

    monkeypatch.setattr(medical, "open_nifti", noted)
    _, images = each_image(DataConfig(source=str(tmp_path)))
    for _ in range(10):
        next(images)
    assert opened == ["a.nii.gz"]
    assert (len(list(images)), opened) == (10, ["a.nii.gz", "b.nii.gz"])


# --- files that cannot be used ---


def torn_nifti(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 9999, (32, 32, 4), np.int16)
    path.write_bytes(gzip.compress(Nifti1Image(noise, np.eye(4)).to_bytes())[:-400])


def torn_dicom(path: Path) -> None:
    path.write_bytes(save_dicom(path, RAMP.astype(np.uint16)).read_bytes()[:-20])


def encrypted(path: Path) -> None:
    """As in the standard's secure files: a CMS envelope around the whole file."""
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "clinic")])
    day = datetime(2026, 1, 1)
    certificate = x509.CertificateBuilder(name, name, key.public_key(), 1, day, day).sign(key, hashes.SHA256())
    envelope = pkcs7.PKCS7EnvelopeBuilder().set_data(save_dicom(path, RAMP.astype(np.uint8)).read_bytes())
    envelope = envelope.add_recipient(certificate)
    path.write_bytes(envelope.encrypt(serialization.Encoding.DER, [pkcs7.PKCS7Options.Binary]))


def film(path: Path) -> None:
    dataset = dicom(RAMP.astype(np.uint8))
    set_pixel_data(dataset, RAMP.astype(np.uint8), "MONOCHROME2", 8, generate_instance_uid=False)
    dataset.compress(RLELossless)
    dataset.file_meta.TransferSyntaxUID = MPEG4HP41
    dataset.save_as(path)


def report(path: Path) -> None:
    dataset = dicom(RAMP.astype(np.uint8))
    for name in ("Rows", "Columns", "PixelData"):
        delattr(dataset, name)
    dataset.save_as(path)


BROKEN = {
    ("a.nii.gz", torn_nifti): "is cut off or damaged",
    ("a.dcm", torn_dicom): "is cut off or damaged",
    ("b.dcm", encrypted): "is encrypted, expected DICOM .decrypt it first.",
    ("c.dcm", film): "is compressed as MPEG-4 .*, which is not supported",
    ("d.dcm", report): "is a DICOM file without an image",
    ("e.dcm", lambda path: path.write_bytes(b"x" * 500)): "is not a DICOM file, despite its name",
    ("f.nii", lambda path: path.write_bytes(b"x" * 500)): "is not a NIfTI file, despite its name",
    ("g.nii", lambda path: save_nifti(path, np.zeros((2, 2, 2, 2, 3), np.uint8))): "expected 2 to 4 axes",
    ("h.nii", lambda path: save_nifti(path, np.full((8, 8, 1), np.nan))): "has no finite values",
}


@pytest.mark.parametrize(("name", "spoil"), BROKEN)
def test_each_kind_of_unusable_file_has_its_sentence_and_is_skipped(name: str, spoil: Any, tmp_path: Path) -> None:
    save_dicom(tmp_path / "good.dcm", RAMP.astype(np.uint8))
    spoil(tmp_path / name)
    with pytest.raises(DataError, match=rf"\({name}.*\) of .* {BROKEN[name, spoil]}.*on_bad_image = 'skip'") as raised:
        load_images(DataConfig(source=str(tmp_path)), "train")
    assert not any(value in str(raised.value) for value in PATIENT.values())
    kept = load_images(DataConfig(source=str(tmp_path), on_bad_image="skip", side=8), "train")
    assert len(kept) == 1
    assert {skipped.image.partition("#")[0] for skipped in kept.skipped} == {name}


def test_a_missing_decoder_is_named_and_its_images_are_never_skipped(tmp_path: Path) -> None:
    path = save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8))
    dataset = dicom(RAMP.astype(np.uint8))
    dataset.compress(RLELossless)
    dataset.file_meta.TransferSyntaxUID = HTJ2K
    dataset.save_as(path)
    with pytest.raises(DataError, match=r"compressed as High-Throughput JPEG 2000.*pip install pylibjpeg"):
        load_images(DataConfig(source=str(tmp_path), on_bad_image="skip"), "train")


@pytest.mark.parametrize(("library", "name"), [("pydicom", "a.dcm"), ("nibabel", "b.nii.gz")])
def test_a_missing_package_is_named(library: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8))
    save_nifti(tmp_path / "b.nii.gz", volume())
    monkeypatch.setattr("hetero_ssfl.data.medical.find_spec", lambda wanted: None if wanted == library else wanted)
    with pytest.raises(DataError, match=rf"files such as {name} need {library}.*hetero-ssfl\[medical\]"):
        load_images(DataConfig(source=str(tmp_path)), "train")


@pytest.mark.filterwarnings("error")  # a warning of pydicom may quote a value of the header
def test_no_flipped_or_cut_bytes_raise_anything_but_our_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = {
        "a.dcm": save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint16), WindowCenter=9, WindowWidth=9).read_bytes(),
        "b.nii": save_nifti(tmp_path / "b.nii", volume()).read_bytes(),
        "c.nii.gz": save_nifti(tmp_path / "c.nii.gz", volume()).read_bytes(),
    }
    for number in range(150):
        for name, good in files.items():
            spoilt = bytearray(good)
            for place in rng.integers(0, min(len(good), 900), size=6):
                spoilt[place] = rng.integers(0, 256)
            (tmp_path / name).write_bytes(
                bytes(spoilt[: rng.integers(1, len(good) + 1)] if number % 3 == 0 else spoilt)
            )
            # of another compression, after a flip in its name
            with suppress(DataError):
                seen(tmp_path / name, on_bad_image="skip", side=8, channels=1)


# --- patients ---


def test_nothing_of_a_header_but_what_decoding_needs_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pydicom.datadict import dictionary_VR

    from hetero_ssfl.data import dicom as dicom_files

    assert not [
        name for name in PIXELS if dictionary_VR(name).partition(" ")[0] in ("PN", "DA", "TM", "DT", "LO", "UI")
    ]
    path = save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), PatientAge="not an age", WindowWidth=9, WindowCenter=4)
    caplog.clear()
    read: list[Any] = []
    usual = dicom_files.read_dicom

    def noted(*given: Any) -> Any:
        read.append(usual(*given))
        return read[-1]

    monkeypatch.setattr(dicom_files, "read_dicom", noted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen(path)
    assert len(read) == 2  # to count, and to decode
    assert {element.keyword for dataset in read for element in dataset} <= set(PIXELS)
    assert not caplog.records


def test_what_the_cache_keeps_of_a_file_has_no_name(cache: Path, tmp_path: Path) -> None:
    save_dicom(tmp_path / "scans" / "a.dcm", RAMP.astype(np.uint8))
    save_nifti(tmp_path / "scans" / "b.nii.gz", RAMP[:, :, None].astype(np.uint8))
    assert len(load_images(DataConfig(source=str(tmp_path / "scans")), "train")) == 2
    kept = b"".join(file.read_bytes() for file in cache.iterdir())
    assert kept
    assert not [value for value in (*PATIENT.values(), "Planted", "19170805") if value.encode() in kept]


def test_files_are_found_by_their_first_bytes_only_if_the_name_does_not_say_what_they_are(tmp_path: Path) -> None:
    whole = save_dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8)).read_bytes()
    for name, expected in (("IM1", True), ("1.2.840", True), ("x.txt", False), ("DICOMDIR", False), ("y.png", False)):
        (tmp_path / name).write_bytes(whole)
        assert is_medical(tmp_path / name) == expected
    (tmp_path / "IM2").write_bytes(b"text")
    assert not is_medical(tmp_path / "IM2")
