"""Trackers show a run's numbers in other tools. Only the server has them; clients need no tracker and no credentials.

A tracker is an object with one method, `event`. It hears every event of the run. If it fails, there is one warning, the
run goes on, and the tracker hears no more.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ...config import Config, flat
from ...plugins import find, install_command, load_module
from ...runs.events import Event, Finished, Listener, Started, Warned
from ...runs.folder import RunFolder
from .points import NewEvents, points
from .tensorboard import TensorBoard

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
KEPT = "trackers.json"
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # the run waits meanwhile


class Tracker(Protocol):
    def event(self, event: Event) -> None: ...


def load_package(tracker: str) -> Any:
    return load_module(PACKAGES[tracker], f"Install it: {install_command(tracker)}")


def check_tracking(config: Config) -> None:
    """Raise ConfigError if the package or the code of a tracker is missing."""
    for name in (name for name in PACKAGES if getattr(config.tracking, name)):
        load_package(name)
    if config.tracking.own:
        find(config.tracking.own, "tracking.own")


def tracking(folder: RunFolder, listen: Listener) -> Listener:
    """Wrap a listener: pass every event to the trackers that the config asks for, and on."""
    asked = folder.read_config().tracking
    own = asked.own or ""
    kinds: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, load_package("tensorboard")),
        "mlflow": lambda: MLflow(folder, str(asked.mlflow)),
        "wandb": lambda: WeightsAndBiases(folder, str(asked.wandb)),
        "own": lambda: find(own, "tracking.own")(folder.path),
    }
    wanted, trackers = [name for name in kinds if getattr(asked, name)], dict[str, Tracker]()

    def track(event: Event) -> None:
        failed = []
        for name in list(wanted):
            try:
                if name not in trackers:
                    trackers[name] = kinds[name]()
                trackers[name].event(event)
            except Exception as error:  # of another package, or of the user's own code
                wanted.remove(name)
                failed.append(f"tracking.{name} has failed and is left out: {type(error).__name__}: {str(error)[:300]}")
        listen(event)
        for text in failed:
            listen(Warned(getattr(event, "round", 0), text))

    return track


class NewPoints:
    """Points by round that a tool has not got yet, also after the run was interrupted, and the tool's name of the run.

    RUN/trackers.json keeps both, because these tools cannot take a point back.
    """

    def __init__(self, folder: RunFolder, tool: str) -> None:
        self.folder, self.tool, self.new = folder, tool, NewEvents(folder)
        self.kept: dict[str, Any] = self._read().get(tool, {})

    def _read(self) -> dict[str, Any]:
        return self.folder.read_json(KEPT) if (self.folder.path / KEPT).exists() else {}

    def keep(self, **values: Any) -> None:
        self.kept |= values
        self.folder.write_json(KEPT, {**self._read(), self.tool: self.kept})

    def after(self, event: Event) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Yield each new round with its points, and keep that it was taken."""
        rounds: dict[int, dict[str, float]] = {}
        for tag, value, number in (point for each in self.new.after(event) for point in points(each)):
            if number > self.kept.get("round", -1) or isinstance(event, Finished):
                rounds.setdefault(number, {})[tag] = value
        for number, values in sorted(rounds.items()):
            yield number, values
            self.keep(round=number)


class MLflow:
    """A run of MLflow, in the experiment named after the config. `where` is a database, or the address of a server."""

    def __init__(self, folder: RunFolder, where: str) -> None:
        for key, value in PATIENCE.items():
            os.environ.setdefault(key, value)
        self.entities, self.folder = load_module("mlflow.entities", ""), folder
        self.client, self.new = load_package("mlflow").MlflowClient(tracking_uri=where), NewPoints(folder, "mlflow")

    def event(self, event: Event) -> None:
        if isinstance(event, Started):
            self._open()
        for number, values in self.new.after(event):
            now, metric = int(1000 * time.time()), self.entities.Metric
            self._log("metrics", 1000, [metric(_plain(tag), value, now, number) for tag, value in values.items()])
        if isinstance(event, Finished):
            self.client.set_terminated(self.new.kept["id"])

    def _open(self) -> None:
        if "id" in self.new.kept:
            self.client.update_run(self.new.kept["id"], status="RUNNING")
            return
        config = self.folder.read_config()
        known = self.client.get_experiment_by_name(config.name)
        experiment = known.experiment_id if known else self.client.create_experiment(config.name)
        self.new.keep(id=self.client.create_run(experiment, run_name=self.folder.path.name).info.run_id)
        settings = flat(config.model_dump(mode="json"))
        self._log("params", 100, [self.entities.Param(key, str(value)[:500]) for key, value in settings.items()])

    def _log(self, kind: str, most: int, things: list[Any]) -> None:
        for start in range(0, len(things), most):  # of which MLflow takes so many at once
            self.client.log_batch(self.new.kept["id"], **{kind: things[start : start + most]})


def _plain(tag: str) -> str:
    return re.sub(r"[^\w.\-/ ]", "_", tag)


class WeightsAndBiases:
    """A run of W&B, in RUN/wandb. It stays there until `wandb sync`, unless WANDB_MODE says otherwise."""

    def __init__(self, folder: RunFolder, project: str) -> None:
        self.folder, self.project, self.new = folder, project, NewPoints(folder, "wandb")
        self.package, self.run = load_package("wandb"), None

    def event(self, event: Event) -> None:
        if isinstance(event, Started):
            self._open()
        assert self.run is not None
        for number, values in self.new.after(event):
            self.run.log(dict(values), step=number)
        if isinstance(event, Finished):
            self.run.finish()

    def _open(self) -> None:
        if "id" not in self.new.kept:
            self.new.keep(id=secrets.token_hex(8))
        self.run = self.package.init(
            project=self.project,
            id=self.new.kept["id"],
            resume="allow",
            reinit="finish_previous",  # of an interrupted run in this process
            name=self.folder.path.name,
            dir=str(self.folder.path),
            config=flat(self.folder.read_config().model_dump(mode="json")),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=self.package.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
