"""A split of one data set: each client has some of its rows, as listed in the run folder's split."""

from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...config import Config
from ...data import Images, load_images, load_rad, split_training_images, take_snapshot, what_changed
from ...data.sources import locate
from ...errors import ConfigError, DataError
from ...learning.learner import build_learner
from ...methods import method_class
from ...runs.files import load_tensors
from ...runs.folder import SOURCES, RunFolder, client_name
from .site import Setup, check_device, holdings, load_rad_of, try_own_functions


def split_data_set(config: Config) -> Setup:
    """Split the images of a new run, and try every model once."""
    train, test = load_images(config.data, "train"), load_images(config.data, "test")
    split = split_training_images(config, train)
    rad = load_rad(config, train, split)
    check_device(config.engine.device)
    if method_class(config.method).needs_labels and train.labels is None:
        raise ConfigError(
            f"method '{config.method}' needs labels, but '{config.data.source}' has none. Choose another method."
        )
    for model in {config.model_of(k) for k in range(config.clients.count)}:
        build_learner(model, config.ssl, *train.pixels.shape[1:3], config.seed)
    try_own_functions(config, rad)
    rows = {client_name(k): own for k, own in enumerate(split.clients)}
    facts: dict[str, object] = {"classes": train.classes, "skipped_images": train.skipped + test.skipped}
    if train.labels is not None:
        labels = train.labels
        facts["holdings"] = holdings({name: labels[own] for name, own in rows.items()}, len(train.classes))
    facts["checksums"] = {"train": train.checksum, "test": test.checksum}
    files = take_snapshot(config.data.source)
    return Setup(rad, facts, {"validation": split.validation, "rad": split.rad, **rows}, files=files)


class SplitData:
    """The data of all clients of a run. Images are read when they are needed, and must be those of its beginning."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def difference(self, folder: RunFolder) -> None:
        """Raise DataError if the images have changed. The config determines all else."""
        _check_present(folder)
        changed = data_changes(folder)
        if changed:
            raise _changed(folder, changed)

    def check_objects(self) -> None:
        """Return: these clients need no objects of a program."""

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
        recorded = self.folder.read_json("facts.json").get("checksums", {}).get(split)
        if recorded and images.checksum and images.checksum != recorded:
            raise _changed(self.folder, data_changes(self.folder) or "other contents")
        return images

    @cached_property
    def classes(self) -> int | None:
        """The number of classes, from the facts: reading it from the data would need the data."""
        classes = self.folder.read_json("facts.json").get("classes")
        return None if classes is None else len(classes)

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        return load_tensors(self.folder.path / "split.safetensors")[0]

    @cached_property
    def rad(self) -> Tensor:
        return load_rad_of(self.folder)

    def own(self, name: str) -> Images:
        """Return the training images of a client."""
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
            raise DataError(
                f"the split in '{self.folder.path}' lists rows of {name} that are missing or out of range: "
                f"'{self.folder.read_config().data.source}' has {count} training images. Restore the data of the run."
            )
        return rows


def data_changes(folder: RunFolder) -> str | None:
    """Describe how the files of a run's data have changed since it began; None if they have not."""
    if not (folder.path / SOURCES).exists():  # the data have no files
        return None
    return what_changed(folder.read_config().data.source, folder.read_json(SOURCES)["data"])


def _check_present(folder: RunFolder) -> None:
    """Raise DataError if the data of a run were files, and these are not there any more."""
    source = folder.read_config().data.source
    try:
        present = not (folder.path / SOURCES).exists() or isinstance(locate(source), Path)
    except DataError:
        present = False
    if not present:
        raise DataError(
            f"the images of the run in '{folder.path}' are not at '{source}' any more. Move them back, or call this "
            f"from the folder where the run began; hetero-ssfl evaluate {folder.path} --images SOURCE tests on others."
        )


def _changed(folder: RunFolder, how: str) -> DataError:
    return DataError(
        f"the images of '{folder.read_config().data.source}' have changed since the run in "
        f"'{folder.path}' began: {how}. "
        f"Restore them, or start a new run; hetero-ssfl evaluate {folder.path} --images SOURCE tests on other images."
    )
