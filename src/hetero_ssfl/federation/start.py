"""Start or continue a run: `prepare` creates or opens it, `Prepared.train` runs it here, `serve` on any grid.

The command line, Python and deployments follow the same policy for a run folder:

- It holds no run: the run's parts are checked first; the folder is written only if they work.
- It holds a run with the same config and participants: the run continues after its last finished round. A finished
  run is left unchanged.
- It holds another run: an error names the first difference. A run is never overwritten.

Only the server of a deployment follows its config file: what changed there since it was last read changes in the run,
as far as it may change between two rounds.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from ..config import Config, differences, flat, with_settings
from ..data import fit_rad, fit_to_data, is_here
from ..errors import ConfigError, DataError, HeteroSSFLError, RunError
from ..methods import method_for
from ..plugins import is_known_place, remember, remember_places
from ..runs.events import Listener, Progressed
from ..runs.files import append_line
from ..runs.folder import FAULTS, HISTORY, RunFolder, resume_command
from .engines.forkserver import open_fork_server
from .engines.workers import InlineGrid, LocalGrid, WorkerGrid
from .participants import LocalSite, NodeSite, Site, open_site
from .participants.local import data_changes
from .server.loop import Server
from .server.status_file import reporting
from .server.trackers import check_tracking, tracking
from .watching import ANY_PORT, watched

log = logging.getLogger(__name__)

CHANGEABLE = (
    *("clients.seats", "clients.newcomers"),
    *("rounds", "local_epochs", "optim", "views", "averaging", "evaluation", "engine", "tracking", "watch"),
    *("clients.per_round", "ssl.ema", "ssl.ema_end", "ssl.temperature", "ssl.invariance", "ssl.variance"),
    *("ssl.covariance", "ssl.redundancy", "alignment.mu", "alignment.ramp_rounds", "alignment.when"),
    *("alignment.every", "alignment.temperature", "alignment.rad_batch", "alignment.memory", "alignment.augment_rad"),
)
"""Settings that may change between two rounds. The others define the data, the networks or the server's saved state."""


@dataclass(frozen=True)
class Prepared:
    """A run that was created or opened, before its rounds are run."""

    folder: RunFolder
    site: Site
    continues: bool  # whether the folder held this run before
    other: tuple[Path, str] | None = None  # the newest other run of this run's default name, and what differs

    def train(self, listen: Listener, watch: bool = False) -> RunFolder:
        """Run the remaining rounds on this machine, with the engine that the config names.

        `watch` shows a live page, at any free port if the config has no address.
        """
        folder, config = self.folder, self.folder.read_config()
        if folder.finished:
            return folder
        remember([*(model.encoder for model in config.clients.models), *config.own_code.values()])
        remember_places(places_of(folder))
        with watched(folder.path, config.watch.address or (ANY_PORT if watch else None), listen):
            if config.engine.kind == "simulation":
                from .engines.ray_engine import simulate

                simulate(lambda grid: serve(grid, folder, listen), folder, config)
            else:
                with open_grid(self.site, folder) as grid:
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
    config: Config, run_dir: Path | None = None, nodes: Sequence[Path] = (), site: Site | None = None
) -> Prepared:
    """Create the run, or open it to continue; without `run_dir`, in `default_folder`.

    Without a site, the participants are `nodes` or a split of one data set, to which sizes that are not set are fitted.
    """
    if site is None:
        if config.engine.kind == "in-process":
            open_fork_server()  # it imports torch while this process reads the data
        config = fit_rad(config) if nodes else fit_to_data(config)
        site = NodeSite(nodes) if nodes else LocalSite()
    path, other = (run_dir, None) if run_dir else default_folder(config, site)
    existed = RunFolder(path).exists
    return Prepared(open_run(path, config, site), site, existed, None if existed else other)


def reopen(folder: RunFolder, site: Site | None = None) -> Prepared:
    site = site or open_site(folder, to_train=True)
    return Prepared(open_run(folder.path, folder.read_config(), site), site, continues=True)


def change_settings(folder: RunFolder, settings: Mapping[str, Any], site: Site | None = None) -> None:
    """Give a run other settings for its next rounds. Nothing is changed if it cannot continue on this machine."""
    if not folder.read_facts().elsewhere:
        reopen(folder, site).site.nodes(folder)  # raises if some objects do not exist here
    continue_with(folder, settings)


def continue_with(folder: RunFolder, settings: Mapping[str, Any]) -> None:
    """Change settings of a run, finished or not. The earlier config and results are kept.

    Schedules over the rounds are functions of the config and the round: after the change, round 11 of a run that now
    has 30 rounds trains as round 11 of any run with 30 rounds does. With constant schedules the result is bit-identical
    to that of a run that had all the rounds from its beginning.
    """
    fixed = first_fixed(flat(settings))
    if fixed:
        allowed = ", ".join(CHANGEABLE)
        raise ConfigError(f"'{fixed}' cannot change within a run, expected one of {allowed}. Start another run.")
    before = folder.read_config()
    if before.privacy.epsilon is not None and "rounds" in settings:
        noise = f"the noise of privacy.epsilon = {before.privacy.epsilon:g} was chosen for {before.rounds}"
        raise ConfigError(f"'rounds' cannot change within this run: {noise}. Start another run.")
    after, commit = with_settings(before, settings), folder.committed()
    done = max(0, commit["round"]) if commit else 0
    method_for(after)
    if after == before:
        if "rounds" in settings and folder.finished:  # not an error: a script that asks for more may run again
            log.warning("'%s' has all of its %d rounds already", folder.path, done)
        return
    if after.rounds < done or (after.rounds == done and folder.finished):
        raise ConfigError(f"rounds = {after.rounds} counts all rounds, expected more than the {done} finished ones.")
    with folder.lock():
        history = folder.read_history()
        # In this order: whenever a crash interrupts it, the folder holds the run before or after the change.
        if folder.finished:
            (folder.path / "results.json").rename(folder.path / f"results-{done:06d}.json")
        entry = {"after_round": done, "config": before.to_toml()}
        folder.write_json(HISTORY, {**history, "earlier": [*history["earlier"], entry]})
        folder.write_config(after)


def first_fixed(keys: Iterable[str]) -> str | None:
    """Return the first of some settings that cannot change within a run."""
    return next((key for key in keys if not any(f"{key}.".startswith(f"{allowed}.") for allowed in CHANGEABLE)), None)


def follow_file(folder: RunFolder, config: Config) -> None:
    """Change in a run what has changed in its config file since the server last read it.

    What `run --resume --set` changed meanwhile stays, unless the file changes it, too.
    """
    before = folder.read_given()
    changed = differences(before, config)
    if not changed:
        return
    if key := first_fixed(changed):
        what = f"settings ({key} is {flat(before.model_dump(mode='json')).get(key)} there and {changed[key]} here)"
        remedy = "It cannot change within a run: set it back, or choose another run folder (RUN_DIR=... server/run.sh)."
        raise RunError(f"'{folder.path}' holds a run with different {what}. {remedy}")
    continue_with(folder, changed)
    folder.write_json(HISTORY, {**folder.read_history(), "given": config.to_toml()})


def warn_of_changed_data(folder: RunFolder) -> None:
    """Warn if the data of a run on this machine have changed since it began: its figures are those of the old data."""
    source = folder.read_config().data.source
    if folder.read_facts().site != "simulated" or not (is_here(source) or is_known_place(source)):
        return
    with suppress(DataError):  # they are not here
        if changed := data_changes(folder):
            log.warning("the data of '%s' have changed since it began (%s), not its figures", folder.path, changed)


def open_run(path: Path, config: Config, site: Site) -> RunFolder:
    """Create the run, or open it to continue. See the module docstring for the policy."""
    method_for(config)
    check_tracking(config)
    if config.engine.kind == "simulation" and site.kind != "simulated":
        raise ConfigError("engine.kind = 'simulation' cannot reach these participants from Ray. Leave it out.")
    if not RunFolder(path).exists:
        with torch_threads(config.engine.threads):
            setup = site.set_up(config)
        with RunFolder(path).lock():
            if not RunFolder(path).exists:  # another process may have created it meanwhile
                return RunFolder.create(path, config, lambda folder: setup.write(folder, site.kind))
    folder = RunFolder.open(path)
    if isinstance(site, NodeSite) and not site.paths and folder.read_facts().elsewhere:
        follow_file(folder, config)
        return folder
    difference = _what_differs(folder, config, site)
    if difference:
        remedy = f"Continue that run with: {resume_command(path)}; or choose another run folder."
        raise RunError(f"'{path}' holds a run with different {difference}. {remedy}")
    return folder


def default_folder(config: Config, site: Site) -> tuple[Path, tuple[Path, str] | None]:
    """Return runs/NAME-METHOD-seedN, or NAME-METHOD-seedN-2 etc.: where this run is unfinished, or a new folder.

    From Python it can also be where this very run is finished. Also return the newest other run of this name, if the
    folder is new, and what differs.
    """
    name = f"{config.name}-{config.method.rpartition(':')[2]}-seed{config.seed}"
    paths = (Path("runs", f"{name}-{number}" if number > 1 else name) for number in count(1))
    other = None
    taken = list(takewhile(Path.exists, paths))
    for path in reversed(taken):
        folder, newest = RunFolder(path), path == taken[-1]
        usable = not folder.is_busy() and (site.kind == "python" or not folder.finished)
        if not usable and not newest:
            continue
        with suppress(HeteroSSFLError):  # it holds no run that can be read
            difference = _what_differs(RunFolder.open(path), config, site)
            if usable and difference is None:
                return path, None
            other = (path, difference) if newest and difference else other
    return Path("runs", f"{name}-{len(taken) + 1}" if taken else name), other


def _what_differs(folder: RunFolder, config: Config, site: Site) -> str | None:
    """Return what differs from the run in a folder: a setting is named with both values. None if nothing does.

    A run that was given other settings is also its earlier self.
    """
    if folder.read_facts().site != site.kind:
        return "participants"
    difference, before = site.difference(folder), folder.read_config()
    if difference or config in [earlier for _, earlier in folder.read_earlier()]:
        return difference
    old, new = flat(before.model_dump(mode="json")), differences(before, config)
    key = next(iter(new), None)
    return key and f"settings ({key} is {old.get(key)} there and {new[key]} here)"


def serve(grid: Grid, run: RunFolder, listen: Listener) -> None:
    """Run all remaining rounds. Only one process at a time can do this in a folder."""
    config = run.read_config()
    with run.lock(), torch_threads(config.engine.threads):
        if not run.finished:
            listen = tracking(run, reporting(run, listen))
            if isinstance(grid, LocalGrid):
                grid.report = lambda name, done, loss: listen(Progressed(name, done, loss))
            server = Server(grid, run, config, listen)
            try:
                server.run()
            except HeteroSSFLError:
                raise
            except Exception as error:  # of a user's own method: the screen shows it, and the folder keeps it
                append_line(run.path / FAULTS, "".join(traceback.format_exception(error)))
                raise


def open_grid(site: Site, folder: RunFolder) -> WorkerGrid | InlineGrid:
    """Open a grid of worker processes. If only this process has the participants, they are forked from it, or if that
    is not safe, the clients run in this process."""
    config = folder.read_config()

    nodes, threads = site.nodes(folder), config.engine.threads
    workers = config.engine.workers or (os.cpu_count() or 1 if config.engine.device == "cpu" else 1)
    if config.engine.device != "cpu":
        for k, node in enumerate(nodes):
            node["gpu-fraction"] = gpu_fraction(config, k, workers)
    if site.kind != "python":
        return WorkerGrid(nodes, workers, threads)
    # Neither OpenMP threads nor CUDA survive a fork, so a forked worker must not need them.
    safe = sys.platform == "linux" and config.engine.device == "cpu" and threads == 1
    if not safe or torch.cuda.is_initialized():
        return InlineGrid(nodes, site)
    return WorkerGrid(nodes, workers, threads, site)


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
    facts = folder.read_facts()
    if facts.site == "simulated":
        return [folder.read_config().data.source]
    named = facts.sources.clients.values() if facts.sources else ()
    return [*facts.nodes, *(place for own in named if own for place in own.values() if place)]
