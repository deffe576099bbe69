"""The server's side on Flower's deployment engine: `flwr run` starts `server_app` beside the SuperLink.

The run config has `config` (a TOML file) and `run-dir`. Starting again with the same run-dir continues after the last
finished round.
"""

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..config import load_config
from ..data import fit_rad
from ..errors import ConfigError, HeteroSSFLError
from .logs import log_event, log_to_file, log_to_stderr
from .participants import NodeSite
from .start import open_run, serve
from .watching import watched

log = logging.getLogger(__name__)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    log_to_stderr("server")
    try:
        config = fit_rad(load_config(_setting(context, "config")))
        folder = open_run(Path(_setting(context, "run-dir")), config, NodeSite())
        log_to_file("server", folder.path / "server.log")
        with watched(folder.path, folder.read_config().watch.address, log_event):
            serve(grid, folder, log_event)
    except HeteroSSFLError as error:
        log.error("%s", error)
        logging.getLogger("flwr").addFilter(_is_not_ours)
        raise StoppedError(str(error)) from None  # Flower would treat sys.exit as a lost task


class StoppedError(RuntimeError):
    """Tells Flower that the run has failed. The reason has been logged in one sentence."""


def _is_not_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], StoppedError))


def _setting(context: Context, key: str) -> str:
    value = context.run_config.get(key)
    if not value:
        raise ConfigError(f"the run config has no '{key}'. Pass it: flwr run APP --run-config '{key}=\"PATH\"'.")
    return str(value)
