"""The same server loop and ClientApp on Flower's Simulation Engine (Ray)."""

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...config import Config
from ...errors import ConfigError
from ...plugins import install_command
from ...runs.folder import RunFolder

QUIET: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "include_dashboard": False}


def simulate(serve: Callable[[Grid], None], folder: RunFolder, config: Config) -> None:
    """Run to the end on Ray actors. Flower passes them the ClientApp, which contains the path of the run folder."""
    if find_spec("ray") is None:
        raise ConfigError(f"engine.kind = 'simulation' needs Ray. Install it: {install_command('simulation')}")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets clients wait for all other work of the machine
    from flwr.simulation import run_simulation

    from ..client.app import ClientProcess, client_app

    # Hides that `run_simulation` is deprecated: its successor is a CLI.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    failures: list[BaseException] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(grid)
        except BaseException as error:  # Flower would replace it with an error of its own
            failures.append(error)

    run_simulation(
        server_app=app,
        client_app=client_app(ClientProcess(run_dir=folder.path.resolve(), threads=config.engine.threads)),
        num_supernodes=config.clients.count,
        backend_config={
            "client_resources": {"num_cpus": config.engine.cpus_per_client, "num_gpus": config.engine.gpus_per_client},
            "init_args": {"num_cpus": config.engine.workers or os.cpu_count() or 1, **QUIET},
        },
    )
    if failures:
        raise failures[0]
