"""The page about DICOM works from its first line to its last, as three hospitals would type it."""

from pathlib import Path
from typing import Any

import pandas
import pytest

from helpers.blocks import ROOT, blocks_of
from helpers.commands import words
from hetero_ssfl.cli import app

SHORTER = ("rounds=1", "local_epochs=1", "rad.size=12")


def test_three_hospitals_train_with_the_pages_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {}
    commands = []
    for block in blocks_of(ROOT / "docs" / "medical.md"):
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, block.page, "exec"), names)
        commands += [words(command)[1:] for command in block.commands if block.language == "sh"]
    for command in commands[1:]:  # the first installs the package
        if command[0] == "run":
            command += [word for setting in SHORTER for word in ("--set", setting)]
        app(command, standalone_mode=False)
    assert len(pandas.read_parquet("north.parquet")) == 60
    assert Path("scans.html").stat().st_size > 20_000
    assert {path.name for path in tmp_path.glob("state-*")} == {"state-north", "state-east", "state-west"}
