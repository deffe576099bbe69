"""Results of the paper's tables as small files that can be committed.

One file per run, RESULTS/SCALE/TABLE/CELL-seedN.json: the figures of `RunScore`, the command that made them, and a
digest of the settings. A run that is kept is not run again, so a table can be continued on another machine without its
run folders (gigabytes). A kept run of other settings than the cell has now is refused.
"""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from ...errors import ConfigError
from ...runs.folder import RunFolder
from .cells import Cell, Scale
from .scores import RunScore, score_run


def result_file(results: Path, cell: Cell, scale: Scale, seed: int) -> Path:
    run = cell.run_name(seed)
    return results / scale / run.with_name(f"{run.name}.json")


def keep(cell: Cell, seed: int, scale: Scale, root: Path, results: Path) -> None:
    """Write the figures of a run, if it is finished."""
    folder = RunFolder(cell.folder(root, scale, seed))
    if not folder.finished:
        return
    command = f"hetero-ssfl paper {cell.table} --scale {scale} --only '{cell.name}' --seeds {seed + 1}"
    file = result_file(results, cell, scale, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"command": command, "settings": digest_of_settings(cell, scale, seed)}
    file.write_text(json.dumps({**about, **asdict(score_run(folder))}, indent=1) + "\n")


def digest_of_settings(cell: Cell, scale: Scale, seed: int) -> str:
    """Return a digest of all settings that can change the figures and differ from their defaults."""
    config = cell.config(scale, seed)
    unused = {"name", "engine"} | (set() if config.method == "hetero-ssfl" else {"alignment"})
    settings = config.model_dump(mode="json", exclude_defaults=True, exclude=unused)
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def kept_runs(results: Path, cell: Cell, scale: Scale) -> list[RunScore]:
    """Return the kept runs of a cell, by seed."""
    first = result_file(results, cell, scale, 0)
    files = first.parent.glob(first.name.replace("seed0", "seed*"))
    return sorted((_read(file, cell, scale) for file in files), key=lambda run: run.seed)


def is_kept(results: Path, cell: Cell, scale: Scale, seed: int) -> bool:
    file = result_file(results, cell, scale, seed)
    return file.exists() and _read(file, cell, scale).seed == seed


def _read(file: Path, cell: Cell, scale: Scale) -> RunScore:
    try:
        values = json.loads(file.read_text())
        values.pop("command")
        settings, run = values.pop("settings"), RunScore(**values)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"'{file}' is not a result of `hetero-ssfl paper --keep`. Delete it and run again.") from None
    if settings != digest_of_settings(cell, scale, run.seed):
        raise ConfigError(
            f"'{file}' was made at commit {run.commit} with other settings than '{cell.name}' has now. "
            "Delete it and run again, or use that commit."
        )
    return run
