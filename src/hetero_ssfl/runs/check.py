"""Check the files of a run folder, finished or not, without changing any of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import HeteroSSFLError, RunError
from .files import load_tensors
from .folder import BEFORE, HISTORY, SOURCES, RunFolder, load_commit
from .machine import Finding
from .states import STATE_FILE, StateFolder


def check_run(path: Path) -> list[Finding]:
    """Return a finding for each file, or for each group of files without faults."""
    if not path.is_dir():
        raise RunError(f"there is no folder '{path}', expected a run folder. Check the path.")
    folder = RunFolder(path)
    found = [_try("config.toml", _config, path)]
    found += [_try(name, _json, folder, name) for name in ("environment.json", "facts.json")]
    found += [_try(name, _json, folder, name) for name in (HISTORY, SOURCES) if (path / name).exists()]
    found.append(_try("rad.safetensors", _tensors, path / "rad.safetensors"))
    found += [_try(f"start/{file.name}", _tensors, file) for file in sorted(path.glob("start/*.safetensors"))]
    try:
        kind = folder.site
    except HeteroSSFLError:  # as the finding about facts.json says
        return found
    if kind == "simulated":
        found.append(_try("split.safetensors", _tensors, path / "split.safetensors"))
    return [*found, *_rounds(folder), *_results(folder)]


def _try(what: str, check: Callable[..., str], *arguments: Any) -> Finding:
    """Return what a check says, or the error that it raises."""
    try:
        return Finding(what, True, check(*arguments))
    except HeteroSSFLError as error:
        return Finding(what, False, str(error), required=True)


# --- groups of files ---


def _rounds(folder: RunFolder) -> Iterator[Finding]:
    """Check the states of server and clients, and the events, as the commit point describes them."""
    server = _try("server.safetensors", _commit, folder)
    commit = (folder.committed() or {}) if server.ok else {}
    yield server
    if (folder.path / BEFORE).exists():
        yield _try(BEFORE, _before, folder.path / BEFORE)
    if commit:
        yield _try("events.jsonl", _events, folder)
    trained = {} if folder.site == "nodes" else commit.get("trained", {})
    needed = {folder.states(name).file(number) for name, number in trained.items() if number}
    needed |= {folder.shares(name).named(file) for name, file in commit.get("shares", {}).items()}
    for group in ("clients", "shares"):
        here = {path for path in folder.path.glob(f"{group}/*/*") if STATE_FILE.fullmatch(path.name)}
        all_files = sorted(here | {path for path in needed if path.parts[-3] == group})
        damaged = [f for f in (_try(str(p.relative_to(folder.path)), _state, p) for p in all_files) if not f.ok]
        yield from damaged or [Finding(group, True, f"{len(all_files)} files")]


def _results(folder: RunFolder) -> Iterator[Finding]:
    """Check the results and the models that are in this folder."""
    if not folder.finished:
        yield Finding("results.json", True, "not written yet: the run is not finished")
        return
    results = _try("results.json", _json, folder, "results.json")
    yield results
    if results.ok and folder.site != "nodes":  # owners of nodes keep their models
        for name in folder.read_json("results.json").get("clients", {}):
            yield _try(f"models/{name}", _model, folder, name)


# --- single files ---


def _config(path: Path) -> str:
    folder = RunFolder.open(path)
    return f"{folder.config.name}, {folder.config.method}, {folder.config.rounds} rounds"


def _json(folder: RunFolder, name: str) -> str:
    return f"{len(folder.read_json(name))} entries"


def _tensors(path: Path) -> str:
    return f"{len(load_tensors(path)[0])} tensors"


def _commit(folder: RunFolder) -> str:
    commit = folder.committed()
    return f"round {commit['round']}" if commit else "no round is finished yet"


def _before(path: Path) -> str:
    return f"round {load_commit(path)[1]['round']}"


def _events(folder: RunFolder) -> str:
    return f"{len(folder.events())} events of finished rounds"


def _state(path: Path) -> str:
    return f"{len(StateFolder(path.parent).load(int(path.stem.removeprefix('round-'))))} tensors"


def _model(folder: RunFolder, name: str) -> str:
    folder.read_json(f"models/{name}/card.json")
    return _tensors(folder.path / "models" / name / "encoder.safetensors")
