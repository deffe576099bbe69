"""Start or continue a run: `open_run` creates or opens it, `serve` runs it on any grid, `run_here` on this machine.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
from .participants import NodeSite, SimulatedSite, Site, open_site
from .participants.simulated import data_changes
from .server.loop import Server
from .server.status_file import reporting
from .server.tensorboard import check_tracking, tracking

log = logging.getLogger(__name__)

# --- starting ---


def start(config: Config, run_dir: Path, listen: Listener, nodes: Sequence[Path] = ()) -> RunFolder:
    """Run a federation to the end, or continue it. `nodes` are settings files of participants with their own images."""
    if config.engine.kind == "in-process":
        open_fork_server()  # it imports torch while this process reads the data
    site = site_for(run_dir, nodes)
    return run_here(open_run(run_dir, fitted(config, nodes), site), site, listen)


def fitted(config: Config, nodes: Sequence[Path] = ()) -> Config:
    """Return the config as a run starts with it: with default sizes that fit the data on this machine."""
    return fit_rad(config) if nodes else fit_to_data(config)


def site_for(run_dir: Path, nodes: Sequence[Path] = ()) -> Site:
    """Return the site of a new run: settings files of participants, or a split of one data set."""
    return NodeSite(nodes) if nodes else SimulatedSite(RunFolder(run_dir))


def resume(folder: RunFolder, listen: Listener) -> RunFolder:
    """Continue after the last finished round. A finished run is not changed."""
    site = open_site(folder, to_train=True)
    return run_here(open_run(folder.path, folder.read_config(), site), site, listen)


def check_resumable(folder: RunFolder) -> None:
    """Raise an error if the run cannot continue here: before something about it is changed."""
    if not folder.read_facts().elsewhere:
        site = open_site(folder, to_train=True)
        site.node_configs(folder.read_config())
        open_run(folder.path, folder.read_config(), site)


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
    if config.engine.kind == "simulation" and not site.runs_on_ray:
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
    found = _what_differs(folder, config, site)
    if found:
        raise RunError(
            f"'{path}' holds a run with different {found}. Continue that run with: {resume_command(path)}; "
            "or choose another run folder."
        )
    changed = differences(folder.read_config(), config)
    if changed and not folder.finished and changed.keys() <= set(WHO_MAY_JOIN):
        continue_with(folder, changed)
    return folder


def default_folder(config: Config, site: Site, finished: bool = False) -> Path:
    """Return runs/NAME-METHOD-seedN, or NAME-METHOD-seedN-2 etc.: where this run is unfinished, or a new folder.

    With `finished`, it can also be where this very run is finished.
    """
    *taken, new = _folders_of_name(config)
    return next((old for old in reversed(taken) if _is_this_run(old, config, site, finished)), new)


def namesake(config: Config, site: Site) -> tuple[Path, str] | None:
    """Return the newest other run whose folder has this run's default name, and what differs; for messages."""
    *taken, _ = _folders_of_name(config)
    try:
        found = _what_differs(RunFolder.open(taken[-1]), config, site) if taken else None
    except HeteroSSFLError:
        found = None
    return (taken[-1], found) if found else None


def _folders_of_name(config: Config) -> list[Path]:
    """Return the folders of this name that exist, and then the first that does not."""
    name = Path("runs", f"{config.name}-{config.method.rpartition(':')[2]}-seed{config.seed}")
    folders = [name]
    while folders[-1].exists():
        folders.append(name.with_name(f"{name.name}-{len(folders) + 1}"))
    return folders


def _is_this_run(path: Path, config: Config, site: Site, finished: bool) -> bool:
    """Return whether the folder holds this very run, and no process is training in it."""
    folder = RunFolder(path)
    if not folder.exists or folder.is_busy() or (folder.finished and not finished):
        return False
    try:
        return _what_differs(RunFolder.open(path), config, site) is None
    except HeteroSSFLError:
        return False


def _what_differs(folder: RunFolder, config: Config, site: Site) -> str | None:
    """Return what differs from the run in a folder. A run that was given other settings is also its earlier self."""
    if folder.read_facts().site != site.kind:
        return "participants"
    changed = site.difference(folder)
    return changed or (
        None if config in [before for _, before in folder.read_earlier()] else _difference(folder.read_config(), config)
    )


def _difference(before: Config, now: Config) -> str | None:
    """Return the first setting that differs, with both values; None if all are equal.

    Who may join does not count: the operator of a federation can admit nodes to a run that has begun.
    """
    old, new = flat(before.model_dump(mode="json")), differences(before, now)
    key = next((key for key in new if key not in WHO_MAY_JOIN), None)
    return key and f"settings ({key} is {old.get(key)} there and {new[key]} here)"


# --- running the rounds ---


def serve(grid: Grid, run: RunFolder, site: Site, listen: Listener) -> None:
    """Run all remaining rounds. Only one process at a time can do this in a folder."""
    config = run.read_config()
    with run.lock(), torch_threads(config.engine.threads):
        if not run.finished:
            server = Server(grid, run, config, reporting(run, tracking(run, listen)), site.may_be_away)
            try:
                server.run()
            except HeteroSSFLError:
                raise
            except (
                Exception
            ) as error:  # of a user's own method: the screen shows the traceback, and the folder keeps it
                append_line(run.path / FAULTS, "".join(traceback.format_exception(error)))
                raise


def run_here(folder: RunFolder, site: Site, listen: Listener) -> RunFolder:
    """Run the federation on this machine, with the engine that its config names."""
    config = folder.read_config()
    if folder.finished:
        return folder
    remember([*(model.encoder for model in config.clients.models), *config.own_code.values()])
    remember_places(places_of(folder))
    if config.engine.kind == "simulation":
        from .engines.ray_engine import simulate

        simulate(lambda grid: serve(grid, folder, site, listen), folder, config)
    else:
        with open_grid(site, config, listen) as grid:
            serve(grid, folder, site, listen)
    return folder


def open_grid(site: Site, config: Config, listen: Listener) -> WorkerGrid | InlineGrid:
    """Open a grid of worker processes.

    If only this process has the participants, the workers are forked from it; where a fork is not safe, the clients
    run in this process.
    """

    def on_progress(name: str, done: float, loss: float) -> None:
        listen(Progressed(name, done, loss))

    nodes, threads = site.node_configs(config), config.engine.threads
    workers = config.engine.workers or (os.cpu_count() or 1 if config.engine.device == "cpu" else 1)
    if config.engine.device != "cpu":
        for k, node in enumerate(nodes):
            node["gpu-fraction"] = gpu_fraction(config, k, workers)
    if not site.only_this_process:
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
