"""Start or continue a run on this machine."""

import os
from pathlib import Path

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from ..config import Config
from ..methods import method_for
from ..runs import RunFolder
from .inprocess import RUN_ID, SERVER_NODE, InProcessGrid
from .server_app import Listener, Server
from .simulated import client_name, prepare


def server_app(folder: RunFolder, config: Config, listen: Listener) -> ServerApp:
    """The ServerApp of a run: the same on every engine."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        Server(grid, folder, config, listen).run()

    return app


def start(config: Config, run_dir: Path, listen: Listener) -> RunFolder:
    """Create the run folder and run to the end."""
    method_for(config)  # refuse what cannot work before anything is written
    folder = RunFolder.create(run_dir, config)
    return resume(folder, listen)


def resume(folder: RunFolder, listen: Listener) -> RunFolder:
    """Go on after the last finished round; a finished run is left as it is."""
    config = folder.config
    with folder.lock():
        if folder.finished:
            return folder
        if not (folder.path / "facts.json").exists():
            folder.write_json("facts.json", prepare(folder, config))
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
