"""Participants simulated on one machine: each has some rows of one data set, as listed in the run folder's split."""

from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import torch
from flwr.app import Message
from torch import Tensor

from ...config import Config
from ...data import Images, load_images, load_rad, split_training_images, take_snapshot, what_changed
from ...data.sources import locate
from ...errors import ConfigError, DataError
from ...learning.learner import build_learner
from ...methods import method_class
from ...runs.files import load_tensors
from ...runs.folder import SOURCES, RunFolder, SiteKind, client_name
from ..wire import Header
from .participant import Participant
from .site import NodeConfig, RadShape, Setup, check_device, load_rad_of, try_own_functions


class SimulatedSite:
    kind: ClassVar[SiteKind] = "simulated"
    may_be_away: ClassVar[bool] = False
    only_this_process: ClassVar[bool] = False
    runs_on_ray: ClassVar[bool] = True

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    # --- before the run ---

    def set_up(self, config: Config) -> Setup:
        """Split the images and try every model once."""
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
        facts: dict[str, object] = {
            "classes": train.classes,
            "skipped_images": train.skipped + test.skipped,
        }
        if train.labels is not None:
            facts["holdings"] = {
                name: torch.bincount(train.labels[own], minlength=len(train.classes)).tolist()
                for name, own in rows.items()
            }
        facts["checksums"] = {"train": train.checksum, "test": test.checksum}
        files = take_snapshot(config.data.source)
        return Setup(rad, facts, {"validation": split.validation, "rad": split.rad, **rows}, files=files)

    def difference(self, folder: RunFolder) -> str | None:
        """Return None: the config determines the participants. Raise DataError if their images have changed."""
        _check_present(folder)
        changed = data_changes(folder)
        if changed:
            raise _changed(folder, changed)
        return None

    # --- who takes part ---

    def names(self, config: Config) -> list[str]:
        return [client_name(k) for k in range(config.clients.count)]

    def node_configs(self, config: Config) -> list[NodeConfig]:
        run_dir = str(self.folder.path.resolve())
        return [{"name": name, "number": k, "run-dir": run_dir} for k, name in enumerate(self.names(config))]

    def admit(self, number: int, message: Message) -> None:
        pass

    def encoder(self, number: int, config: Config) -> str:
        return config.model_of(number).encoder

    def participant(
        self, number: int, config: Config, header: Header, rad_shape: RadShape = None, rad_sent: Tensor | None = None
    ) -> Participant:
        name = client_name(number)
        return Participant(
            name=name,
            config=config,
            model=config.model_of(number),
            seed_scope=("init", number),
            rad=self.rad,
            own=lambda: self.train.subset(self._rows(name)),
            states=self.folder.states(name),
            exports=self.folder.path / "models" / name,
            labeled=self.pool,
            held_out=self.held_out,
            known_classes=self.classes,
        )

    def model_folders(self, folder: RunFolder) -> dict[str, Path]:
        return {name: folder.path / "models" / name for name in self.names(folder.read_config())}

    # --- the data they hold together, read once per process ---

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
        found = self.folder.read_json("facts.json").get("classes")
        return None if found is None else len(found)

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        return load_tensors(self.folder.path / "split.safetensors")[0]

    @cached_property
    def rad(self) -> Tensor:
        return load_rad_of(self.folder)

    def pool(self) -> Images:
        """Return the training images of all clients, which probes are trained on."""
        rows = [self._rows(name) for name in self.rows if name not in ("validation", "rad")]
        return self.train.subset(torch.cat(rows).unique())

    def held_out(self, split: str) -> Images:
        if split == "test":
            return self._images("test")
        return self.train.subset(self._rows("validation"))

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
        f"the images of '{folder.read_config().data.source}' have changed since the run in '{folder.path}' began: "
        f"{how}. "
        f"Restore them, or start a new run; hetero-ssfl evaluate {folder.path} --images SOURCE tests on other images."
    )
