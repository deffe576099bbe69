"""One small finished run, and the command line as a user calls it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_ssfl.cli import main
from hetero_ssfl.config import load_config
from hetero_ssfl.federation import start

TINY = ["data.limit=260", "data.validation=60", "rad.size=32", "alignment.rad_batch=16", "evaluation.epochs=5"]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("use") / "run"
    start(load_config("smoke", [*TINY, "optim.batch=16"]), path, lambda _: None)
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command here: exit code, what it printed, what it said on stderr."""

    def calling(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hetero-ssfl", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:  # anything but a clean exit would surface as a traceback
            main()
        said = capsys.readouterr()
        return int(stopped.value.code or 0), said.out, said.err

    return calling
