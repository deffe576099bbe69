"""Common mistakes in Python give a one-sentence error with a remedy, and nothing is written."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from helpers.pieces import WRONG_ENCODERS, net
from hetero_ssfl import Client, Run, RunFolder, cli, federate
from hetero_ssfl.data import Images
from hetero_ssfl.errors import ConfigError, DataError, HeteroSSFLError, RunError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's data and code, some of it invalid."""
    rng = np.random.default_rng(0)
    for name, sides in {"good": [8] * 40, "broken": [8] * 40, "unequal": [8, 9] * 20, "noted": [8] * 40}.items():
        (tmp_path / name).mkdir()
        for k, side in enumerate(sides):
            Image.fromarray(rng.integers(0, 255, (side, side), dtype=np.uint8)).save(tmp_path / name / f"{k:02}.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "notes.png").write_text("buy milk")
    (tmp_path / "noted" / "notes.txt").write_text("buy milk")
    (tmp_path / "models_of_mine.py").write_text(WRONG_ENCODERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    return tmp_path


ENCODER = "resnet8(width=4)"

WRONG: dict[str, tuple[dict[str, object], str]] = {
    "missing folder": (
        {"data": "./missing"},
        r"no data at './missing', expected .* a local path.* Check the",
    ),
    "empty folder": ({"data": "empty"}, "'empty' is empty, expected images.* Put them there"),
    "a text file among images": (
        {"data": "broken"},
        r"image \d+ \(notes.png\).* cannot be decoded. Remove.* or skip such images with settings=.*data.on_bad",
    ),
    "unequal sizes": (
        {"data": "unequal"},
        r"of unequal .* is (9x9|8x8) pixels, but the first is (8x8|9x9). Set data.side",
    ),
    "a model that returns a tuple": (
        {"encoder": "models_of_mine:Pair"},
        r"encoder 'models_of_mine:Pair' maps a batch of 2 to a tuple, expected a tensor .* Return only its features",
    ),
    "wrong channels": (
        {"encoder": "models_of_mine:Colour"},
        r"fails on images of shape \(1, 8, 8\): .* to have 3 channels, but got 1.* set data.side and data.channels",
    ),
    "RAD too small": ({"rad": 3}, "RAD of 3 samples is too small, expected at least 4.* Pass more"),
    "unknown preset": ({"config": "smok"}, "unknown preset 'smok', expected 'smoke' .* or a path that ends in .toml"),
}


def by_api(change: dict, run_dir: Path) -> None:
    clients = [Client(change.get("data", "good"), change.get("encoder", ENCODER)), Client("good", ENCODER)]
    config, rad = change.get("config", "smoke"), change.get("rad", 8)
    federate(clients, rad, config=config, rounds=1, run_dir=run_dir, progress=False)


def command(*words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hetero-ssfl", *words])
        cli.main()


def is_one_sentence(text: str) -> bool:
    return "\n" not in text.strip() and "Traceback" not in text and len(text) < 500


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_input_gives_a_one_sentence_error_in_python(what: str) -> None:
    change, expected = WRONG[what]
    with pytest.raises(HeteroSSFLError, match=expected) as caught:
        by_api(change, Path("run"))
    assert is_one_sentence(str(caught.value))
    assert not Path("run").exists()


@pytest.mark.usefixtures("place")
def test_files_that_are_not_images_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = federate([Client("noted", ENCODER)], 8, config="smoke", rounds=1, progress=False)
    assert "'noted': 1 files are not images and are skipped, such as notes.txt" in caplog.text
    assert run.table()["examples"].tolist() == [32]


def test_a_run_folder_of_another_version_is_refused(
    run: Run, clients: list[Client], digits: Images, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old"
    shutil.copytree(run.path, old)
    folder = RunFolder(old)
    folder.write_json("environment.json", {**folder.read_json("environment.json"), "format": 99})
    expected = r"'.*/old' has run format 99, expected 4. Use the version that wrote it."
    with pytest.raises(RunError, match=expected):
        federate(clients, digits.pixels[600:650], config="smoke", run_dir=old, progress=False)
    with pytest.raises(SystemExit) as left:
        command("run", "--resume", str(old))
    assert left.value.code == 2
    assert "has run format 99" in capsys.readouterr().err


def test_the_command_line_explains_how_to_continue_a_run_of_python_objects(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run.path, moved)
    (moved / "results.json").unlink()
    with pytest.raises(SystemExit) as left:
        command("run", "--resume", str(moved))
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "the data of own-net and the data of client-001 and the data of client-002. Call there: federate(" in said
    assert len(said.strip().splitlines()) == 1
    unfinished = Run.open(moved)
    with pytest.raises(RunError, match=r"not finished. Continue it with: federate\(..., run_dir='.*/moved'\)"):
        unfinished.table()
    assert re.fullmatch(r"Run\('.*/moved', not finished, hetero-ssfl, 2 rounds\)", repr(unfinished))
    assert "not finished" in unfinished._repr_html_()


# --- a full disk ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    mounted = []

    def mount(kilobytes: int) -> Path:
        disk = tmp_path / f"disk-{kilobytes}"
        disk.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk], capture_output=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize(("kilobytes", "begun"), [(16, False), (200, True)])
def test_a_full_disk_gives_one_sentence_and_the_run_can_continue(
    small_disk: Callable[[int], Path], digits: Images, kilobytes: int, begun: bool
) -> None:
    disk = small_disk(kilobytes)
    clients = [Client(digits.pixels[:40], net()), Client(digits.pixels[40:80], ENCODER)]
    settings = {"local_epochs": 1}

    def call() -> Run:
        return federate(clients, 16, config="smoke", rounds=2, settings=settings, run_dir=disk / "run", progress=False)

    with pytest.raises(RunError, match=r"No space left on device.*Free some disk space") as caught:
        call()
    assert is_one_sentence(str(caught.value).replace("RunError: ", ""))
    assert (disk / "run" / "config.toml").exists() == begun
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    assert list(call().table()["examples"]) == [32, 32]


# --- mistakes that are possible only in Python ---


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(256, 4)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"clients": []}, ConfigError, r"clients is \[\], expected a list"),
        ({"clients": [("a", ENCODER)]}, ConfigError, r"clients is \[\('a', .*, expected a list: \[Client\(data, "),
        ({"clients": Client("a", ENCODER)}, ConfigError, r"clients is Client\(.*, expected a list: \[Client"),
        ({"encoder": "resnett8"}, ConfigError, "unknown encoder 'resnett8', 'resnet8' is the nearest"),
        ({"rad": ["shared"]}, DataError, "a sample of the RAD is a str.* pass a folder's path"),
        ({"settings": {"side": 32}}, ConfigError, "unknown key 'side', expected 'data.side'"),
        ({"settings": {"every": 2}}, ConfigError, "expected 'alignment.every' or 'evaluation.every'"),
        ({"name": "a b"}, ConfigError, "a client has the name 'a b', expected letters"),
        ({"name": "client-001"}, ConfigError, "two clients have the name 'client-001'"),
        ({"encoder": 5}, ConfigError, "the encoder of client-000 is a int, expected a torch.nn.Module"),
        ({"encoder": nn.Identity()}, ConfigError, r"maps a batch of 2 to a tensor of shape \(2, 1, 16, 16\).*Pool or"),
        ({"encoder": nn.Flatten()}, ConfigError, "has no trainable parameters"),
        ({"encoder": Frozen()}, ConfigError, "has no trainable parameters"),
        ({"encoder": nn.Sequential(nn.Flatten(), nn.LazyLinear(4))}, ConfigError, "has lazy layers without weights"),
        ({"encoder": net(inputs=3)}, ConfigError, r"^client-000: encoder .* fails on images .* for these channels"),
        (
            {"rad": np.zeros((9, 1, 20, 20), np.uint8)},
            DataError,
            r"\(1, 16, 16\).*settings={'data.side': 20, 'data.cha",
        ),
        (
            {"test": (np.zeros((9, 20, 20), np.uint8), [0] * 9)},
            DataError,
            r"test data of client-000 has samples .*'data.side': 16",
        ),
        ({"rad": np.zeros((9, 256))}, DataError, "every client must be able to read"),
        ({"rad": -5}, ConfigError, "a RAD of -5 samples is too small, expected at least 4"),
        ({"rad": 0}, ConfigError, "a RAD of 0 samples is too small, expected at least 4"),
        ({"rad": True}, DataError, "the data of the RAD are a bool, expected a folder"),
        ({"rad": "digits", "data": "digits"}, ConfigError, "rad = 'digits' is client-000's own data.*such as rad=300"),
        ({"rad": "digits", "test": "digits"}, ConfigError, "rad = 'digits' is client-000's own data.*such as rad=300"),
        ({"rad": 100}, ConfigError, "50 for the RAD and 0 for validation leave fewer than 2"),
        ({"data": np.zeros((30, 3, 20)), "rad": 9}, ConfigError, "a RAD cannot be taken from data of shapes"),
        ({"method": "fedbyol"}, ConfigError, "needs equal models"),
        ({"method": "fedavg"}, ConfigError, "needs equal models|needs labels"),
        ({"views": lambda batch, _: batch[:1]}, ConfigError, "returned 1 rows for a batch of 2"),
        ({"views": lambda batch, _: batch[:, :, :1, :1].expand(2, 5, 1, 1)}, ConfigError, "fails on images of shape"),
        ({"kernel": lambda *_: 1.0}, ConfigError, "returned a float for 4 and 4 rows"),
        ({"projector": (64, 0)}, ConfigError, "projector.1 = 0 is not possible"),
        ({"settings": {"alignement.mu": 1}}, ConfigError, "unknown key 'alignement'"),
        ({"settings": {"rad.size": 8}}, ConfigError, "settings has 'rad.size', which federate takes from rad= instead"),
        ({"settings": {"rad": {"source": "x"}}}, ConfigError, "settings has 'rad.source'.* Remove it"),
        (
            {"settings": {"partition.kind": "iid"}},
            ConfigError,
            "settings has 'partition.kind'.* each client's own data",
        ),
        ({"settings": {"clients.count": 2}}, ConfigError, "settings has 'clients.count'.* the list of clients"),
        ({"settings": {"clients.per_round": 3}}, ConfigError, "clients.per_round = 3 exceeds clients.count = 2"),
        ({"settings": {"engine.kind": "simulation"}}, ConfigError, "cannot reach these participants"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    changes: dict, kind: type[Exception], message: str, digits: Images, tmp_path: Path
) -> None:
    data, encoder = changes.pop("data", digits.pixels[:40]), changes.pop("encoder", net())
    more = {key: changes.pop(key) for key in ("name", "test", "projector") if key in changes}
    first = Client(data, encoder, **more)
    clients = changes.pop("clients", [first, Client(digits.pixels[40:80], ENCODER)])
    with pytest.raises(kind, match=message) as caught:
        federate(clients, changes.pop("rad", 16), run_dir=tmp_path / "run", progress=False, **changes)
    assert is_one_sentence(str(caught.value))
    assert not (tmp_path / "run").exists()


def test_data_other_than_images_need_views(tmp_path: Path) -> None:
    series = torch.randn(30, 3, 40)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(120, 8))
    with pytest.raises(ConfigError, match=r"of shape \(3, 40\), are torch.float32, but .*only uint8.*with views="):
        federate([Client(series, encoder)], 8, run_dir=tmp_path / "run", progress=False)
