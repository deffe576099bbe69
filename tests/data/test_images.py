"""Every image source gives uint8 pixels, labels if there are any, and a checksummed cache."""

import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import Images, digest, image_sizes, images, load_images, sources
from hetero_ssfl.data.sources import Subset, fixed_fifth
from hetero_ssfl.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(number: int, height: int = 8, width: int = 8, channels: int = 3) -> np.ndarray:
    """Return noise that depends on the number: no two pictures are equal."""
    shape = (height, width, 3) if channels == 3 else (height, width)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def png(number: int, *args, **kwargs) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(number, *args, **kwargs)).save(file, "PNG")
    return file.getvalue()


def expected(numbers, **kwargs) -> torch.Tensor:
    arrays = [picture(number, **kwargs) for number in numbers]
    return torch.stack(
        [torch.from_numpy(a).permute(2, 0, 1) if a.ndim == 3 else torch.from_numpy(a)[None] for a in arrays]
    )


def folder(path: Path, files: list[bytes]) -> Path:
    """Write an image folder with a training split (classes cat and dog, alternating) and a copy of it as test split."""
    for number, content in enumerate(files):
        place = path / "train" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:02}.png").write_bytes(content)
    shutil.copytree(path / "train", path / "test")
    return path


def table(count: int = 6, image: str = "img", label: str | None = "label", labels=None, names=None, first=0):
    import datasets

    columns = {image: [{"bytes": png(first + k), "path": None} for k in range(count)]}
    features = {image: datasets.Image()}
    if label:
        columns[label] = labels or [k % 3 for k in range(count)]
        text = isinstance(columns[label][0], str)
        features[label] = datasets.ClassLabel(names=names) if names else datasets.Value("string" if text else "int64")
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def parquet(path: Path, **kwargs) -> Path:
    path.mkdir()
    for split, first in (("train", 0), ("test", 100)):
        table(first=first, **kwargs).to_parquet(path / f"{split}-00000-of-00001.parquet")
    return path


def load(source: Path | str, split: Subset = "train", **settings) -> Images:
    return load_images(DataConfig(source=str(source), **settings), split)


def labels_of(got: Images) -> torch.Tensor:
    assert got.labels is not None
    return got.labels


def refusal(source: Path | str, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_image_folder_gives_its_pixels_and_classes(tmp_path):
    got = load(folder(tmp_path / "pets", [png(k) for k in range(4)]))
    assert got.pixels.dtype == torch.uint8
    assert torch.equal(got.pixels, expected([0, 2, 1, 3]))  # by class, then by name
    assert labels_of(got).tolist() == [0, 0, 1, 1]
    assert (got.classes, len(got.skipped), len(got)) == (("cat", "dog"), 0, 4)


def test_labels_are_optional(tmp_path):
    for k in range(5):
        (tmp_path / f"{k}.png").write_bytes(png(k))
    train, test = load(tmp_path), load(tmp_path, "test")
    assert train.labels is None
    assert train.classes == ()
    assert (len(train), len(test)) == (5, 0)  # testing needs labels
    assert test.pixels.shape[1:] == train.pixels.shape[1:]
    assert train.subset(torch.tensor([1])).labels is None


@pytest.mark.parametrize(("image", "label"), [("img", "label"), ("image", "label"), ("image", "fine_label")])
def test_parquet_columns_are_found_by_their_usual_names(tmp_path, image, label):
    source = parquet(tmp_path / "set", image=image, label=label)
    train, test = load(source), load(source, "test")
    assert torch.equal(train.pixels, expected(range(6)))
    assert torch.equal(test.pixels, expected(range(100, 106)))
    assert labels_of(train).tolist() == labels_of(test).tolist() == [0, 1, 2, 0, 1, 2]
    assert train.classes == ("0", "1", "2")


def test_other_columns_are_found_by_name(tmp_path):
    source = parquet(tmp_path / "set", image="x", label="y", names=["a", "b", "c"])
    assert load(source, image_column="x").labels is None
    got = load(source, image_column="x", label_column="y")
    assert labels_of(got).tolist() == [0, 1, 2, 0, 1, 2]
    assert got.classes == ("a", "b", "c")


def test_an_error_about_a_missing_column_lists_the_existing_ones(tmp_path):
    source = parquet(tmp_path / "set", image="x", label="y")
    message = refusal(source)
    assert "has the columns x, y, expected image or img" in message
    assert "data.image_column" in message
    message = refusal(source, image_column="x", label_column="z")
    assert "no label column 'z'" in message
    assert "data.label_column" in message


def test_a_saved_data_set_without_a_test_split_reserves_a_fifth_for_testing(tmp_path):
    table(10).save_to_disk(tmp_path / "set")
    train, test = load(tmp_path / "set"), load(tmp_path / "set", "test")
    assert (len(train), len(test)) == (8, 2)
    both = {digest(p) for p in (*train.pixels, *test.pixels)}
    assert both == {digest(p) for p in expected(range(10))}


@pytest.mark.parametrize("name", ["test", "valid", "validation"])
def test_a_source_with_only_a_test_split_is_divided_into_training_and_test_images(tmp_path, name):
    table(10).to_parquet(tmp_path / f"{name}.parquet")
    train, test = load(tmp_path), load(tmp_path, "test")
    assert (len(train), len(test)) == (8, 2)
    assert not {digest(p) for p in train.pixels} & {digest(p) for p in test.pixels}


def test_a_test_split_may_have_no_labels(tmp_path):
    import datasets

    datasets.DatasetDict({"train": table(4), "test": table(3, label=None)}).save_to_disk(tmp_path / "set")
    assert load(tmp_path / "set").labels is not None
    assert load(tmp_path / "set", "test").labels is None


def test_a_metadata_table_next_to_images_gives_their_labels(tmp_path):
    import datasets

    for k in range(10):
        (tmp_path / f"{k}.png").write_bytes(png(k))
    rows = {"file_name": [f"{k}.png" for k in range(10)], "label": [k % 2 for k in range(10)]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "metadata.parquet")
    train, test = load(tmp_path), load(tmp_path, "test")
    assert (len(train), len(test)) == (8, 2)
    assert labels_of(train).unique().tolist() == [0, 1]


def test_the_validation_split_of_a_saved_data_set_is_used_for_testing(tmp_path):
    import datasets

    splits = {"train": table(4), "validation": table(3, first=50)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    assert torch.equal(load(tmp_path / "set").pixels, expected(range(4)))
    assert torch.equal(load(tmp_path / "set", "test").pixels, expected([50, 51, 52]))


def test_channels_are_kept_unless_the_settings_change_them(tmp_path):
    grey = folder(tmp_path / "grey", [png(k, channels=1) for k in range(2)])
    colour = folder(tmp_path / "colour", [png(k) for k in range(2)])
    assert torch.equal(load(grey).pixels, expected(range(2), channels=1))
    assert torch.equal(load(grey, channels=3).pixels, expected(range(2), channels=1).expand(-1, 3, -1, -1))
    assert load(colour).pixels.shape == (2, 3, 8, 8)
    luma = (expected(range(2)) * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    assert (load(colour, channels=1).pixels - luma).abs().max() <= 1


def test_a_side_resizes_and_crops_to_the_centre(tmp_path):
    left_black = np.zeros((8, 16, 3), np.uint8)
    left_black[:, 8:] = 255
    file = io.BytesIO()
    Image.fromarray(left_black).save(file, "PNG")
    got = load(folder(tmp_path / "set", [file.getvalue(), png(1, 20, 12)]), side=8)
    assert got.pixels.shape == (2, 3, 8, 8)
    assert (got.pixels[0, :, :, :4] == 0).all()
    assert (got.pixels[0, :, :, 4:] == 255).all()


@pytest.mark.parametrize("on_bad_image", ["error", "skip"])
def test_mixed_sizes_ask_for_a_side_and_are_never_skipped(tmp_path, on_bad_image):
    source = folder(tmp_path / "set", [png(0), png(1), png(2, 9, 9), png(3)])
    message = refusal(source, on_bad_image=on_bad_image)
    assert "image 1 (train/cat/02.png) of" in message
    assert "is 9x9 pixels, but the first is 8x8. Set data.side, for example 32, to crop and resize all" in message
    assert "skip" not in message
    assert "epair" not in message


@pytest.mark.parametrize("broken", [b"", b"no image", png(2)[:100]], ids=["empty", "text", "cut off"])
def test_a_broken_image_is_refused_by_number_or_skipped(tmp_path, broken):
    source = folder(tmp_path / "set", [png(0), png(1), broken, png(3)])
    message = refusal(source)
    assert "image 1 (train/cat/02.png) of" in message
    assert "data.on_bad_image = 'skip'" in message
    got = load(source, on_bad_image="skip")
    assert torch.equal(got.pixels, expected([0, 1, 3]))
    assert (labels_of(got).tolist(), len(got.skipped)) == ([0, 1, 1], 1)


def test_a_folder_of_only_broken_images_is_refused(tmp_path):
    assert "no readable images" in refusal(folder(tmp_path / "set", [b"no", b"none"]), on_bad_image="skip")


def test_an_empty_folder_is_refused(tmp_path):
    assert f"'{tmp_path}' is empty, expected images" in refusal(tmp_path)


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no images here")
    assert f"'{tmp_path}' has no images, only files such as notes.txt" in refusal(tmp_path)


@pytest.mark.parametrize("source", ["nothing", "./not/here", "/not/here", "~/not-here", "a/b/c"])
def test_a_missing_path_is_refused_without_asking_the_hub(source):
    message = refusal(source)
    assert f"no data at '{source}'" in message
    assert "Check the path" in message


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a hub that answers each request with a status, or cannot be reached (0), and the requests to it."""
    import huggingface_hub
    from huggingface_hub.utils._http import default_client_factory

    monkeypatch.chdir(tmp_path)
    requests: list[str] = []

    def answer_with(status: int) -> list[str]:
        def answer(request: httpx.Request) -> httpx.Response:
            about_data = request.url.path.startswith("/api/datasets/")  # the library asks for other things, once a day
            requests.extend([request.url.path] * about_data)
            if not status or not about_data:
                raise httpx.ConnectError("no network")
            return httpx.Response(status, json={"id": "photos/holiday"}, request=request)

        huggingface_hub.set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(answer)))
        return requests

    yield answer_with
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.mark.parametrize(("status", "reason"), [(0, "ConnectError"), (404, "HfHubHTTPError")])
def test_a_path_that_may_be_a_hub_id_takes_one_request(hub, monkeypatch, status, reason):
    requests = hub(status)
    monkeypatch.setattr("datasets.load_dataset", lambda *_: pytest.fail("it repeats its requests for half a minute"))
    message = refusal("photos/holiday")
    assert re.search(f"no file or folder 'photos/holiday' here, and the Hugging Face hub .*{reason}", message)
    assert "Correct the path, or check the id" in message
    assert requests == ["/api/datasets/photos/holiday"]
    assert "HFValidationError" in refusal("my photos/holiday 1")
    assert len(requests) == 1
    if not status:
        monkeypatch.delenv("HETERO_SSFL_DATA", raising=False)
        assert "no file or folder 'cifar10' here" in (message := refusal("cifar10"))
        assert "Put it into a folder 'cifar10' under HETERO_SSFL_DATA" in message


def test_a_data_set_that_was_downloaded_before_needs_no_request(hub, tmp_path, monkeypatch):
    requests = hub(200)
    monkeypatch.setattr("datasets.load_dataset", lambda _: {"train": table()})
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "cache" / "photos___earlier").mkdir(parents=True)
    assert len(load("photos/earlier", label_column="none")) == 6
    assert not requests
    assert len(load("photos/holiday", label_column="none")) == 6
    assert requests == ["/api/datasets/photos/holiday"]


def test_labels_that_are_words_are_classes(tmp_path):
    source = parquet(tmp_path / "set", labels=["b", "c", "b"] * 2)
    table(labels=["c", "a", "c"] * 2).to_parquet(source / "test-00000-of-00001.parquet")
    train, test = load(source), load(source, "test")
    assert train.labels is not None
    assert test.labels is not None
    assert train.classes == test.classes == ("a", "b", "c")  # the splits agree on the numbers
    assert [train.labels.tolist()[:3], test.labels.tolist()[:3]] == [[1, 2, 1], [2, 0, 2]]


def test_words_for_only_some_images_are_refused(tmp_path):
    assert "label" in refusal(parquet(tmp_path / "set", labels=["a", "b", None] * 2))


def test_labels_can_be_ignored(tmp_path):
    source = parquet(tmp_path / "set", labels=["a", "b", None] * 2)
    assert load(source, label_column="none").labels is None


def test_a_table_of_raw_bytes_is_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": [png(k) for k in range(4)]}), tmp_path / "raw.parquet")
    images = load(tmp_path / "raw.parquet")
    assert len(images) == 4
    assert images.labels is None


def test_labels_for_only_some_images_are_refused(tmp_path):
    assert "label" in refusal(parquet(tmp_path / "set", labels=[0, 1, None] * 2))


def test_an_image_column_of_numbers_is_refused(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"img": list(range(10))}).save_to_disk(tmp_path / "set")
    assert "'img'" in refusal(tmp_path / "set")


def test_a_row_without_an_image_counts_as_broken(tmp_path):
    import datasets

    column = [{"bytes": png(0), "path": None}, None, {"bytes": png(2), "path": None}]
    rows = datasets.Dataset.from_dict({"img": column}, features=datasets.Features({"img": datasets.Image()}))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "set")
    got = load(tmp_path / "set", on_bad_image="skip")
    assert torch.equal(got.pixels, expected([0, 2]))
    assert len(got.skipped) == 1
    assert "image 1 of" in refusal(tmp_path / "set")


def test_images_that_are_not_square_are_refused(tmp_path):
    message = refusal(folder(tmp_path / "set", [png(k, 8, 12) for k in range(2)]))
    assert "(train/cat/00.png)" in message
    assert "is 12x8 pixels, not square. Set data.side, for example 32, to crop and resize all images." in message


def test_links_to_folders_are_named(tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "pets").symlink_to(folder(tmp_path / "set", [png(0), png(1)]))
    assert "links to folders are not followed" in refusal(tmp_path / "links")


def test_sizes_are_read_from_the_headers_as_the_images_are_shown(tmp_path):
    files = [png(0, 8, 12), png(1), b"no image", png(2, 20, 10)]
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(picture(3, 30, 40)).save(turned, "JPEG", exif=exif)
    source = folder(tmp_path / "set", [*files, turned.getvalue()])
    assert image_sizes(DataConfig(source=str(source))) == [(8, 8), (12, 8), (10, 20), (30, 40)]


def forbid_decoding(monkeypatch):
    def never(*args):
        raise AssertionError("decoded again")

    monkeypatch.setattr(images, "_decode", never)


def same(one: Images, other: Images) -> bool:
    labels = torch.equal(labels_of(one), labels_of(other))
    rest = (one.classes, one.skipped) == (other.classes, other.skipped)
    return labels and rest and torch.equal(one.pixels, other.pixels)


def test_the_second_load_does_not_decode(tmp_path, monkeypatch):
    source = folder(tmp_path / "set", [png(0), png(1), b"broken"])
    first = load(source, on_bad_image="skip")
    forbid_decoding(monkeypatch)
    assert same(load(source, on_bad_image="skip"), first)


def test_only_settings_that_change_pixels_need_another_cache_entry(tmp_path, monkeypatch):
    source = folder(tmp_path / "set", [png(0), png(1)])
    load(source)
    forbid_decoding(monkeypatch)
    load(source, limit=1, validation=7)
    settings: list[dict[str, Any]] = [{"side": 4}, {"channels": 1}, {"on_bad_image": "skip"}]
    for setting in settings:
        with pytest.raises(AssertionError, match="decoded again"):
            load(source, **setting)
    with pytest.raises(AssertionError, match="decoded again"):
        load(source, "test")


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("harm", [lambda b: b[:-9] + bytes(255 - x for x in b[-9:]), lambda b: b[:20]])
def test_a_damaged_cache_is_detected_and_rebuilt(tmp_path, cache, monkeypatch, suffix, harm):
    source = folder(tmp_path / "set", [png(0), png(1)])
    first = load(source)
    pixels = first.pixels.clone()
    (entry,) = cache.glob(f"*{suffix}")
    damaged = harm(entry.read_bytes())
    entry.unlink()  # a new file: the old one is still mapped
    entry.write_bytes(damaged)
    assert torch.equal(load(source).pixels, pixels)
    forbid_decoding(monkeypatch)
    assert torch.equal(load(source).pixels, pixels)


def test_damaged_labels_in_the_cache_are_detected(tmp_path, cache):
    source = folder(tmp_path / "set", [png(0), png(1)])
    load(source)
    (card,) = cache.glob("*.json")
    card.write_text(card.read_text().replace('"labels": [0, 1]', '"labels": [0, 0]'))
    assert labels_of(load(source)).tolist() == [0, 1]


def test_a_changed_source_is_decoded_again(tmp_path):
    source = folder(tmp_path / "set", [png(0), png(1)])
    load(source)
    file = source / "train" / "cat" / "00.png"
    file.write_bytes(png(7))
    os.utime(file, ns=(1, 1))  # a different time, even on a coarse clock
    assert torch.equal(load(source).pixels, expected([7, 1]))


def test_an_error_names_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "file" / "below"))
    message = refusal(folder(tmp_path / "set", [png(0)]))
    assert "cannot write the image cache" in message
    assert "HETERO_SSFL_CACHE" in message


def test_changing_loaded_pixels_does_not_change_the_cache(tmp_path, monkeypatch):
    source = folder(tmp_path / "set", [png(0), png(1)])
    load(source).pixels.zero_()
    forbid_decoding(monkeypatch)
    assert torch.equal(load(source).pixels, expected([0, 1]))


def test_the_split_of_digits_is_fixed():
    train, test = load("digits"), load("digits", "test")
    assert (train.pixels.shape, test.pixels.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert same(train, load("digits"))
    assert train.classes == tuple("0123456789")
    assert labels_of(train).unique().tolist() == labels_of(test).unique().tolist() == list(range(10))
    assert train.pixels.max() == 255


def test_the_parts_of_a_split_are_disjoint_and_complete():
    train, test = fixed_fifth(1797, "train"), fixed_fifth(1797, "test")
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(1797))


def test_digits_can_have_another_side_and_three_channels():
    small, large = load("digits"), load("digits", side=16, channels=3)
    assert large.pixels.shape == (1437, 3, 16, 16)
    assert torch.equal(large.pixels[:, 0], large.pixels[:, 2])
    assert torch.equal(labels_of(large), labels_of(small))
    enlarged = torch.nn.functional.interpolate(small.pixels.float(), scale_factor=2, mode="bilinear")
    assert (enlarged - large.pixels).abs().max() <= 1


def test_a_subset_keeps_pixels_and_labels_together():
    digits = load("digits")
    rows = torch.tensor([5, 3])
    part = digits.subset(rows)
    assert torch.equal(part.pixels, digits.pixels[rows])
    assert torch.equal(labels_of(part), labels_of(digits)[rows])
    assert part.classes == digits.classes


def test_a_subset_keeps_the_number_of_unreadable_images_of_its_source(tmp_path):
    source = folder(tmp_path / "set", [png(0), png(1), b"broken"])
    assert load(source, on_bad_image="skip").subset(torch.tensor([0])).skipped


def test_unreadable_images_are_counted_once(tmp_path):
    for k in range(6):
        (tmp_path / f"{k}.png").write_bytes(png(k) if k else b"broken")
    splits: list[Subset] = ["train", "test"]
    assert [len(load(tmp_path, split, on_bad_image="skip").skipped) for split in splits] == [1, 0]


def test_a_digest_depends_on_pixels_order_and_shape():
    pixels = expected(range(4))
    assert digest(pixels) == digest(pixels.clone().contiguous(memory_format=torch.channels_last))
    assert digest(pixels) != digest(pixels.flip(0))
    assert digest(pixels) != digest(pixels.reshape(4, 3, 4, 16))


def test_cifar10_is_found_under_its_short_name(cifar10):
    train, test = load("cifar10"), load("cifar10", "test")
    assert (train.pixels.shape, test.pixels.shape) == ((1_000, 3, 32, 32), (250, 3, 32, 32))
    assert len(train.classes) == 10
    assert {"airplane", "truck"} < set(train.classes)
    assert len(labels_of(train)) == 1_000
    assert labels_of(test).unique().tolist() == list(range(10))


@pytest.mark.parametrize("name", ["cat/00.png", "train-1/cat/00.png", "dog/val_01.png", "cat/data-00000-of-00001.png"])
def test_a_folder_is_read_as_the_library_itself_would(tmp_path: Path, name: str) -> None:
    """Without names of splits, the library is told that there are none; that changes nothing but the time."""
    import datasets

    for number, path in enumerate(("b/1.png", "b/0.png", "a/2.png", name)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(png(number))
    wanted = datasets.load_dataset("imagefolder", data_dir=str(tmp_path))
    assert rows_of(sources._splits(datasets, tmp_path)) == rows_of(wanted)


def rows_of(splits: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: list(part) for name, part in splits.items()}


def test_every_name_of_a_split_that_the_library_knows_is_noticed() -> None:
    from datasets import data_files

    known = [word for words in data_files.SPLIT_KEYWORDS.values() for word in words]
    assert not [name for name in known if not any(word in name for word in sources.SPLIT_WORDS)]
