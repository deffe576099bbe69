"""A tiny federation from Python, shared by the tests of this folder: three different encoders, two with labels."""

from pathlib import Path

import pytest

from helpers.pieces import SETTINGS, net
from hetero_ssfl import Client, Run, federate
from hetero_ssfl.config import DataConfig
from hetero_ssfl.data import Images, load_images


@pytest.fixture(scope="session")
def digits() -> Images:
    return load_images(DataConfig(source="digits", side=16), "train")


@pytest.fixture(scope="session")
def clients(digits: Images) -> list[Client]:
    x, y = digits.pixels, digits.labels
    assert y is not None
    return [
        Client(x[:200].numpy(), net(), "own-net", labels=y[:200].numpy()),
        Client(x[200:400, 0].numpy(), "resnet8(width=8)", labels=y[200:400]),
        Client(x[400:550], "vit(width=16, depth=1, heads=2)"),
    ]


@pytest.fixture(scope="session")
def run(clients: list[Client], digits: Images, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run_dir: Path = tmp_path_factory.mktemp("api") / "run"
    rad = digits.pixels[600:650]
    return federate(clients, rad, config="smoke", settings=SETTINGS, run_dir=run_dir, progress=False)
