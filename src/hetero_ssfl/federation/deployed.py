"""The server's side on Flower's deployment engine: `flwr run` starts `server_app` beside the SuperLink.

Run config: `config` (a TOML file) and `run-dir`. Starting it again with the same run-dir goes on after the last
finished round, whatever ended it before.
"""

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..config import load_config
from ..errors import ConfigError, HeteroSSFLError
from ..methods import method_for
from ..runs import RunFolder
from .engine import torch_threads
from .logs import log_to_stderr
from .nodes import Event
from .server_app import Server
from .simulated import set_up_for_nodes
from .status import reporting
from .tensorboard import check_tracking, tracking

log = logging.getLogger(__name__)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    log_to_stderr("server")
    try:
        serve(grid, Path(_setting(context, "config")), Path(_setting(context, "run-dir")))
    except HeteroSSFLError as error:
        log.error("%s", error)
        raise RuntimeError(str(error)) from None  # Flower reports these words; an exit it would take for a lost task


def serve(grid: Grid, config_path: Path, run_dir: Path) -> None:
    """Start the run, or go on with it."""
    config = load_config(str(config_path))
    method_for(config)
    check_tracking(config)
    if not (run_dir / "config.toml").exists():
        RunFolder.create(run_dir, config, set_up_for_nodes(config).write)
    folder = RunFolder.open(run_dir)
    if folder.config != config:
        log.warning("%s has changed since the run began; the run keeps the settings it began with", config_path)
    with folder.lock(), torch_threads(folder.config.engine.threads):
        if not folder.finished:
            Server(grid, folder, folder.config, reporting(folder, tracking(folder, log_event))).run()


def log_event(event: Event) -> None:
    if event["event"] != "answered":
        level = logging.WARNING if event["event"] == "warning" else logging.INFO
        log.log(level, "%s", event.get("text", event["event"]), extra={"event": event})


def _setting(context: Context, key: str) -> str:
    found = context.run_config.get(key)
    if not found:
        raise ConfigError(f"the run config has no '{key}'. Pass it: flwr run APP --run-config '{key}=\"PATH\"'.")
    return str(found)
