"""Damage files of a run folder as disks and people do, and read or finish the run afterwards."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hetero_ssfl.federation.engines.workers import InlineGrid
from hetero_ssfl.federation.participants import LocalSite, SplitData
from hetero_ssfl.federation.start import open_run, serve
from hetero_ssfl.runs.events import Event, Listener, RoundBegun
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.use.encoders import participants
from hetero_ssfl.use.models import find_models

from .whole_runs import everything, tiny

SMALL = ["clients.count=2", "clients.models=['resnet8(width=4)']", "local_epochs=1", "evaluation.every=0"]


def flip(place: float) -> Callable[[Path], object]:
    """Return a function that flips one bit, at a fraction of the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped at the start": flip(0.02),
    "flipped in the middle": flip(0.5),
    "flipped at the end": flip(0.98),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": Path.unlink,
}


def files_of(run: Path) -> list[str]:
    """Return the files of a run that hold its results; not what it is doing now, nor locks."""
    files = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if path.name not in ("status.json", ".lock"))


def damaged_copy(run: Path, copy: Path, file: str, damage: Callable[[Path], object]) -> Path:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    damage(copy / file)
    return copy


class Killed(BaseException):
    pass


def train(path: Path, listen: Listener = lambda _: None, killed_in: int | None = None) -> RunFolder:
    """Run or continue a small federation in this process, which saves seconds; or stop at the start of a round."""

    def hear(event: Event) -> None:
        listen(event)
        if isinstance(event, RoundBegun) and event.round == killed_in:
            raise Killed

    site = LocalSite()
    config = RunFolder.open(path).read_config() if (path / "config.toml").exists() else tiny(*SMALL)
    folder = open_run(path, config, site)
    with InlineGrid(site.nodes(folder), site) as grid:
        serve(grid, folder, hear)
    return folder


def contents(path: Path) -> dict[str, Any]:
    """Read everything that reports, evaluations and users of the models read of a finished run."""
    folder = RunFolder.open(path)
    folder.events()
    site, split = LocalSite(), SplitData(folder)
    found: dict[str, Any] = {
        "config": folder.read_config(),
        "facts": folder.read_json("facts.json"),
        **everything(folder),
    }
    tensors: dict[str, Tensor] = found["tensors"]
    tensors |= {f"split/{name}": rows for name, rows in split.rows.items()} | {"rad": split.rad}
    for participant in participants(folder, site, folder.read_config()):
        tensors |= {f"newest/{participant.name}/{k}": v for k, v in participant.newest().state_dict().items()}
    for model in find_models(path, "all"):
        found[model.client] = model.card
        tensors |= {f"model/{model.client}/{k}": v for k, v in model.load().state_dict().items()}
    return found
