"""A disk that fills up while a file is saved: a one-sentence error, no partial files, and the run can continue."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

BEGINNING = """
import shutil, sys
from pathlib import Path
import torch
from helpers.rig import ENCODERS, Rig, tensors
from helpers.saved import lines
from hetero_ssfl.errors import RunError
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.runs.files import load_tensors

root, small = Path(sys.argv[1]), Path(sys.argv[2])
"""

NODE = """
rig = Rig(root / "node", "rounds=3")
path = rig.paths[1]
path.write_text(path.read_text().replace("[data]", f'home = "{small}"\\n[data]', 1))

def fill():
    try:
        (small / "filler").write_bytes(b"x" * 10**7)
    except OSError:
        pass

rig.at["begin", 2] = fill
rig.at["begin", 3] = (small / "filler").unlink
folder = rig.run()
(event,) = [e for e in lines(folder) if "excluded" in e]
assert (event["round"], event["client"]) == (2, "node-1"), event
assert "No space left on device" in event["excluded"], event
assert not [f for f in small.rglob(".*") if f.name != ".lock"], "half-written files"
for file in small.rglob("*.safetensors"):
    load_tensors(file)  # every file is complete
assert "node-1" in folder.read_json("results.json")["clients"]
"""

SERVER = """
shutil.rmtree(small, ignore_errors=True)  # empties the disk; the mounted folder itself stays
whole = Rig(root / "whole", encoders=ENCODERS[:2])
whole.run()
rig = Rig(root / "full", encoders=ENCODERS[:2])
moved = RunFolder(small / "run")
(rig.folder.path).rename(root / "kept")
shutil.copytree(root / "kept", moved.path)
rig.folder = moved

def fill():
    with (small / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass

rig.at["answered", 2] = fill
try:
    rig.run()
except RunError as error:
    assert "No space left on device" in str(error), error
else:
    raise AssertionError("a full disk went unnoticed")
assert not [f for f in small.rglob(".*") if f.name != ".lock"], "half-written files"
assert load_tensors(moved.path / "server.safetensors")[1]["round"] == 1
(small / "filler").unlink()
rig.run()
assert moved.read_json("results.json") == whole.folder.read_json("results.json")
assert [e["round"] for e in lines(moved) if e["event"] == "round"] == [0, 1, 2]
assert all(torch.equal(v, tensors(moved)[k]) for k, v in tensors(whole.folder).items())
"""


def test_a_full_disk_loses_only_the_current_round(tmp_path: Path) -> None:
    """First the disk of a node is full, then that of the server; one process, because it imports torch for seconds."""
    small, program = tmp_path / "small", tmp_path / "program.py"
    small.mkdir()
    program.write_text(BEGINNING + NODE + SERVER)
    private = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*private, "mount", "-t", "tmpfs", "none", small], capture_output=True).returncode:
        pytest.skip("this machine allows no private mounts")
    inside = f"mount -t tmpfs -o size=2m none {small} && exec {sys.executable} {program} {tmp_path / 'root'} {small}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "HETERO_SSFL_CACHE": str(tmp_path),
    }
    done = subprocess.run([*private, "sh", "-c", inside], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
