"""Folders without permission, files where a folder belongs, and mistyped commands, as they were typed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.commands import PROGRAM

# Root may open everything, unless it gives up these capabilities.
AS_ORDINARY = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def type_in(folder: Path, line: str, prefix: list[str] | None = None) -> tuple[int, str]:
    command = [*(prefix or []), *PROGRAM, *line.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "run smoke --run-dir closed/run",
        "run --resume closed/run",
        "status closed/run",
        "check run closed/run",
        "report closed/run",
        "deploy check closed/run",
    ],
)
def test_a_folder_without_permission_is_named_in_one_sentence(tmp_path: Path, line: str) -> None:
    if AS_ORDINARY and not shutil.which("setpriv"):
        pytest.skip("root may open every folder, and setpriv is not installed")
    closed = tmp_path / "closed"
    (closed / "run").mkdir(parents=True)
    closed.chmod(0)
    try:
        code, said = type_in(tmp_path, line, AS_ORDINARY)
    finally:
        closed.chmod(0o700)
    assert code == 2
    assert len(said.splitlines()) == 1
    assert "closed/run" in said
    assert "Permission denied" in said


@pytest.mark.parametrize("place", ["a-file", "a-file/deeper"])
def test_a_file_is_no_run_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").write_text("mine")
    code, said = type_in(tmp_path, f"run smoke --run-dir {place}")
    assert code == 2
    assert f"'{place}' cannot be a folder" in said
    assert (tmp_path / "a-file").read_text() == "mine"


@pytest.mark.parametrize(("typed", "nearest"), [("rnu", "run"), ("deploy chek", "check"), ("check macine", "machine")])
def test_a_mistyped_command_names_the_nearest_once(tmp_path: Path, typed: str, nearest: str) -> None:
    code, said = type_in(tmp_path, typed)
    assert code == 2
    assert said.count(f"Did you mean '{nearest}'?") == 1
