"""Pictures that are not plain 8-bit images are scaled by the range of their type, turned upright, or refused."""

import io
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import load_images
from hetero_ssfl.data.decoding import decode_image
from hetero_ssfl.errors import DataError
from hetero_ssfl.studies.describe import describe_data

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # about the files that are spoilt on purpose

RAMP = np.linspace(0, 1, 64).reshape(8, 8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)), "PNG"),
        encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)), "TIFF"),
        encoded(Image.fromarray((RAMP * 65535).astype(np.int32)), "TIFF"),
        encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
    ],
    ids=["16-bit PNG", "16-bit TIFF", "32-bit TIFF with 16-bit values", "float TIFF"],
)
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_deep_grey_values_are_scaled_to_8_bits(data: bytes, channels: int | None) -> None:
    found = decode_image(data, None, channels)
    count = len(found)
    assert count == (channels or 1)
    expected = (RAMP * 255)[None].repeat(count, 0)
    assert np.abs(found.astype(float) - expected).max() <= 1.0


def test_scans_of_12_bits_are_refused_or_scaled_as_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as 16 bits they would have 17 grey levels."""
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    for number in range(6):
        place = tmp_path / "scans" / f"class-{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((np.roll(RAMP, number) * 4095).astype(np.uint16)).save(place / f"{number}.png")
    source = str(tmp_path / "scans")
    for read in (lambda: load_images(DataConfig(source=source), "train"), lambda: describe_data(source, [])):
        with pytest.raises(DataError, match=r"values up to 4095 of 65535.*Set data\.bit_depth = 12, or 16"):
            read()
    assert describe_data(source, ["data.bit_depth=12"])["shape"] == [1, 8, 8]
    values = {bits: load_images(DataConfig(source=source, bit_depth=bits), "all").pixels for bits in (12, 16)}
    assert (int(values[12].max()), len(values[12].unique())) == (255, 64)
    assert (int(values[16].max()), len(values[16].unique())) == (16, 17)
    with pytest.raises(DataError, match="has values from 0 to 4095, expected 0 to 1023"):
        load_images(DataConfig(source=source, bit_depth=10), "train")


def packed_tiff(bits: int, photometric: int) -> bytes:
    """A TIFF with grey values of 12 bits, two in three bytes, or of 16."""
    values = (RAMP * (2**bits - 1)).astype(np.uint16).ravel()
    pairs = values.reshape(-1, 2)
    packed = b"".join(((int(a) % 4096 << 12) + int(b) % 4096).to_bytes(4, "big")[1:] for a, b in pairs)
    data = packed if bits == 12 else values.tobytes()
    tags = {
        256: 8,
        257: 8,
        258: bits,
        259: 1,
        262: photometric,
        273: 8 + 2 + 9 * 12 + 4,
        277: 1,
        278: 8,
        279: len(data),
    }
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, tags[tag]) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + data


@pytest.mark.parametrize(("bits", "photometric"), [(12, 1), (16, 0), (16, 1)])
def test_a_tiff_that_says_how_its_values_are_meant_is_believed(bits: int, photometric: int, tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(packed_tiff(bits, photometric))
    (found,) = load_images(DataConfig(source=str(tmp_path)), "train").pixels
    expected = 255 * (RAMP if photometric else 1 - RAMP)
    assert np.abs(found[0].numpy() - expected).max() <= 1.0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (RAMP.astype(np.float32) * 300, "has values from 0 to 300, expected 0 to 1"),
        (RAMP.astype(np.float32) - 0.5, "has values from -0.5 to 0.5"),
        (np.full((8, 8), np.nan, np.float32), "has values from nan to nan"),
        (
            (RAMP * 2**30).astype(np.int32),
            "has values from 0 to 1.07374e\\+09, expected 0 to 65535",
        ),
    ],
)
def test_values_of_an_unknown_range_are_refused_with_the_remedy(
    values: np.ndarray, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "scan.tiff").write_bytes(encoded(Image.fromarray(values), "TIFF"))
    with pytest.raises(DataError, match=rf"image 0 \(scan\.tiff\).*{reason}.*rescale it first"):
        load_images(DataConfig(source=str(tmp_path)), "train")


def test_a_photograph_is_turned_upright() -> None:
    picture = Image.fromarray((RAMP * 255).astype(np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held sideways: turn it by 90 degrees
    found = decode_image(encoded(picture, "PNG", exif=turned), None, 1)
    upright = decode_image(encoded(picture.transpose(Image.Transpose.ROTATE_270), "PNG"), None, 1)
    assert np.array_equal(found, upright)
    assert not np.array_equal(found, decode_image(encoded(picture, "PNG"), None, 1))


def bomb(width: int, height: int) -> bytes:
    """A BMP whose header claims a size that its data does not have."""
    whole = bytearray(encoded(Image.fromarray(np.zeros((8, 8), np.uint8)), "BMP"))
    whole[18:26] = struct.pack("<ii", width, height)
    return bytes(whole)


def odd_offset() -> bytes:
    """A TIFF whose strip offset is a fraction."""
    whole = bytearray(encoded(Image.fromarray(np.zeros((8, 8), np.uint8)), "TIFF"))
    place = whole.index(struct.pack("<HH", 273, 4)) if struct.pack("<HH", 273, 4) in whole else -1
    if place >= 0:
        whole[place + 2 : place + 4] = struct.pack("<H", 5)  # RATIONAL
    return bytes(whole)


@pytest.mark.parametrize(
    "data", [bomb(2**30, 2**30), bomb(2**16, 2**16), bomb(-5, 7), odd_offset(), b"GIF89a" + b"\xff" * 40]
)
def test_a_picture_from_nowhere_is_one_sentence_or_is_skipped(data: bytes, tmp_path: Path) -> None:
    good = encoded(Image.fromarray((RAMP * 255).astype(np.uint8)), "PNG")
    (tmp_path / "a.png").write_bytes(good)
    (tmp_path / "b.png").write_bytes(data)
    with pytest.raises(DataError, match=r"image 1 \(b\.png\)"):
        load_images(DataConfig(source=str(tmp_path)), "train")
    kept = load_images(DataConfig(source=str(tmp_path), on_bad_image="skip"), "train")
    assert (len(kept), len(kept.skipped)) == (1, 1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"])
def test_no_flipped_or_cut_bytes_raise_anything_but_our_error(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    good = encoded(Image.fromarray((RAMP * 255).astype(np.uint8)).convert("RGB"), kind)
    (tmp_path / f"a.{kind.lower()}").write_bytes(good)
    for number in range(12):
        spoilt = bytearray(good)
        for place in rng.integers(0, len(good), size=4):
            spoilt[place] = rng.integers(0, 256)
        (tmp_path / f"b.{kind.lower()}").write_bytes(bytes(spoilt[: rng.integers(1, len(good) + 1)]))
        config = DataConfig(source=str(tmp_path), on_bad_image="skip", side=8 + number % 2)
        assert 1 <= len(load_images(config, "train")) <= 2


def test_an_avif_photo_is_an_image_beside_others(tmp_path: Path) -> None:
    photo = Image.fromarray((RAMP * 255).astype(np.uint8)).convert("RGB")
    photo.save(tmp_path / "a.avif")
    photo.save(tmp_path / "b.jpg")
    assert len(load_images(DataConfig(source=str(tmp_path)), "train")) == 2


@pytest.mark.skipif(find_spec("pillow_heif") is not None, reason="pillow-heif is installed")
@pytest.mark.parametrize("on_bad_image", ["error", "skip"])
def test_a_heic_photo_names_the_missing_package_and_is_never_skipped(
    tmp_path: Path, on_bad_image: Literal["error", "skip"]
) -> None:
    Image.fromarray((RAMP * 255).astype(np.uint8)).save(tmp_path / "b.png")
    (tmp_path / "a.HEIC").write_bytes(struct.pack(">I", 24) + b"ftypheic" + b"\0" * 12)
    with pytest.raises(DataError, match=r"image 0 \(a\.HEIC\).*HEIC.*pip install 'hetero-ssfl\[heic\]'"):
        load_images(DataConfig(source=str(tmp_path), on_bad_image=on_bad_image), "train")


def test_what_was_skipped_is_listed_with_its_reason_also_from_the_cache(tmp_path: Path) -> None:
    photo = Image.fromarray((RAMP * 255).astype(np.uint8))
    photo.save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"torn")
    Image.fromarray(RAMP.astype(np.float32) * 300).save(tmp_path / "c.tif")
    for _ in range(2):
        skipped = load_images(DataConfig(source=str(tmp_path), on_bad_image="skip"), "train").skipped
        assert [(one.source, one.image) for one in skipped] == [(str(tmp_path), "b.png"), (str(tmp_path), "c.tif")]
        assert "values from 0 to 300" in skipped[1].reason
