"""Start or continue a run on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from ..config import Config
from ..errors import RunError
from ..evaluation import mutual_cka
from ..methods import method_for
from ..runs import RunFolder
from .inprocess import RUN_ID, SERVER_NODE, InProcessGrid
from .server_app import Listener, Server
from .simulated import client_name, evaluate, final_learner, open_site, rad_features, set_up


def server_app(folder: RunFolder, config: Config, listen: Listener) -> ServerApp:
    """The ServerApp of a run: the same on every engine."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        Server(grid, folder, config, listen).run()

    return app


def start(config: Config, run_dir: Path, listen: Listener) -> RunFolder:
    """Create the run folder and run to the end."""
    RunFolder(run_dir).must_be_free()
    method_for(config)
    setup = set_up(config)  # what cannot work is refused before anything is written
    folder = RunFolder.create(run_dir, config, setup.write)
    return resume(folder, listen)


def start_or_resume(config: Config, run_dir: Path, listen: Listener) -> RunFolder:
    """Start, or go on with, a run of exactly these settings."""
    if not (run_dir / "config.toml").exists():
        return start(config, run_dir, listen)
    folder = RunFolder.open(run_dir)
    if folder.config != config:
        raise RunError(f"'{run_dir}' holds a run with other settings. Remove it or choose another folder.")
    return resume(folder, listen)


def resume(folder: RunFolder, listen: Listener) -> RunFolder:
    """Go on after the last finished round; a finished run is left as it is."""
    config = folder.config
    with folder.lock(), torch_threads(config.engine.threads):
        if folder.finished:
            return folder
        nodes = [
            {"name": client_name(k), "partition-id": k, "run-dir": str(folder.path.resolve())}
            for k in range(config.clients.count)
        ]
        workers = config.engine.workers or os.cpu_count() or 1

        def on_progress(name: str, done: float, loss: float) -> None:
            listen({"event": "progress", "client": name, "done": done, "loss": loss})

        with InProcessGrid(nodes, workers, config.engine.threads, on_progress) as grid:
            app = server_app(folder, config, listen)
            app(grid, Context(RUN_ID, SERVER_NODE, {}, RecordDict(), {}))
    return folder


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """The server's sums, too, must not depend on the machine's number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reevaluate(folder: RunFolder, config: Config, split: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Probe a run's models again, one client at a time, with other `[evaluation]` settings if wanted."""
    site = open_site(str(folder.path.resolve()), config.to_toml())
    with torch_threads(config.engine.threads):
        for number in range(config.clients.count):
            yield client_name(number), evaluate(site, number, final_learner(site, number), split)


def mutual_cka_of(folder: RunFolder, trained: bool) -> Tensor:
    """How alike the clients' encoders see the RAD, before or after the run."""
    site = open_site(str(folder.path.resolve()), folder.config.to_toml())
    return mutual_cka(rad_features(site, trained))
