"""Clients on this machine: rows of one data set, or data and encoders that a program passed (python_data.py)."""

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...config import Config
from ...data import Images, load_images, load_rad, split_training_images, take_snapshot, what_changed
from ...data.sources import locate
from ...errors import DataError
from ...runs.files import load_tensors
from ...runs.folder import SOURCES, RunFolder, SiteKind, client_name
from .participant import Participant
from .python_data import PassedData, ReopenedData
from .site import ClientInfo, NodeConfig, Setup, check_parts, facts_of


class LocalSite:
    def __init__(self, passed: PassedData | None = None) -> None:
        self.passed = passed
        self.kind: SiteKind = "python" if passed else "simulated"
        self._splits: dict[Path, SplitData] = {}

    def data(self, folder: RunFolder) -> "SplitData | PassedData":
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
        if isinstance(data, ReopenedData):
            data.check_objects()
        return [{"name": name, "number": k, "run-dir": run_dir} for k, name in enumerate(data.names)]

    def participant(self, folder: RunFolder, number: int, config: Config) -> Participant:
        data = self.data(folder)
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


# --- a split of one data set: each client has the rows that the run folder lists ---


def split_data_set(config: Config) -> Setup:
    """Split the images of a new run, and try every model once."""
    train, test = load_images(config.data, "train"), load_images(config.data, "test")
    split = split_training_images(config, train)
    rad = load_rad(config, train, split)
    rows = {client_name(k): own for k, own in enumerate(split.clients)}
    labels = {name: None if train.labels is None else train.labels[own] for name, own in rows.items()}
    check_parts(config, rad, {name: config.model_of(k) for k, name in enumerate(rows)}, labels)
    checksums = {"train": train.checksum, "test": test.checksum}
    skipped = train.skipped + test.skipped
    facts = {**facts_of(train.classes, len(skipped), labels), "checksums": checksums}
    tensors = {"split": {"validation": split.validation, "rad": split.rad, **rows}}
    return Setup(rad, facts, tensors, skipped, take_snapshot(config.data.source))


class SplitData:
    """The data of all clients of a run. Images are read when they are needed, and must be those of its beginning."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def difference(self, folder: RunFolder) -> None:
        """Raise DataError if the images have changed. The config determines all else."""
        _check_present(folder)
        if changed := data_changes(folder):
            raise _changed(folder, changed)

    @cached_property
    def names(self) -> list[str]:
        return [client_name(k) for k in range(self.folder.read_config().clients.count)]

    @cached_property
    def train(self) -> Images:
        return self._images("train")

    def _images(self, split: Literal["train", "test"]) -> Images:
        """Load a split. The run knows its images by row number, so they must be those that it began with."""
        _check_present(self.folder)
        images = load_images(self.folder.read_config().data, split)
        recorded = self.folder.read_facts().checksums.get(split)
        if recorded and images.checksum and images.checksum != recorded:
            raise _changed(self.folder, data_changes(self.folder) or "other contents")
        return images

    @cached_property
    def classes(self) -> int:
        """The number of classes, from the facts: reading it from the data would need the data."""
        return len(self.folder.read_facts().classes)

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        return load_tensors(self.folder.path / "split.safetensors")[0]

    @cached_property
    def rad(self) -> Tensor:
        return self.folder.rad()[0]

    def own(self, name: str) -> Images:
        return self.train.subset(self._rows(name))

    @property
    def pool(self) -> Images:
        """The training images of all clients, which probes are trained on."""
        return self.train.subset(torch.cat([self._rows(name) for name in self.names]).unique())

    def held_out(self, split: str) -> Images:
        return self._images("test") if split == "test" else self.train.subset(self._rows("validation"))

    def _rows(self, name: str) -> Tensor:
        """Return the rows of a client, or of the validation set."""
        rows, count = self.rows.get(name), len(self.train)
        if rows is None or rows.dtype != torch.int64 or not bool(((rows >= 0) & (rows < count)).all()):
            listed = f"the split in '{self.folder.path}' lists rows of {name} that are missing or out of range"
            raise DataError(f"{listed}: there are {count} training images. Restore the data of the run.")
        return rows


def data_changes(folder: RunFolder) -> str | None:
    """Describe how the files of a run's data have changed since it began; None if they have not."""
    if not (folder.path / SOURCES).exists():  # the data have no files
        return None
    return what_changed(folder.read_config().data.source, folder.read_json(SOURCES)["data"])


def _check_present(folder: RunFolder) -> None:
    """Raise DataError if the data of a run were files, and these are not there any more."""
    source = folder.read_config().data.source
    with suppress(DataError):
        if not (folder.path / SOURCES).exists() or isinstance(locate(source), Path):
            return
    began = f"the images of the run in '{folder.path}' are not at '{source}' any more"
    raise DataError(f"{began}. Move them back, or call this from the folder where the run began; {_others(folder)}")


def _changed(folder: RunFolder, how: str) -> DataError:
    changed = f"the images of '{folder.read_config().data.source}' have changed since the run in '{folder.path}' began"
    return DataError(f"{changed}: {how}. Restore them, or start a new run; {_others(folder)}")


def _others(folder: RunFolder) -> str:
    return f"hetero-ssfl evaluate {folder.path} --images SOURCE tests on other images."
