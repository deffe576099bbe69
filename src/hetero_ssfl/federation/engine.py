"""Start or continue a run on this machine: on worker processes, or on Flower's Simulation Engine."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from ..config import Config
from ..consensus import mutual_cka
from ..errors import RunError
from ..evaluation import extract_features
from ..methods import method_for
from ..plugins import check_trusted, remember
from ..runs import RunFolder
from .given import site_of
from .inprocess import InlineGrid, InProcessGrid, ProgressListener
from .node import find_rad, open_node, read_node
from .nodes import Listener
from .nursery import open_nursery
from .participant import Participant, evaluate
from .server_app import Server
from .simulated import client_name, open_site, set_up, set_up_for_nodes
from .status import reporting
from .tensorboard import check_tracking, tracking


def start(config: Config, run_dir: Path, listen: Listener, nodes: Sequence[Path] = ()) -> RunFolder:
    """Create the run folder and run to the end; with `nodes`, each a settings file, participants bring their own."""
    RunFolder(run_dir).must_be_free()
    method_for(config)
    check_tracking(config)
    for path in nodes:
        read_node(path)
    if config.engine.kind == "in-process":
        open_nursery()  # it imports while the data are read here
    with torch_threads(config.engine.threads):
        setup = set_up_for_nodes(config, nodes) if nodes else set_up(config)
    # What cannot work was refused before anything is written.
    return resume(RunFolder.create(run_dir, config, setup.write), listen)


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
        remember([*(model.encoder for model in config.clients.models), config.method])

        def serve(grid: Grid) -> None:
            Server(grid, folder, config, reporting(folder, tracking(folder, listen))).run()

        if config.engine.kind == "simulation":
            from .simulation import simulate

            simulate(serve, folder, config)
            return folder

        def on_progress(name: str, done: float, loss: float) -> None:
            listen({"event": "progress", "client": name, "done": done, "loss": loss})

        with open_grid(folder, config, on_progress) as grid:
            serve(grid)
    return folder


def open_grid(folder: RunFolder, config: Config, on_progress: ProgressListener) -> InProcessGrid | InlineGrid:
    """Worker processes; for objects of this process, forks of it, or itself where a fork is not safe."""
    nodes, threads = node_configs(folder), config.engine.threads
    workers = config.engine.workers or (os.cpu_count() or 1 if config.engine.device == "cpu" else 1)
    if config.engine.device != "cpu":
        for k, node in enumerate(nodes):
            node["gpu-fraction"] = gpu_fraction(config, k, workers)
    given = "given" in nodes[0]
    if given:
        site_of(nodes[0]["run-dir"])
        # OpenMP's threads do not survive a fork, so a child must not need any; neither does CUDA.
        safe = sys.platform == "linux" and config.engine.device == "cpu" and threads == 1
        if not safe or torch.cuda.is_initialized():
            return InlineGrid(nodes, on_progress)
    return InProcessGrid(nodes, workers, threads, on_progress, fork=given)


def gpu_fraction(config: Config, client: int, workers: int) -> float:
    """How much of the GPU's memory a client may use while it is at work."""
    return config.model_of(client).gpu_fraction or 1 / workers


def node_configs(folder: RunFolder) -> list[dict[str, Any]]:
    """What each node is told of its place: its settings file, its number, or its row of the simulated split."""
    facts, run_dir = folder.read_json("facts.json"), str(folder.path.resolve())
    if "given" in facts:
        return [{"name": name, "given": k, "run-dir": run_dir} for k, name in enumerate(facts["given"])]
    paths = facts.get("nodes")
    if paths:
        return [{"name": str(path), "settings": path} for path in paths]
    if not folder.simulated:
        raise RunError(f"the participants of '{folder.path}' are on other machines, with their models. Look there.")
    count = folder.config.clients.count
    return [{"name": client_name(k), "partition-id": k, "run-dir": run_dir} for k in range(count)]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """The server's sums, too, must not depend on the machine's number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def client_names(folder: RunFolder) -> list[str]:
    """Of the participants on this machine, in the order they were given."""
    places = node_configs(folder)
    return [read_node(Path(p["settings"])).name if "settings" in p else p["name"] for p in places]


def participants(folder: RunFolder, config: Config) -> Iterator[Participant]:
    """Those of a run on this machine, as they are now. The folder may be another's, and so may be what it names."""
    config_toml = config.to_toml()
    facts = folder.read_json("facts.json")
    for place in node_configs(folder):
        if "given" in place:
            yield site_of(place["run-dir"]).participant(folder, place["given"], config)
            continue
        check_trusted(config.method, "method")
        if "settings" in place:
            path = Path(place["settings"])
            node = read_node(path)
            check_trusted(node.encoder.encoder, "encoder")
            rad = find_rad(node, facts["rad_digest"])
            if rad is None:
                raise RunError(f"the node of '{path}' has no RAD of this run. Continue the run first.")
            yield open_node(path, config_toml, facts["federation"], rad)
        else:
            check_trusted(config.model_of(place["partition-id"]).encoder, "encoder")
            yield open_site(place["run-dir"], config_toml).participant(place["partition-id"])


def reevaluate(folder: RunFolder, config: Config, split: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Probe a run's models again, one client at a time, with other `[evaluation]` settings if wanted."""
    with torch_threads(config.engine.threads):
        for participant in participants(folder, config):
            yield participant.name, evaluate(participant, participant.newest(), split)


def mutual_cka_of(folder: RunFolder, trained: bool) -> tuple[list[str], Tensor]:
    """The clients' names, and how alike their encoders see the RAD, before or after the run."""
    everyone = list(participants(folder, folder.config))
    encoders = [(p.newest() if trained else p.untrained()).encoder for p in everyone]
    features = [extract_features(e, p.rad) for e, p in zip(encoders, everyone, strict=True)]
    return [p.name for p in everyone], mutual_cka(features)
