"""A run folder from someone else: its data are not read unasked, and whatever its files hold gives one sentence."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.federations import write_images
from helpers.saved import change_config
from hetero_ssfl import Run
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import HeteroSSFLError
from hetero_ssfl.federation.start import start
from hetero_ssfl.report.page import render
from hetero_ssfl.runs.files import save_tensors
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.use.encoders import read_rad_features

Call = Callable[..., tuple[int, str, str]]

MALFORMED: dict[str, list[bytes]] = {
    "config.toml": [b"", b"\xff\xfe", b"rounds = [", b"rounds = 'x'"],
    "environment.json": [b"", b"[]", b"{}", b'{"format": "4"}', b'{"format": 4, "packages": 3}', b"[" * 100_000],
    "facts.json": [
        *(b"", b"null", b'{"site": 7}', b'{"site": "elsewhere"}', b'{"site": "python", "given": []}', b"\xff"),
        *(b'{"site": "nodes", "nodes": 3}', b'{"site": "nodes", "nodes": ["/etc/passwd"]}', b"[" * 100_000),
        *(b'{"site": "simulated", "classes": 3}', b'{"site": "simulated", "holdings": {"client-000": "x"}}'),
    ],
    "results.json": [
        *(b"", b"{}", b'{"clients": 5}', b'{"clients": {"a": 5}, "mean": {}, "untrained": {}}'),
        *(b'{"clients": {"a": {"linear_all": "x"}}, "mean": {}, "untrained": {}}', b'{"clients": {}, "mean": 1}'),
        b'{"clients": {"../..": {}}, "mean": {}, "untrained": {}, "models": {"../..": {"encoder": 3}}}',
    ],
    "status.json": [b"", b"[]", b'{"nodes": 3}', b'{"nodes": {"a": 3}}', b'{"updated": "x"}', b'{"waiting_for": 3}'],
    "events.jsonl": [b"\xff\xff\n", b"[]\n", b'{"event": "round", "round": 1, "seconds": "x"}\n', b"[" * 100_000],
    "rad.safetensors": [b"", b"\x00" * 64, b"\xff" * 64],
    "split.safetensors": [b"", b"\x00" * 64],
    "server.safetensors": [b"", b"\x00" * 64],
    "models/client-000/card.json": [b"", b"[]", b"{}", b'{"client": 3, "encoder": [], "input": {}}', b"[" * 100_000],
    "models/client-000/encoder.safetensors": [b"", b"\x00" * 64],
}


@pytest.mark.parametrize("file", MALFORMED)
def test_a_malformed_file_gives_one_sentence(file: str, run: Path, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "run"
    shutil.copytree(run, path)
    quick = [["status", path], ["check", "run", path], ["compare", path, path]]
    quick += [["export", path, "--client", 0, "-o", tmp_path / "out"]] if "models" in file else []
    slow = [["evaluate", path], ["report", path, "-o", tmp_path / "r.html"]]
    unnoticed = []
    for content in MALFORMED[file]:
        (path / file).write_bytes(content)
        codes = [tried(call, command) for command in quick]
        if not any(codes[:3:2]):  # most commands read the file in the same way as status and compare
            codes += [tried(call, command) for command in slow if "models" not in file]
        with suppress(HeteroSSFLError):
            Run.open(path).table()
        unnoticed += [] if any(codes) else [content]
    assert not unnoticed or file == "status.json"


def tried(call: Call, command: list[object]) -> int:
    code, _, said = call(*command)  # a traceback would end the test
    assert code in (0, 1, 2)
    assert code != 2 or len(said.strip().splitlines()) == 1, said
    return code


@pytest.mark.parametrize(
    ("file", "tensors", "about"),
    [
        ("rad.safetensors", {"x": torch.zeros(3)}, {}),
        ("rad.safetensors", {"pixels": torch.zeros(())}, {"digest": "0"}),
        ("split.safetensors", {"client-000": torch.tensor([10**6])}, {}),
        ("split.safetensors", {"client-000": torch.zeros(2)}, {}),
        ("server.safetensors", {}, {}),
        ("server.safetensors", {}, {"round": 3, "shares": {"../../x": "y"}, "trained": {"client-000": 3}, "events": 3}),
        ("clients/client-000/round-000002.safetensors", {"x": torch.zeros(1)}, {}),
    ],
)
def test_tensors_that_do_not_belong_there_give_one_sentence(
    file: str, tensors: dict[str, torch.Tensor], about: dict[str, object], run: Path, tmp_path: Path, call: Call
) -> None:
    """The digest of such a file is right: whoever writes the file also writes the digest."""
    path = tmp_path / "run"
    shutil.copytree(run, path)
    save_tensors(path / file, tensors, about)
    codes = [tried(call, [*command.split(), path]) for command in ("check run", "evaluate", "status")]
    assert any(codes)


@pytest.fixture(scope="module")
def with_images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A supervised run on a folder of images, whose number of classes the networks depend on."""
    root = tmp_path_factory.mktemp("stranger")
    rng = np.random.default_rng(0)
    write_images(root / "images", rng.integers(0, 255, (80, 8, 8)).astype(np.uint8), np.arange(80) % 2)
    settings = [f"data.source='{root / 'images'}'", "method=fedavg", "clients.models=['resnet8(width=4)']"]
    small = ["rounds=1", "clients.count=2", "data.validation=0", "data.limit=60", "rad.size=8", "local_epochs=1"]
    small += ["partition.kind=iid", "alignment.rad_batch=8", "optim.batch=8", "evaluation.every=0", "data.side=8"]
    start(load_config("smoke", [*settings, *small, "engine.workers=1"]), root / "run", lambda _: None)
    return root / "run", root / "images"


def test_the_data_of_a_strangers_run_are_not_read_unless_asked_for(
    with_images: tuple[Path, Path], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, images = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(with_images[0], path)
    shutil.copytree(with_images[1], images)
    assert call("evaluate", path)[0] == 0  # trained here
    read = []
    change_config(path, {"data.source": str(images)})
    with monkeypatch.context() as patch:
        patch.setattr("hetero_ssfl.federation.participants.local.load_images", lambda *_: read.append(1))
        code, _, said = call("evaluate", path)
        assert code == 2
        assert f"data.source = '{images}' was not used for training on this machine" in said
        assert "cannot be loaded here" not in render([path], read_rad_features)
        assert Run.open(path).table()["mutual_cka"].notna().all()
    assert not read
    monkeypatch.setenv("HETERO_SSFL_TRUST", str(images))
    assert call("evaluate", path)[0] == 0
    monkeypatch.delenv("HETERO_SSFL_TRUST")
    change_config(path, {"data.source": "somebody/something"})
    assert "was not used for training on this machine" in call("evaluate", path)[2]


def test_node_settings_that_a_strangers_run_names_are_not_read(run: Path, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "run"
    shutil.copytree(run, path)
    facts = RunFolder(path).read_json("facts.json")
    RunFolder(path).write_json("facts.json", {**facts, "site": "nodes", "nodes": ["/etc/passwd"]})
    code, _, said = call("evaluate", path)
    assert code == 2
    assert "on other machines" in said
    assert "passwd" not in said
