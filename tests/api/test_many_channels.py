"""Arrays of five channels and 16 bits: a whole run, from training to the report of another process."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_ssfl import Client, Run, federate
from hetero_ssfl.errors import ConfigError, DataError
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.use.embed import open_images
from hetero_ssfl.use.models import find_model

SETTINGS: dict[str, Any] = {"local_epochs": 1, "evaluation.epochs": 5, "engine.workers": 1, "data.validation": 0}


def scans(count: int, seed: int, most: int = 65535) -> Any:
    return np.random.default_rng(seed).integers(0, most, (count, 8, 8, 5), dtype=np.uint16)


def train(run_dir: Path, most: int = 65535) -> Run:
    labels = [0, 1] * 15
    clients = [
        Client(scans(30, 1, most), "resnet8(width=4)", labels=labels),
        Client(scans(30, 2), "vit(width=16, depth=1, heads=2)", labels=labels),
    ]
    rad = scans(12, 3)
    return federate(clients, rad, config="smoke", run_dir=run_dir, rounds=1, settings=SETTINGS, progress=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("scans") / "run")


def test_a_run_keeps_16_bits_and_is_continued_and_reopened(trained: Run) -> None:
    rad = load_tensors(trained.path / "rad.safetensors")[0]["pixels"]
    assert np.array_equal(rad.numpy(), scans(12, 3).transpose(0, 3, 1, 2))
    (trained.path / "results.json").unlink()
    assert train(trained.path).evaluate().notna().all(axis=None)  # the same data continue the same run
    opened = Run.open(trained.path)
    new = scans(10, 4)
    features = opened.embed(new)
    assert features["client-001"].equals(trained.embed(torch.from_numpy(new))["client-001"])
    eight = opened.embed((new // 257).astype(np.uint8))  # 8 bits of the same images
    assert np.allclose(eight["client-000"], features["client-000"], atol=0.1)
    assert opened.evaluate(scans(30, 5), labels=[0, 1] * 15).notna().all(axis=None)


def test_the_report_shows_the_channels_as_grey(trained: Run, tmp_path: Path) -> None:
    page = Run.open(trained.path).report(tmp_path / "report.html").read_text()
    assert "data:image/png" in page
    assert "Similarity of the clients on the shared images" in page


def test_an_export_says_what_it_takes_and_files_are_refused(trained: Run, tmp_path: Path) -> None:
    trained.export(tmp_path / "out", client=0)
    assert "images of 5 channels, of 8 x 8 pixels" in next((tmp_path / "out").rglob("README.md")).read_text()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"takes inputs of shape \(5, 8, 8\), not square images of 1 or 3 channels"):
        open_images(find_model(trained.path, "0"), str(tmp_path))
    with pytest.raises(DataError, match=r"the run's images have 5 channels, those of .* 1 or 3. Pass an array"):
        trained.embed(tmp_path)
    floats = np.zeros((4, 5, 8, 8), np.float32)
    with pytest.raises(DataError, match=r"are torch.float32, but the run's are torch.uint16. If they are images, mult"):
        trained.embed(floats)


def test_scans_of_12_bits_get_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hetero_ssfl"):
        train(tmp_path / "run", most=4096)
    said = [record.getMessage() for record in caplog.records if "16-bit" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("the 16-bit images of client-000 have values up to 4095 of 65535")
    assert "Rescale them first" in said[0]
