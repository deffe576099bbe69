"""The image cache has a size limit and forgets the entries that were not used for the longest time."""

import os
from pathlib import Path

import numpy as np
import pytest

from helpers.federations import write_images
from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import count_images, load_images
from hetero_ssfl.data.cache import prune_cache, remembered
from hetero_ssfl.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HETERO_SSFL_CACHE_MB", "1")
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> str:
    pictures = np.random.default_rng(0).integers(0, 255, (20, 8, 8), dtype=np.uint8)
    write_images(tmp_path / "images", pictures, np.arange(20) % 2)
    return str(tmp_path / "images")


def entry(cache: Path, name: str, kilobytes: int, age: int) -> None:
    cache.mkdir(exist_ok=True)
    for suffix, size in ((".npy", kilobytes * 1024), (".json", 10)):
        file = cache / f"{name}{suffix}"
        file.write_bytes(bytes(size))
        os.utime(file, (1e9 - age, 1e9 - age))


def test_every_new_side_displaces_the_oldest(cache: Path, source: str) -> None:
    for side in (100, 101, 102, 103, 104):  # 16 images of 100 x 100 grey pixels are 160 kB, with test images 200 kB
        for split in ("train", "test"):
            load_images(DataConfig(source=source, side=side, channels=3), split)
        assert sum(f.stat().st_size for f in cache.iterdir()) <= 2**20
    assert len(list(cache.glob("*.npy"))) < 10


def test_the_entries_that_were_not_used_longest_are_deleted_whole(cache: Path) -> None:
    for name, age in (("old", 30), ("older", 40), ("used", 50), ("new", 0)):
        entry(cache, name, 400, age)
    os.utime(cache / "used.json")  # reading an entry marks it as used
    prune_cache(cache / "new")
    assert sorted(f.name for f in cache.iterdir()) == ["new.json", "new.npy", "used.json", "used.npy"]


def test_reading_an_entry_marks_it_as_used(cache: Path, source: str) -> None:
    config = DataConfig(source=source)
    load_images(config, "train")
    (card,) = cache.glob("*.json")
    os.utime(card, (1e9, 1e9))
    load_images(config, "train")
    assert card.stat().st_mtime > 1e9


def test_the_newest_entry_stays_even_if_it_alone_is_too_large(cache: Path) -> None:
    entry(cache, "old", 10, 10)
    entry(cache, "new", 3000, 0)
    prune_cache(cache / "new")
    assert {f.stem for f in cache.iterdir()} == {"new"}


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_a_wrong_limit_is_reported(source: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_SSFL_CACHE_MB", text)
    with pytest.raises(DataError, match=f"HETERO_SSFL_CACHE_MB is '{text}', expected a whole number"):
        load_images(DataConfig(source=source), "train")


def test_images_are_counted_without_decoding_them(cache: Path, source: str, tmp_path: Path) -> None:
    assert count_images(DataConfig(source=source, side=4096)) == (20, 20, 2)
    assert count_images(DataConfig(source=source, limit=10)).train == 10
    assert count_images(DataConfig(source="digits")) == (1797, 1797, 10)
    assert not cache.exists()
    pa = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for rows in (3, 5):  # the second file replaces the first: the number is not remembered for another content
        pa.write_table(pyarrow.table({"image": [b""] * rows}), tmp_path / "table.parquet")
        assert count_images(DataConfig(source=str(tmp_path / "table.parquet"))).images == rows
    assert not list(cache.glob("*.npy"))


def test_a_fact_is_found_out_once() -> None:
    answers = iter([[2, 3], 4])
    assert [remembered(["a", 1], lambda: next(answers)) for _ in range(2)] == [[2, 3], [2, 3]]
    assert remembered(["a", 2], lambda: next(answers)) == 4


def test_decoded_images_are_readable_by_their_owner_only(cache: Path, source: str) -> None:
    load_images(DataConfig(source=source, side=8), "train")
    files = [file for file in cache.iterdir() if file.suffix in (".npy", ".json")]
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
