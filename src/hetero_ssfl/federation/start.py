"""Start or continue a run: `prepare` creates or opens it, `Prepared.train` runs it here, `serve` on any grid.

The command line, Python and deployments follow the same policy for a run folder:

- It holds no run: the run's parts are checked first; the folder is written only if they work.
- It holds a run with the same config and participants: the run continues after its last finished round. A finished
  run is left unchanged.
- It holds another run: an error names the first difference. A run is never overwritten.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from ..config import Config, differences, flat
from ..data import fit_rad, fit_to_data, is_here
from ..errors import ConfigError, DataError, HeteroSSFLError, RunError
from ..methods import method_for
from ..plugins import is_known_place, remember, remember_places
from ..runs.events import Listener, Progressed
from ..runs.files import append_line
from ..runs.folder import FAULTS, RunFolder, resume_command
from .continuing import WHO_MAY_JOIN, continue_with
from .engines.forkserver import open_fork_server
from .engines.workers import InlineGrid, WorkerGrid
from .participants import LocalSite, NodeSite, Site, open_site
from .participants.split import data_changes
from .server.loop import Server
from .server.status_file import reporting
from .server.tensorboard import check_tracking, tracking

log = logging.getLogger(__name__)

# --- starting ---


@dataclass(frozen=True)
class Prepared:
    """A run that was created or opened, before its rounds are run."""

    folder: RunFolder
    site: Site
    continues: bool
    """Whether the folder held this run before."""
    other: tuple[Path, str] | None = None
    """The newest other run whose folder has this run's default name, and what differs; for a message."""

    def train(self, listen: Listener) -> RunFolder:
        """Run the remaining rounds on this machine, with the engine that the config names."""
        folder, config = self.folder, self.folder.read_config()
        if folder.finished:
            return folder
        remember([*(model.encoder for model in config.clients.models), *config.own_code.values()])
        remember_places(places_of(folder))
        if config.engine.kind == "simulation":
            from .engines.ray_engine import simulate

            simulate(lambda grid: serve(grid, folder, listen), folder, config)
        else:
            with open_grid(self.site, folder, listen) as grid:
                serve(grid, folder, listen)
        return folder


def start(
    config: Config, run_dir: Path | None = None, listen: Listener = lambda _: None, nodes: Sequence[Path] = ()
) -> RunFolder:
    """Run a federation to the end, or continue it. `nodes` are settings files of participants with their own images."""
    return prepare(config, run_dir, nodes).train(listen)


def resume(folder: RunFolder, listen: Listener) -> RunFolder:
    """Continue after the last finished round. A finished run is not changed."""
    return reopen(folder).train(listen)


def prepare(
    config: Config,
    run_dir: Path | None = None,
    nodes: Sequence[Path] = (),
    site: Site | None = None,
    finished: bool = False,
) -> Prepared:
    """Create the run, or open it to continue.

    Without a site, the participants are `nodes`, or a split of one data set, and sizes that the config does not name
    are fitted to the data. Without `run_dir`, `default_folder` chooses it, with `finished`.
    """
    if site is None:
        if config.engine.kind == "in-process":
            open_fork_server()  # it imports torch while this process reads the data
        config = fit_rad(config) if nodes else fit_to_data(config)
        site = NodeSite(nodes) if nodes else LocalSite()
    path, other = (run_dir, None) if run_dir else default_folder(config, site, finished)
    existed = RunFolder(path).exists
    return Prepared(open_run(path, config, site), site, existed, None if existed else other)


def reopen(folder: RunFolder, site: Site | None = None) -> Prepared:
    """Open a run to continue it."""
    site = site or open_site(folder, to_train=True)
    return Prepared(open_run(folder.path, folder.read_config(), site), site, continues=True)


def change_settings(folder: RunFolder, settings: Mapping[str, Any], site: Site | None = None) -> None:
    """Give a run other settings for its next rounds. Nothing is changed if it cannot continue on this machine."""
    if not folder.read_facts().elsewhere:
        reopened = reopen(folder, site)
        reopened.site.nodes(folder)  # raises if some objects do not exist here
    continue_with(folder, settings)


def warn_of_changed_data(folder: RunFolder) -> None:
    """Warn if the data of a run on this machine have changed since it began: its figures are those of the old data."""
    source = folder.read_config().data.source
    known = folder.read_facts().site == "simulated" and (is_here(source) or is_known_place(source))
    try:
        changed = data_changes(folder) if known else None
    except DataError:  # they are not here
        changed = None
    if changed:
        log.warning("the data of '%s' have changed since it began (%s); its figures are older", folder.path, changed)


def open_run(path: Path, config: Config, site: Site) -> RunFolder:
    """Create the run, or open it to continue. See the module docstring for the policy."""
    method_for(config)
    check_tracking(config)
    if config.engine.kind == "simulation" and site.kind != "simulated":
        raise ConfigError(
            "engine.kind = 'simulation' cannot reach these participants from Ray's processes. Leave it out."
        )
    if not RunFolder(path).exists:
        with torch_threads(config.engine.threads):
            setup = site.set_up(config)
        with RunFolder(path).lock():
            if not RunFolder(path).exists:  # another process may have created it meanwhile
                return RunFolder.create(path, config, lambda folder: setup.write(folder, site.kind))
    folder = RunFolder.open(path)
    difference = _what_differs(folder, config, site)
    if difference:
        raise RunError(
            f"'{path}' holds a run with different {difference}. Continue that run with: {resume_command(path)}; "
            "or choose another run folder."
        )
    changed = differences(folder.read_config(), config)
    if changed and not folder.finished and changed.keys() <= set(WHO_MAY_JOIN):
        continue_with(folder, changed)
    return folder


def default_folder(config: Config, site: Site, finished: bool = False) -> tuple[Path, tuple[Path, str] | None]:
    """Return runs/NAME-METHOD-seedN, or NAME-METHOD-seedN-2 etc.: where this run is unfinished, or a new folder.

    With `finished`, it can also be where this very run is finished. Also return the newest other run of this name, if
    the folder is new, and what differs.
    """
    *taken, new = _folders_of_name(config)
    for path in reversed(taken):
        folder = RunFolder(path)
        usable = folder.exists and not folder.is_busy() and (finished or not folder.finished)
        if usable and _difference_in(folder, config, site) is None:
            return path, None
    newest = _difference_in(RunFolder(taken[-1]), config, site) if taken else None
    return new, (taken[-1], newest) if newest else None


def _difference_in(folder: RunFolder, config: Config, site: Site) -> str | None:
    """Return what differs from the run in a folder; "" if the folder cannot be read."""
    try:
        return _what_differs(RunFolder.open(folder.path), config, site)
    except HeteroSSFLError:
        return ""


def _folders_of_name(config: Config) -> list[Path]:
    """Return the folders of this name that exist, and then the first that does not."""
    name = Path("runs", f"{config.name}-{config.method.rpartition(':')[2]}-seed{config.seed}")
    folders = [name]
    while folders[-1].exists():
        folders.append(name.with_name(f"{name.name}-{len(folders) + 1}"))
    return folders


def _what_differs(folder: RunFolder, config: Config, site: Site) -> str | None:
    """Return what differs from the run in a folder. A run that was given other settings is also its earlier self."""
    if folder.read_facts().site != site.kind:
        return "participants"
    earlier = [before for _, before in folder.read_earlier()]
    return site.difference(folder) or (None if config in earlier else _difference(folder.read_config(), config))


def _difference(before: Config, now: Config) -> str | None:
    """Return the first setting that differs, with both values; None if all are equal.

    Who may join does not count: the operator of a federation can admit nodes to a run that has begun.
    """
    old, new = flat(before.model_dump(mode="json")), differences(before, now)
    key = next((key for key in new if key not in WHO_MAY_JOIN), None)
    return key and f"settings ({key} is {old.get(key)} there and {new[key]} here)"


# --- running the rounds ---


def serve(grid: Grid, run: RunFolder, listen: Listener) -> None:
    """Run all remaining rounds. Only one process at a time can do this in a folder."""
    config = run.read_config()
    with run.lock(), torch_threads(config.engine.threads):
        if not run.finished:
            server = Server(grid, run, config, reporting(run, tracking(run, listen)))
            try:
                server.run()
            except HeteroSSFLError:
                raise
            except Exception as error:  # of a user's own method: the screen shows it, and the folder keeps it
                append_line(run.path / FAULTS, "".join(traceback.format_exception(error)))
                raise


def open_grid(site: Site, folder: RunFolder, listen: Listener) -> WorkerGrid | InlineGrid:
    """Open a grid of worker processes.

    If only this process has the participants, the workers are forked from it; where a fork is not safe, the clients
    run in this process.
    """
    config = folder.read_config()

    def on_progress(name: str, done: float, loss: float) -> None:
        listen(Progressed(name, done, loss))

    nodes, threads = site.nodes(folder), config.engine.threads
    workers = config.engine.workers or (os.cpu_count() or 1 if config.engine.device == "cpu" else 1)
    if config.engine.device != "cpu":
        for k, node in enumerate(nodes):
            node["gpu-fraction"] = gpu_fraction(config, k, workers)
    if site.kind != "python":
        return WorkerGrid(nodes, workers, threads, on_progress)
    # Neither OpenMP threads nor CUDA survive a fork, so a forked worker must not need them.
    safe = sys.platform == "linux" and config.engine.device == "cpu" and threads == 1
    if not safe or torch.cuda.is_initialized():
        return InlineGrid(nodes, site, on_progress)
    return WorkerGrid(nodes, workers, threads, on_progress, site)


def gpu_fraction(config: Config, client: int, workers: int) -> float:
    """Return the fraction of the GPU's memory that a client may use while it trains."""
    return config.model_of(client).gpu_fraction or 1 / workers


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within a block: the server's sums must not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def places_of(folder: RunFolder) -> list[str]:
    """Return the data that a run folder names, and the node settings files."""
    facts = folder.read_json("facts.json")
    if folder.read_facts().site == "simulated":
        return [folder.read_config().data.source]
    named = [own for own in facts.get("sources", {}).get("clients", {}).values() if own]
    return [*facts.get("nodes", []), *(place for own in named for place in own.values() if place)]
