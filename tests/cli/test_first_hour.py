"""The first hour of a new user with folders of colour photographs: every step is one that README.md names.

It takes three processes, because that is what it is about: two are killed, and one continues. This one is the new
process in which the user opens the runs later. Together they take 20 seconds of processor time, mostly for imports.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.blocks import ROOT, blocks_of, shortened
from helpers.commands import PROGRAM
from helpers.photographs import write_photographs
from hetero_ssfl import Run, RunFolder
from hetero_ssfl.errors import RunError

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed, (name, count) in enumerate({"hospital-a": 20, "hospital-b": 20, "shared": 12, "images": 100}.items()):
        write_photographs(tmp_path / name, count, seed=seed, classes=False)
    write_photographs(tmp_path / "new-images", 30, seed=9)
    for block in blocks_of(ROOT / "README.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def killed_after(line: str, command: list[str]) -> None:
    """Start a command and kill it (SIGKILL) when it prints the line."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = next((said for said in process.stderr if line in said), None)
        process.kill()
    assert seen, f"the command did not print '{line}'"


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_in_python(place: Path, call: Call) -> None:
    script = next(b.text for b in blocks_of(ROOT / "README.md") if b.language == "python" and not b.file)
    script = shortened(script)
    killed_after("round 1/3", [sys.executable, "-c", script])
    again = output(sys.executable, "-c", script)
    assert "continuing after round 1 of 3" in again
    assert "round 2/3" in again
    assert "mutual_cka" in again  # the table shows all of its columns
    assert "no labels, so no accuracy: look at run.report()" in again
    assert "run folder: runs/hospitals\n" in again
    run = Run.open("runs/hospitals")  # this is another process than that of the script
    assert run.embed("images")["hospital-a"].shape == (100, 128)
    assert 0 <= run.evaluate("new-images").loc["hospital-a", "linear"] <= 100
    assert set(run.export("exported")) == {"hospital-a", "hospital-b"}
    with pytest.raises(RunError, match="'given:small' is a Python object that does not exist in this process"):
        run.encoder(1)
    assert "hospital-b is missing" in run.report("report.html").read_text()
    assert call("neighbours", "runs/hospitals", "-o", "neighbours.html")[0] == 0
    page = Path("neighbours.html").read_text()
    assert ("hospital-a, " in page, "hospital-b, " in page) == (True, False)
    with pytest.raises(RunError, match=r"the encoder of hospital-b \('small'\)\. Call there: federate\("):
        run.more(rounds=4)


def test_on_the_command_line(place: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    run = ["run", "my.toml", "--run-dir", "runs/mine"]
    killed_after("round 1/3", [*PROGRAM, *run])
    code, _, said = call(*run)
    assert code == 0
    assert "continuing after round 1 of 3" in said
    assert call("run", "--resume", "runs/mine", "--rounds", "4")[0] == 0
    assert RunFolder(Path("runs/mine")).read_json("results.json")["round"] == 4
    code, shown, _ = call("evaluate", "runs/mine", "--images", "new-images", "--json")
    assert code == 0
    assert all(0 <= scores["linear"] <= 100 for scores in json.loads(shown)["clients"].values())
    assert call("report", "runs/mine", "-o", "report.html")[0] == 0
    next((place / "images").iterdir()).unlink()
    code, _, said = call("run", "--resume", "runs/mine", "--rounds", "5")
    assert code == 2
    assert "the images of 'images' have changed since the run in 'runs/mine' began: 1 removed (such as IMG_3" in said
