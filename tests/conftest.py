"""What every test may rely on: caches of its own, and CIFAR-10 where it is at hand."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import settings
from pyarrow import parquet

from hetero_ssfl.cli import main

settings.register_profile("project", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("project")
# Tests run side by side, with models so small that they only lose time by sharing the work.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background ignores Ctrl-C


LONGEST = (  # half a minute or more, in about this order
    *("test_run.py", "test_cli.py", "test_blocks.py", "test_federation.py", "test_local.py", "test_packaging.py"),
    *("test_paper.py", "test_faults.py", "test_first_hour.py", "test_accelerator.py", "test_own_parts.py"),
    *("test_fork_server.py", "test_engines.py", "test_export.py", "test_theory.py", "test_nodes.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that the processes which share the tests end together."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End the run at once when one of its processes dies; the test that it was running has just been reported."""
    if cast(str, report.when) == "???":  # pytest-xdist's mark of a test that ended its process
        pytest.exit(f"a test process died: {report.longrepr}", returncode=1)


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's caches (ours and that of `datasets`), nor the record of trusted code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_SSFL_CACHE", str(tmp_path_factory.mktemp("image-cache")))
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets-cache")))  # read when it is imported
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def cifar10(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every 20th image of CIFAR-10, found under its short name. To decode all of them takes 8 seconds."""
    folder = os.environ.get("HETERO_SSFL_DATA")
    if not folder:
        pytest.skip("HETERO_SSFL_DATA is unset: it names the folder that holds cifar10/")
    path = Path(folder, "cifar10")
    if not path.is_dir():
        pytest.skip(f"there is no {path}")
    small = tmp_path_factory.mktemp("data") / "cifar10"
    small.mkdir()
    for file in path.glob("*.parquet"):
        table = parquet.read_table(file)
        parquet.write_table(table.take(list(range(0, len(table), 20))), small / file.name)
    monkeypatch.setenv("HETERO_SSFL_DATA", str(small.parent))
    return small


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, what it printed, what it said on stderr."""

    def calling(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hetero-ssfl", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:  # anything but a clean exit would surface as a traceback
            main()
        said = capsys.readouterr()
        return int(stopped.value.code or 0), said.out, said.err

    return calling


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An encoder that ends its process when it is trained, as an error in native code does."""
    (tmp_path / "dying.py").write_text(
        "import os\nfrom torch import nn\n"
        "class Dying(nn.Linear):\n"
        "    def __init__(self, in_channels, side):\n"
        "        super().__init__(in_channels * side * side, 8)\n"
        "    def forward(self, x):\n"
        "        return os.abort() if self.training else super().forward(x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "dying:Dying"
