"""Every kind of client data is converted to the same tensors."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset as ArrowDataset
from datasets import DatasetDict, Features, Value
from datasets import Image as ImageFeature
from numpy.typing import NDArray
from pandas import DataFrame
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from helpers.pieces import net
from hetero_ssfl import Client, federate
from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import agree_on_classes, load_images, read_given, read_rad, read_with_test
from hetero_ssfl.errors import DataError

SIDE = 8
PLAIN = DataConfig()


def pixels(count: int = 10, channels: int = 3, side: int = SIDE, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (count, channels, side, side), dtype=np.uint8)


def pictures(channels: int = 3, side: int = SIDE, seed: int = 0) -> list[Image.Image]:
    return [Image.fromarray(p.transpose(1, 2, 0).squeeze()) for p in pixels(10, channels, side, seed)]


def write(folder: Path, images: list[Image.Image]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    return folder


class Pairs(Dataset[tuple[Image.Image, int]]):
    """A data set with a length and items that is not iterable."""

    __iter__ = None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, k: int) -> tuple[Image.Image, int]:
        return pictures()[k], k % 2


class Stream(IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.from_numpy(pixels()))


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_can_be_first_last_or_missing(channels: int) -> None:
    first = pixels(channels=channels)
    forms = [first, first.transpose(0, 2, 3, 1), torch.from_numpy(first), list(first), pictures(channels)]
    forms += [first[:, 0]] if channels == 1 else []
    for form in forms:
        assert np.array_equal(read_given(form, None, PLAIN, "a").pixels, first)


def test_labels_of_datasets_are_used() -> None:
    wanted = pixels()
    labels = [k % 2 for k in range(10)]
    arrow = ArrowDataset.from_dict({"img": pictures(), "label": labels}).cast_column("img", ImageFeature())
    for data in (Pairs(), TensorDataset(torch.from_numpy(wanted), torch.tensor(labels)), arrow):
        found = read_given(data, None, PLAIN, "a")
        assert np.array_equal(found.pixels, wanted)
        assert found.labels is not None
        assert found.labels.tolist() == labels
    for data in (Stream(), TensorDataset(torch.from_numpy(wanted))):
        found = read_given(data, None, PLAIN, "a")
        assert np.array_equal(found.pixels, wanted)
        assert found.labels is None


def test_a_folder_without_labels_is_used_completely_flat_or_nested(tmp_path: Path) -> None:
    write(tmp_path / "flat", pictures())
    write(tmp_path / "nested" / "2024", pictures()[:5])
    write(tmp_path / "nested" / "2025" / "may", pictures()[5:])
    for name in ("flat", "nested"):
        train, test = read_with_test(str(tmp_path / name), None, None, PLAIN, "a")
        assert (len(train), len(test), train.labels) == (10, 0, None)


def test_with_labels_a_fifth_is_held_out_unless_there_is_a_test_set(tmp_path: Path) -> None:
    write(tmp_path / "cats-and-dogs" / "cat", pictures())
    write(tmp_path / "cats-and-dogs" / "dog", pictures())
    for data, labels in ((tmp_path / "cats-and-dogs", None), (pixels(20), ["cat", "dog"] * 10)):
        train, test = read_with_test(data, labels, None, PLAIN, "a")
        assert (len(train), len(test), train.classes) == (16, 4, ("cat", "dog"))
    for held_out, count in (((pixels(4), [0, 1, 1, 0]), 4), (Pairs(), 10), (tmp_path / "cats-and-dogs", 20)):
        train, test = read_with_test(pixels(20), [1] * 20, held_out, PLAIN, "a")
        assert (len(train), len(test)) == (20, count)
    with pytest.raises(DataError, match="the test data of a have no labels"):
        read_with_test(pixels(), [0] * 10, pixels(), PLAIN, "a")


def test_a_class_has_the_same_index_at_every_client() -> None:
    parts = [read_given(pixels(2), names, PLAIN, "a") for names in (["dog", "cat"], ["eel", "dog"], ["10", "9"])]
    agreed = agree_on_classes([*parts, read_given(pixels(), None, PLAIN, "b")])
    assert all(part.classes == ("9", "10", "cat", "dog", "eel") for part in agreed)
    assert [part.labels.tolist() for part in agreed if part.labels is not None] == [[3, 2], [4, 3], [1, 0]]


def test_a_class_that_is_only_in_the_test_split_keeps_its_name(tmp_path: Path) -> None:
    splits = {"train": [0, 1] * 5, "test": [0, 2] * 5}
    for seed, (split, labels) in enumerate(splits.items()):
        table = ArrowDataset.from_dict({"img": pictures(seed=seed), "label": labels})
        table.cast_column("img", ImageFeature()).to_parquet(tmp_path / f"{split}.parquet")
    images = read_given(tmp_path, None, PLAIN, "a")
    assert images.classes == ("0", "1", "2")
    assert images.labels is not None
    assert images.labels.tolist() == [0, 1] * 5 + [0, 2] * 5
    assert agree_on_classes([images])[0].labels is not None


def test_a_rad_is_read_from_the_training_split(tmp_path: Path) -> None:
    digits = DataConfig(source="digits")
    assert torch.equal(read_rad("digits", PLAIN), load_images(digits, "train").pixels)
    write(tmp_path / "flat", pictures())
    assert len(read_rad(tmp_path / "flat", DataConfig(label_column="diagnosis"))) == 10  # a RAD needs no labels
    assert np.array_equal(read_rad(pixels(), PLAIN), pixels())


def test_unreadable_images_are_counted_once_including_test_images(tmp_path: Path) -> None:
    config = DataConfig(on_bad_image="skip")
    for name in ("a", "b"):
        write(tmp_path / name, pictures())
        (tmp_path / name / "broken.png").write_text("no image")
    for labels, test, expected in ((None, None, (1, 0)), ([0, 1] * 5, None, (1, 0)), ([0] * 10, "b", (1, 1))):
        held_out = (tmp_path / test, [0] * 10) if test else None
        parts = read_with_test(tmp_path / "a", labels, held_out, config, "a")
        assert tuple(len(part.skipped) for part in parts) == expected


def test_side_and_channels_convert_all_images_to_one_shape(tmp_path: Path) -> None:
    mixed = [*pictures(side=12)[:3], *pictures(1, side=9)[:3]]
    config = DataConfig(side=8, channels=1)
    folder = write(tmp_path / "mixed", mixed)
    arrays = [np.asarray(image) for image in mixed]
    for form in (mixed, arrays, folder):
        assert read_given(form, None, config, "a").pixels.shape == (6, 1, 8, 8)
    assert torch.equal(read_given(mixed, None, config, "a").pixels, read_given(arrays, None, config, "a").pixels)
    assert read_given(pixels(4, 1, 12), None, DataConfig(side=8, channels=3), "a").pixels.shape == (4, 3, 8, 8)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u2"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_images_of_any_number_of_channels_keep_their_values(dtype: str, channels: int) -> None:
    """Big-endian 16-bit arrays are what readers of TIFF and FITS files return."""
    first = (pixels(channels=channels).astype(dtype) * (1 if dtype == "uint8" else 251)).astype(dtype)
    own = first.astype(np.dtype(dtype).newbyteorder("="))
    forms = [
        first,
        first.transpose(0, 2, 3, 1),
        list(first),
        torch.from_numpy(own),
        TensorDataset(torch.from_numpy(own)),
    ]
    for form in forms:
        found = read_given(form, None, PLAIN, "a").pixels
        assert found.dtype == (torch.uint8 if dtype == "uint8" else torch.uint16)
        assert np.array_equal(found.numpy(), own)


@pytest.mark.parametrize(("dtype", "channels"), [("uint8", 5), ("uint16", 1), ("uint16", 5)])
def test_arrays_that_pil_cannot_hold_are_cropped_and_resized_as_pil_does(dtype: str, channels: int) -> None:
    smooth = np.linspace(0, 1, 24)[None, None, :, None] * np.linspace(0.2, 1, 24)[None, None, None, :]
    images = np.repeat((smooth * np.iinfo(dtype).max).astype(dtype), channels, 1).repeat(3, 0)
    found = read_given(images, None, DataConfig(side=8), "a").pixels
    assert (found.shape, found.dtype) == ((3, channels, 8, 8), torch.from_numpy(images).dtype)
    scale = np.iinfo(dtype).max
    as_floats = Image.fromarray((smooth[0, 0] * scale).astype(np.float32)).resize((8, 8), Image.Resampling.BICUBIC)
    assert np.allclose(found.numpy()[0, channels - 1], np.asarray(as_floats).clip(0, scale), atol=2)
    one_by_one = read_given(list(images), None, DataConfig(side=8), "a").pixels
    assert torch.equal(found, one_by_one)
    if channels == 1:  # PIL cannot crop floats by itself: the middle square of a wide image
        wide = np.pad(images, ((0, 0), (0, 0), (0, 0), (4, 4)))
        assert torch.equal(read_given(wide, None, DataConfig(side=8), "a").pixels, found)


def test_16_bit_colours_become_grey_and_other_channels_are_the_owners_choice() -> None:
    colours = np.zeros((2, 3, 8, 8), np.uint16)
    colours[:, 0], colours[:, 1] = 10_000, 50_000
    grey = read_given(colours, None, DataConfig(channels=1), "a").pixels
    assert (grey.numpy() == round(0.299 * 10_000 + 0.587 * 50_000)).all()
    assert torch.equal(read_given(grey, None, DataConfig(channels=3), "a").pixels, grey.expand(-1, 3, -1, -1))
    with pytest.raises(DataError, match=r"of a have 5 channels, expected 3. Choose which ones"):
        read_given(np.zeros((2, 5, 8, 8), np.uint16), None, DataConfig(channels=3), "a")


def test_data_other_than_images_are_unchanged() -> None:
    series = np.random.default_rng(0).normal(size=(5, 3, 40))
    assert torch.equal(read_given(series, None, PLAIN, "a").pixels, torch.from_numpy(series).float())
    tokens = torch.randint(1000, (5, 12))
    assert read_given(tokens, None, PLAIN, "a").pixels.dtype == torch.int64


@pytest.mark.parametrize(
    ("data", "labels", "message"),
    [
        (3.5, None, "the data of a are a float, expected a folder, a data-set id, an array"),
        ([], None, "the data of a are empty"),
        (DataLoader(Pairs()), None, r"the data of a are a DataLoader, expected .*\.dataset of a loader"),
        ({"train": pixels()}, None, r"the data of a are a dict, expected a folder"),
        (DatasetDict(), None, r"the data of a are a DatasetDict, expected a folder"),
        (DataFrame({"x": [1.0, 2.0]}), None, r"the data of a are a DataFrame, expected a folder"),
        (["x", "y"], None, "a sample of a is a str, expected an array"),
        ([(pixels(1), 0, 0)], None, "items of a have 3 parts"),
        ([{"photo": 1}], None, "items of a have keys .*'photo'.*, expected image or img"),
        (np.zeros(5), None, r"have shape \(5,\), expected \(samples, ...\)"),
        (pixels(1), None, "a has 1 samples, expected at least 2"),
        (np.zeros((5, 4), np.uint8), None, r"uint8 of shape \(5, 4\), expected images"),
        (np.zeros((5, 4), np.uint16), None, r"uint16 of shape \(5, 4\), expected images.*should be float"),
        (np.zeros((5, 4, 8, 9), np.uint16), None, r"uint16 of shape \(5, 4, 8, 9\), expected images.*Crop them to sq"),
        (np.array([["a"], ["b"]]), None, "an array of <U1, expected numbers"),
        (np.full((5, 4), np.nan), None, "values that are not finite"),
        (pixels(), [1, 2], "10 samples and 2 labels"),
        (pixels(2), [0.5, 1], "a label of a is 0.5, expected a whole number or a word"),
        ([pixels(1)[0], pixels(1, side=9)[0]], None, r"sample 1 of a has shape \(3, 9, 9\).*'data.side'"),
    ],
)
def test_error_for_unusable_data_names_a_remedy(data: object, labels: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_given(data, labels, PLAIN, "a")


def test_a_folder_a_table_a_dataset_and_an_array_train_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder" / "a", pictures(seed=1)).parent
    others = write(tmp_path / "others", pictures(seed=2))
    encoded = [{"bytes": path.read_bytes(), "path": None} for path in sorted(others.iterdir())]
    features = Features({"image": ImageFeature(), "label": Value("int64")})
    table = ArrowDataset.from_dict({"image": encoded, "label": [0, 1] * 5}, features=features)
    table.to_parquet(tmp_path / "table.parquet")
    (tmp_path / "shared").mkdir()
    write(tmp_path / "shared", pictures(1, side=12))
    held_out = write(tmp_path / "held-out", pictures(seed=4))
    for place in (folder / "a", held_out):
        (place / "broken.png").write_text("no image")
    federation = [
        Client(folder, "resnet8(width=4)"),
        Client(str(tmp_path / "table.parquet"), net(inputs=3)),
        Client(Pairs(), net(inputs=3)),
        Client(pixels(seed=3), "mobilenet(width=4, depth=1)", labels=[2] * 10, test=(held_out, [2] * 10)),
    ]
    alike = {"data.side": SIDE, "data.channels": 3, "data.on_bad_image": "skip"}
    run = federate(
        federation,
        tmp_path / "shared",
        config="smoke",
        rounds=1,
        settings=alike,
        run_dir=tmp_path / "r",
        progress=False,
    )
    assert list(run.table()["examples"]) == [10, 8, 8, 10]
    facts = run.folder.read_json("facts.json")
    assert facts["classes"] == ["0", "1", "2"]
    assert facts["skipped_images"] == 2
    assert facts["holdings"]["client-003"] == [0, 0, 10]
