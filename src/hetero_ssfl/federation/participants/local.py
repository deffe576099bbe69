"""Clients on this machine, whether they are rows of one data set or data and encoders that a program passed."""

from pathlib import Path

from ...config import Config
from ...runs.folder import RunFolder, SiteKind
from .participant import Participant
from .python_data import PassedData
from .site import ClientInfo, NodeConfig, Request, Setup
from .split import SplitData, split_data_set


class LocalSite:
    def __init__(self, passed: PassedData | None = None) -> None:
        self.passed = passed
        self.kind: SiteKind = "python" if passed else "simulated"
        self._splits: dict[Path, SplitData] = {}

    def data(self, folder: RunFolder) -> SplitData | PassedData:
        """Return the data of a run's clients. A data set is read once per process."""
        return self.passed or self._splits.setdefault(folder.path, SplitData(folder))

    def set_up(self, config: Config) -> Setup:
        return self.passed.set_up(config) if self.passed else split_data_set(config)

    def difference(self, folder: RunFolder) -> str | None:
        return self.data(folder).difference(folder)

    def clients(self, folder: RunFolder) -> list[ClientInfo]:
        config, models = folder.read_config(), folder.path / "models"
        names = self.data(folder).names
        return [ClientInfo(name, config.model_of(k).encoder, models / name) for k, name in enumerate(names)]

    def nodes(self, folder: RunFolder) -> list[NodeConfig]:
        data, run_dir = self.data(folder), str(folder.path.resolve())
        data.check_objects()
        return [{"name": name, "number": k, "run-dir": run_dir} for k, name in enumerate(data.names)]

    def participant(self, folder: RunFolder, number: int, request: Request) -> Participant:
        data, config = self.data(folder), request.config
        name = data.names[number]
        return Participant(
            name=name,
            config=config,
            model=config.model_of(number),
            seed_scope=("init", number),
            rad=data.rad,
            own=lambda: data.own(name),
            states=folder.states(name),
            exports=folder.path / "models" / name,
            labeled=lambda: data.pool,
            held_out=data.held_out,
            known_classes=data.classes,
        )
