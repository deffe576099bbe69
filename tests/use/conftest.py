"""A small finished run."""

from pathlib import Path

import pytest

from hetero_ssfl.config import load_config
from hetero_ssfl.federation.start import start

TINY = ["data.limit=260", "data.validation=60", "rad.size=32", "alignment.rad_batch=16", "evaluation.epochs=5"]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("use") / "run"
    start(load_config("smoke", [*TINY, "optim.batch=16"]), path, lambda _: None)
    return path
