"""Commands whose output cannot be written, and runs that cannot be compared: one sentence and exit code 2."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.saved import change_config
from hetero_ssfl.runs import RunFolder

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    "command",
    [
        ["report", "-o", "file/report.html"],
        ["embed", "--client", "0", "--images", "digits", "-o", "file/features.npy"],
        ["export", "--client", "0", "-o", "file/encoder.safetensors"],
        ["neighbours", "-o", "file/page.html"],
    ],
)
def test_a_place_that_cannot_be_written(
    command: list[str], run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()  # no folder: root may write everywhere else
    code, _, said = call(command[0], run, *command[1:])
    assert code == 2
    assert f"cannot write '{command[-1]}'" in said
    assert "Choose a place where you may write." in said
    assert len(said.strip().splitlines()) == 1


def test_runs_on_other_data_or_without_labels_are_not_compared(run: Path, tmp_path: Path, call: Call) -> None:
    other, unlabeled = tmp_path / "other", tmp_path / "unlabeled"
    for copy in (other, unlabeled):
        shutil.copytree(run, copy)
    change_config(other, {"data.source": "photographs"})
    code, _, said = call("compare", run, other)
    assert code == 2
    assert "were trained on different data ('digits' and 'photographs')" in said
    folder = RunFolder(unlabeled)
    results = folder.read_json("results.json")
    folder.write_json("results.json", {**results, "clients": {name: {} for name in results["clients"]}})
    code, _, said = call("compare", run, unlabeled)
    assert code == 2
    assert "has no accuracies, because its data have no labels" in said
