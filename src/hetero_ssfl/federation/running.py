"""Start or continue a run: `open_run` creates or opens it, `serve` runs it on any grid, `run_here` on this machine.

The command line, Python and deployments follow the same policy for a run folder:

- It holds no run: the run's parts are checked first; the folder is written only if they work.
- It holds a run with the same config and participants: the run continues after its last finished round. A finished
  run is left unchanged.
- It holds another run: an error names the first difference. A run is never overwritten.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

import torch
from flwr.serverapp import Grid
from torch import Tensor

from ..config import Config, flat
from ..consensus import mutual_cka
from ..errors import ConfigError, RunError
from ..evaluation import extract_features
from ..events import Listener, Progressed
from ..methods import method_for
from ..plugins import check_trusted, remember
from ..runs import RunFolder, resume_command
from .client.scoring import evaluate
from .engines.forkserver import open_fork_server
from .engines.workers import InlineGrid, WorkerGrid
from .records import Header
from .server.loop import Server
from .server.status_file import reporting
from .server.tensorboard import check_tracking, tracking
from .sites import NodeSite, SimulatedSite, Site, open_site
from .sites.node import RadMissingError
from .sites.participant import Participant

# --- starting ---


def start(config: Config, run_dir: Path, listen: Listener, nodes: Sequence[Path] = ()) -> RunFolder:
    """Run a federation to the end, or continue it. `nodes` are settings files of participants with their own images."""
    if config.engine.kind == "in-process":
        open_fork_server()  # it imports torch while this process reads the data
    site: Site = NodeSite(nodes) if nodes else SimulatedSite(RunFolder(run_dir))
    return run_here(open_run(run_dir, config, site), site, listen)


def resume(folder: RunFolder, listen: Listener) -> RunFolder:
    """Continue after the last finished round. A finished run is not changed."""
    site = open_site(folder)
    return run_here(open_run(folder.path, folder.config, site), site, listen)


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
        return RunFolder.create(path, config, lambda folder: setup.write(folder, site.kind))
    folder = RunFolder.open(path)
    found = (
        "participants" if folder.site != site.kind else site.difference(folder) or _difference(folder.config, config)
    )
    if found:
        raise RunError(
            f"'{path}' holds a run with different {found}. Continue that run with: {resume_command(path)}; "
            "or choose another run folder."
        )
    return folder


def new_folder(config: Config) -> Path:
    """Return the default folder of a new run: runs/NAME-METHOD-seedN, or the next free name."""
    name = Path("runs", f"{config.name}-{config.method.rpartition(':')[2]}-seed{config.seed}")
    choices = chain([name], (name.with_name(f"{name.name}-{k}") for k in count(2)))
    return next(path for path in choices if not path.exists())


def _difference(before: Config, now: Config) -> str | None:
    """Return the first setting that differs, with both values; None if all are equal."""
    old, new = flat(before.model_dump(mode="json")), flat(now.model_dump(mode="json"))
    key = next((key for key in {**old, **new} if old.get(key) != new.get(key)), None)
    return key and f"settings ({key} is {old.get(key)} there and {new.get(key)} here)"


# --- running the rounds ---


def serve(grid: Grid, run: RunFolder, site: Site, listen: Listener) -> None:
    """Run all remaining rounds. Only one process at a time can do this in a folder."""
    config = run.config
    with run.lock(), torch_threads(config.engine.threads):
        if not run.finished:
            Server(grid, run, config, reporting(run, tracking(run, listen)), site.may_be_away).run()


def run_here(folder: RunFolder, site: Site, listen: Listener) -> RunFolder:
    """Run the federation on this machine, with the engine that its config names."""
    config = folder.config
    if folder.finished:
        return folder
    remember([*(model.encoder for model in config.clients.models), config.method])
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


# --- the participants of an existing run ---


def participants(folder: RunFolder, site: Site, config: Config) -> Iterator[Participant]:
    """Yield the participants on this machine in their current state.

    A run folder from elsewhere may name code to import, so that code must be trusted first.
    """
    check_trusted(config.method, "method")
    names, facts = site.names(config), folder.read_json("facts.json")
    header = Header(facts.get("federation", ""), 0, facts.get("rad_digest", ""))
    for number in range(len(names)):
        check_trusted(site.encoder(number, config), "encoder")
        try:
            yield site.participant(number, config, header)
        except RadMissingError as error:
            raise RunError(str(error)) from None


def reevaluate(folder: RunFolder, config: Config, split: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Probe a run's models again, one client at a time. `config` may change settings of `[evaluation]`."""
    with torch_threads(config.engine.threads):
        for participant in participants(folder, open_site(folder), config):
            yield participant.name, evaluate(participant, participant.newest(), split)


def mutual_cka_of(folder: RunFolder, site: Site, trained: bool) -> tuple[list[str], Tensor]:
    """Return the clients' names and the mutual CKA of their encoders on the RAD, before or after training."""
    everyone = list(participants(folder, site, folder.config))
    encoders = [(p.newest() if trained else p.untrained()).encoder for p in everyone]
    features = [extract_features(e, p.rad) for e, p in zip(encoders, everyone, strict=True)]
    return [p.name for p in everyone], mutual_cka(features)
