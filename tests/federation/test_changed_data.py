"""A run knows its images by row number: changed data are refused, in one sentence that says what changed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.photographs import write_photographs
from helpers.saved import change_config
from hetero_ssfl.data import take_snapshot, what_changed
from hetero_ssfl.errors import DataError
from hetero_ssfl.federation.participants import SplitData
from hetero_ssfl.plugins import remember_places
from hetero_ssfl.runs.folder import SOURCES, RunFolder

Call = Callable[..., tuple[int, str, str]]
QUICK = [
    *("data.side=16", "data.validation=6", "partition.kind=iid", "clients.count=2", "rad.size=8", "local_epochs=1"),
    *("evaluation.epochs=5", "evaluation.every=0", "rounds=1", "alignment.rad_batch=8", "engine.workers=1"),
    "clients.models=['resnet8(width=4)']",
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photographs and a finished run on them."""
    from hetero_ssfl.cli import app

    root: Path = tmp_path_factory.mktemp("changing")
    write_photographs(root / "images", 60)
    write_photographs(root / "others", 60, seed=1)
    sets = [word for setting in QUICK for word in ("--set", setting)]
    source = ["--set", f"data.source={root / 'images'}"]
    app(["run", "smoke", *sets, *source, "--run-dir", str(root / "run"), "--quiet"], standalone_mode=False)
    return root


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change. The run's source is a relative path."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path / "run", {"data.source": "images"})
    monkeypatch.chdir(tmp_path)
    remember_places(["images"])  # as if it had been trained there
    return tmp_path


def remove_one(images: Path) -> None:
    (images / "sky" / "IMG_00000.jpg").unlink()


def remove_one_and_add_two(images: Path) -> None:
    remove_one(images)
    for name in ("new-1.jpg", "new-2.jpg"):
        shutil.copy(images / "leaf" / "IMG_00001.jpg", images / "leaf" / name)


def change_one(images: Path) -> None:
    shutil.copy(images / "leaf" / "IMG_00001.jpg", images / "sky" / "IMG_00000.jpg")


def point_elsewhere(images: Path) -> None:
    shutil.rmtree(images)
    images.symlink_to(images.parent / "others")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (remove_one, "began: 1 removed (such as sky/IMG_00000.jpg). Restore them"),
        (remove_one_and_add_two, "1 removed (such as sky/IMG_00000.jpg), 2 added (such as leaf/new-1.jpg)"),
        (change_one, "1 changed (such as sky/IMG_00000.jpg)"),
        (point_elsewhere, "60 removed (such as brick/IMG_00002.jpg), 60 added (such as brick/IMG_10002.jpg)"),
    ],
)
def test_changed_data_are_refused(change: Callable[[Path], None], sentence: str, place: Path, call: Call) -> None:
    change(place / "images")
    for command in (["evaluate", "run"], ["run", "--resume", "run"], ["run", "--resume", "run", "--rounds", "2"]):
        code, _, said = call(*command)
        assert code == 2
        assert sentence in said
        assert len(said.strip().splitlines()) == 1
    assert RunFolder(place / "run").read_config().rounds == 1  # nothing was changed before the data were checked
    assert json.loads((place / "run" / "results.json").read_text())["round"] == 1


def test_the_same_images_at_another_time_are_accepted(place: Path, call: Call) -> None:
    for path in (place / "images").rglob("*.jpg"):
        os.utime(path, (1, 1))
    before = json.loads((place / "run" / "results.json").read_text())["clients"]
    code, shown, _ = call("evaluate", "run", "--split", "test", "--json")
    assert code == 0
    assert json.loads(shown)["clients"] == before


def test_each_process_checks_the_images_that_it_loads(place: Path) -> None:
    (place / "run" / SOURCES).unlink()  # the workers compare contents even without this record
    change_one(place / "images")
    with pytest.raises(DataError, match="have changed since the run in 'run' began: other contents"):
        _ = SplitData(RunFolder(Path("run"))).train


def test_other_images_can_be_tested(place: Path, call: Call) -> None:
    point_elsewhere(place / "images")
    code, shown, _ = call("evaluate", "run", "--images", "others", "--json")
    assert code == 0
    found = json.loads(shown)
    assert found["images"] == "others"
    assert set(found["clients"]["client-000"]) == {"linear", "knn"}
    write_photographs(place / "unlabeled", 6, classes=False)
    code, _, said = call("evaluate", "run", "--images", "unlabeled")
    assert code == 2
    assert "the new data have no labels" in said


def test_a_report_warns_of_changed_data(place: Path, call: Call, caplog: pytest.LogCaptureFixture) -> None:
    remove_one(place / "images")
    assert call("report", "run")[0] == 0
    assert "the data of 'run' have changed since it began (1 removed (such as sky/IMG_00000.jpg))" in caplog.text


def test_a_snapshot_reads_contents_only_of_files_that_look_different(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = take_snapshot("images")
    assert before is not None
    (place / "images" / "notes.txt").write_text("not an image")
    monkeypatch.setattr("hetero_ssfl.data.snapshots._digest", None)  # any call would fail
    assert what_changed("images", before) is None
    assert take_snapshot("images") == before  # from the cache
    assert take_snapshot("digits") is None
