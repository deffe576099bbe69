"""Check the files of a run folder, finished or not, without changing any of them."""

from itertools import groupby
from pathlib import Path

from ..errors import HeteroSSFLError, RunError
from .environment import Finding
from .files import load_tensors
from .folder import RunFolder, load_commit
from .states import STATE_FILE, StateFolder


def check_run(path: Path) -> list[Finding]:
    """Return a finding for each damaged or missing file, and for each file or folder of files without faults."""
    if not path.is_dir():
        raise RunError(f"there is no folder '{path}', expected a run folder. Check the path.")
    folder = RunFolder(path)
    findings = []
    for place, files in groupby(_files(folder), lambda file: file.relative_to(path).parts[0]):
        checked = [_check(folder, file) for file in files]
        damaged = [finding for finding in checked if not finding.ok]
        findings += damaged or [Finding(place, True, f"{len(checked)} files" if (path / place).is_dir() else "whole")]
    if not folder.finished:
        findings.append(Finding("results.json", True, "not written yet: the run is not finished"))
    return findings


def _files(folder: RunFolder) -> list[Path]:
    """Return the files with digests that are in the folder, and those that must be there, sorted."""
    path = folder.path
    files = {file for file in path.rglob("*") if file.suffix in (".json", ".safetensors")}
    files |= {path / name for name in ("config.toml", "environment.json", "facts.json", "rad.safetensors")}
    try:
        site, commit = folder.read_facts().site, folder.committed() or {}
        clients = folder.read_json("results.json")["clients"] if folder.finished else {}
    except HeteroSSFLError:  # as the findings about these files say
        return sorted(files)
    files |= {path / "events.jsonl"} if commit else set()
    files |= {folder.shares(name).named(file) for name, file in commit.get("shares", {}).items()}
    files |= {path / "split.safetensors"} if site == "simulated" else set()
    if site != "nodes":  # owners of nodes keep their states and models
        trained = commit.get("trained", {}).items()
        files |= {folder.states(name).file(number) for name, number in trained if number}
        files |= {path / "models" / name / file for name in clients for file in ("card.json", "encoder.safetensors")}
    return sorted(files)


def _check(folder: RunFolder, file: Path) -> Finding:
    name = str(file.relative_to(folder.path))
    try:
        if name == "config.toml":
            RunFolder.open(folder.path).read_config()
        elif name == "events.jsonl":
            folder.events()
        elif file.suffix == ".json":
            folder.read_json(name)
        elif STATE_FILE.fullmatch(file.name):
            StateFolder(file.parent).load(int(file.stem.removeprefix("round-")))
        elif name.startswith("server"):
            load_commit(file)
        else:
            load_tensors(file)
    except HeteroSSFLError as error:
        return Finding(name, False, str(error), required=True)
    return Finding(name, True, "whole")
