"""One pass over all images, each with its position."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import each_image, load_images
from hetero_ssfl.errors import DataError


def settings(source: Path | str, **more: object) -> DataConfig:
    return DataConfig.model_validate({"source": str(source), "side": 8, "channels": 1, **more})


def draw(path: Path, shade: int, size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw(tmp_path / "test" / "c.JPG", 30, (20, 9))  # folder name, suffix and size do not matter
    draw(tmp_path / "a.png", 10)
    draw(tmp_path / "b" / "b.bmp", 20, (5, 5))
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


def test_a_folder_gives_every_image_by_path(folder: Path) -> None:
    count, images = each_image(settings(folder))
    seen = list(images)
    assert count == 3
    assert [(image.row, image.path) for image in seen] == [(0, "a.png"), (1, "b/b.bmp"), (2, "test/c.JPG")]
    assert all(image.pixels.shape == (1, 8, 8) for image in seen)
    assert [int(image.pixels.float().mean().round()) for image in seen] == [10, 20, 30]


def test_a_single_file_is_a_source(folder: Path) -> None:
    _, images = each_image(settings(folder / "a.png", channels=3))
    (image,) = images
    assert (image.path, image.pixels.shape) == ("a.png", (3, 8, 8))


def test_a_table_gives_all_rows_in_order(tmp_path: Path, folder: Path) -> None:
    import datasets

    shades = list(range(0, 200, 10))
    pictures = [Image.fromarray(np.full((8, 8), shade, np.uint8)) for shade in shades]
    table = datasets.Dataset.from_dict({"image": pictures, "label": ["cat"] * 20})  # labels are ignored
    table = table.cast_column("image", datasets.Image())
    table.to_parquet(tmp_path / "table.parquet")
    count, images = each_image(settings(tmp_path / "table.parquet"))
    seen = list(images)
    assert count == 20
    assert [(image.row, image.path, int(image.pixels[0, 0, 0])) for image in seen] == [
        (row, None, shade) for row, shade in enumerate(shades)
    ]


def test_digits_give_all_images() -> None:
    count, images = each_image(settings("digits"))
    pixels = torch.stack([image.pixels for image in images])
    parts = [load_images(settings("digits"), split).pixels for split in ("train", "test")]
    assert count == len(pixels) == sum(map(len, parts))
    assert pixels.sum(dtype=torch.long) == sum(part.sum(dtype=torch.long) for part in parts)


def test_a_bad_image_is_named_or_skipped(folder: Path) -> None:
    (folder / "b" / "a.png").write_text("torn")
    with pytest.raises(DataError, match=r"image 1 .b/a.png. of .* cannot be decoded.*data.on_bad_image = 'skip'"):
        list(each_image(settings(folder))[1])
    count, images = each_image(settings(folder, on_bad_image="skip"))
    assert count == 4
    assert [image.row for image in images] == [0, 2, 3]


def test_a_folder_without_images_raises_an_error(folder: Path) -> None:
    for name in ("a.png", "b", "test"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataError, match="has no images"):
        each_image(settings(folder))
