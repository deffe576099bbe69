"""The same apps on Flower's Simulation Engine (Ray)."""

import os
from importlib.util import find_spec

from flwr.serverapp import ServerApp

from ..config import Config
from ..errors import ConfigError
from ..runs import RunFolder
from .simulated import RUN_DIR_VARIABLE


def simulate(app: ServerApp, folder: RunFolder, config: Config) -> None:
    """Run to the end on Ray actors; they find the run folder through the environment they inherit."""
    if find_spec("ray") is None:
        raise ConfigError(
            "engine.kind = 'simulation' needs Ray, which is not installed. "
            "Install it with: pip install 'hetero-ssfl[simulation]', or leave engine.kind = 'in-process'."
        )
    from flwr.simulation import run_simulation

    from .client_app import app as client_app

    os.environ[RUN_DIR_VARIABLE] = str(folder.path.resolve())
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    engine = config.engine
    cores = engine.workers or os.cpu_count() or 1
    run_simulation(
        server_app=app,
        client_app=client_app,
        num_supernodes=config.clients.count,
        backend_config={
            "client_resources": {"num_cpus": engine.cpus_per_client, "num_gpus": engine.gpus_per_client},
            "init_args": {"num_cpus": cores, "logging_level": "ERROR"},
        },
    )
