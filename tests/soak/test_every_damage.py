"""Every kind of damage to every file of an unfinished run, and 40 kills in 20 runs: no result changes."""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.damage import DAMAGE, Killed, damaged_copy, files_of, train
from helpers.whole_runs import assert_same, everything, run, tiny
from hetero_ssfl.errors import RunError
from hetero_ssfl.runs.folder import RunFolder

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.soak


@pytest.mark.timeout(590)
def test_no_damage_to_an_unfinished_run_changes_its_result(tmp_path: Path) -> None:
    reference = everything(train(tmp_path / "whole"))
    path = tmp_path / "unfinished"
    with pytest.raises(Killed):
        train(path, killed_in=3)
    stopped, repeated = [], []
    for file in files_of(path):
        for kind, damage in DAMAGE.items():
            copy = damaged_copy(path, tmp_path / "copy", file, damage)
            try:
                folder = train(copy)
            except RunError as error:
                stopped.append((file, kind, str(error)))
                continue
            assert_same(reference, everything(folder))
            repeated.append((file, kind))
    assert len(stopped) + len(repeated) >= 91
    assert all(Path(file).name in text for file, _, text in stopped)
    assert {"server.safetensors", "clients/client-000/round-000002.safetensors"} <= {file for file, _ in repeated}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(run(tmp_path_factory.mktemp("whole") / "run", "engine.workers=2"))


@pytest.mark.timeout(500)
@pytest.mark.parametrize("number", range(20))
def test_two_kills_in_each_of_twenty_runs_end_with_the_same_bits(
    number: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    config, path, rng = tmp_path / "config.toml", tmp_path / "run", random.Random(number)
    config.write_text(tiny("engine.workers=2").to_toml())
    command = [sys.executable, "-m", "helpers.go", str(path), str(config)]
    for _ in range(2):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS)
        assert child.stdout is not None
        for _ in range(rng.randrange(3, 20)):  # of at least 40 events
            child.stdout.readline()
        time.sleep(rng.random() / 10)
        assert child.poll() is None or RunFolder(path).finished
        child.kill()
        child.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=TESTS)
    assert_same(whole, everything(RunFolder.open(path)))
