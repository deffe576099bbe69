"""What `federate` prints besides the progress of the rounds: where the run is, and what to expect of it."""

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from ..config import Config
from ..federation.participants import Site
from ..federation.start import namesake
from ..plugins import find, is_at_hand
from ..runs.folder import RunFolder
from ..terminal import Console


def print_notes(notes: Iterable[str]) -> None:
    console = Console(stderr=True)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def notes_before(path: Path, config: Config, site: Site, chosen: bool) -> list[str]:
    """Return what to say before a run is created or opened. `chosen`: whether the user chose its folder."""
    if RunFolder(path).exists:
        return [] if chosen or RunFolder(path).finished else [f"continuing the unfinished run in {path}"]
    other = None if chosen else namesake(config, site)
    notes = [f"{other[0]} holds a run with different {other[1]}; this is a new run in {path}"] if other else []
    return notes + _only_here(config, site)


def _only_here(config: Config, site: Site) -> list[str]:
    """Name the clients whose encoders no other process can build."""
    specs = {name: site.encoder(k, config) for k, name in enumerate(site.names(config))}
    found = {name: find(spec, "encoder") for name, spec in specs.items() if is_at_hand(spec)}
    if not found:
        return []
    things = dict.fromkeys(_words(thing) for thing in found.values())
    whose = f"{', '.join(found)}: the encoder{'s' * (len(found) > 1)}"
    return [f"{whose} cannot be opened in another process. To change this, {' and '.join(things)}."]


def _words(thing: object) -> str:
    if isinstance(thing, nn.Module):
        return f"pass the class {type(thing).__name__}, or a function, from a module"
    name = getattr(thing, "__name__", type(thing).__name__)
    return "pass a function from a module instead of a lambda" if name == "<lambda>" else f"define {name} in a module"


def notes_after(folder: RunFolder, was_finished: bool) -> list[str]:
    """Return what to say about a finished run."""
    if was_finished:
        return [f"run folder: {folder.path} (finished before; to train again, pass another run_dir)"]
    notes = [f"run folder: {folder.path}"]
    if not folder.read_json("results.json")["mean"]:
        notes.insert(0, "no labels, so no accuracy: look at run.report() and hetero-ssfl neighbours")
    return notes
