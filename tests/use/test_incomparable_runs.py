"""Runs that cannot be compared: one sentence and exit code 2."""

import shutil
from collections.abc import Callable
from pathlib import Path

from helpers.saved import change_config
from hetero_ssfl.runs.folder import RunFolder

Call = Callable[..., tuple[int, str, str]]


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
