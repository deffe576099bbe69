"""Check the files of a run folder, finished or not, without changing any of them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..errors import HeteroSSFLError, RunError
from .environment import Finding
from .files import load_tensors
from .folder import BEFORE, HISTORY, SOURCES, RunFolder, load_commit
from .states import STATE_FILE, StateFolder


def check_run(path: Path) -> list[Finding]:
    """Return a finding for each file, or for each group of files without faults."""
    if not path.is_dir():
        raise RunError(f"there is no folder '{path}', expected a run folder. Check the path.")
    folder = RunFolder(path)
    findings = [_try("config.toml", lambda: _settings(path))]
    optional = [name for name in (HISTORY, SOURCES) if (path / name).exists()]
    findings += [_json(folder, name) for name in ("environment.json", "facts.json", *optional)]
    findings += [_tensors(path, file) for file in [path / "rad.safetensors", *sorted(path.glob("start/*.safetensors"))]]
    try:
        site = folder.read_facts().site
    except HeteroSSFLError:  # as the finding about facts.json says
        return findings
    if site == "simulated":
        findings.append(_tensors(path, path / "split.safetensors"))
    return [*findings, *_rounds(folder, site == "nodes"), *_results(folder, site == "nodes")]


def _try(what: str, check: Callable[[], str]) -> Finding:
    """Return what a check says, or the error that it raises."""
    try:
        return Finding(what, True, check())
    except HeteroSSFLError as error:
        return Finding(what, False, str(error), required=True)


def _json(folder: RunFolder, name: str) -> Finding:
    return _try(name, lambda: f"{len(folder.read_json(name))} entries")


def _tensors(root: Path, file: Path) -> Finding:
    return _try(str(file.relative_to(root)), lambda: f"{len(load_tensors(file)[0])} tensors")


def _settings(path: Path) -> str:
    config = RunFolder.open(path).read_config()
    return f"{config.name}, {config.method}, {config.rounds} rounds"


def _rounds(folder: RunFolder, nodes: bool) -> Iterator[Finding]:
    """Check the states of server and clients, and the events, as the commit point describes them."""
    try:
        commit = folder.committed() or {}
        done = f"round {commit['round']}" if commit else "no round is finished yet"
        yield Finding("server.safetensors", True, done)
    except HeteroSSFLError as error:
        commit = {}
        yield Finding("server.safetensors", False, str(error), required=True)
    before = folder.path / BEFORE
    if before.exists():
        yield _try(BEFORE, lambda: f"round {load_commit(before)[1]['round']}")
    if commit:
        yield _try("events.jsonl", lambda: f"{len(folder.events())} events of finished rounds")
    trained = {} if nodes else commit.get("trained", {})
    needed = {folder.states(name).file(number) for name, number in trained.items() if number}
    needed |= {folder.shares(name).named(file) for name, file in commit.get("shares", {}).items()}
    for group in ("clients", "shares"):
        here = {path for path in folder.path.glob(f"{group}/*/*") if STATE_FILE.fullmatch(path.name)}
        files = sorted(here | {path for path in needed if path.parts[-3] == group})
        damaged = [finding for finding in (_state(folder.path, file) for file in files) if not finding.ok]
        yield from damaged or [Finding(group, True, f"{len(files)} files")]


def _state(root: Path, file: Path) -> Finding:
    number = int(file.stem.removeprefix("round-"))
    return _try(str(file.relative_to(root)), lambda: f"{len(StateFolder(file.parent).load(number))} tensors")


def _results(folder: RunFolder, nodes: bool) -> Iterator[Finding]:
    """Check the results and the models that are in this folder."""
    if not folder.finished:
        yield Finding("results.json", True, "not written yet: the run is not finished")
        return
    results = _json(folder, "results.json")
    yield results
    if results.ok and not nodes:  # owners of nodes keep their models
        for name in folder.read_json("results.json").get("clients", {}):
            yield _try(f"models/{name}", partial(_model, folder, name))


def _model(folder: RunFolder, name: str) -> str:
    folder.read_json(f"models/{name}/card.json")
    return f"{len(load_tensors(folder.path / 'models' / name / 'encoder.safetensors')[0])} tensors"
