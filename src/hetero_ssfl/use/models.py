"""Find and load trained encoders on disk: those of a run folder, or the model of a single node."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, RunError
from ..learning.encoders import build_encoder
from ..plugins import GIVEN, check_trusted
from ..runs.files import load_tensors, read_json
from ..runs.folder import RunFolder, client_name


@dataclass(frozen=True)
class ModelFolder:
    """A folder with encoder.safetensors and card.json, and the run it came from, if available."""

    path: Path
    card: dict[str, Any]
    run: RunFolder | None

    @classmethod
    def read(cls, path: Path, run: RunFolder | None = None) -> "ModelFolder":
        model = cls(path, read_json(path / "card.json", "Restore it from a copy."), run)
        try:
            known = isinstance(model.card["client"], str) and isinstance(model.card["encoder"], str)
            known &= bool(model.shape) and all(isinstance(size, int) and size > 0 for size in model.shape)
        except (KeyError, TypeError):
            known = False
        if not known:
            raise RunError(
                f"'{path / 'card.json'}' does not describe the encoder and its input. "
                "Restore it from a copy, or run again with this version of hetero-ssfl."
            )
        return model

    @property
    def client(self) -> str:
        return str(self.card["client"])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input; (channels, side, side) for images."""
        takes = self.card["input"]
        return tuple(takes["shape"]) if "shape" in takes else (takes["channels"], takes["side"], takes["side"])

    @property
    def takes_images(self) -> bool:
        """Whether the input is square images."""
        return "channels" in self.card["input"] and len(self.shape) == 3 and self.shape[1] == self.shape[2]

    @property
    def takes_files(self) -> bool:
        """Whether the input is square images of 1 or 3 channels, to which any image file can be converted."""
        return self.takes_images and self.shape[0] in (1, 3)

    @property
    def normalisation(self) -> tuple[float, float]:
        """Mean and standard deviation for pixel values from 0 to 1; (0, 1) for other data, which is not normalised."""
        given = self.card["input"]
        return given.get("mean", 0.0), given.get("std", 1.0)

    def load(self, encoder: str | None = None) -> nn.Module:
        """Return the trained encoder in evaluation mode.

        `encoder` describes how to build it if the card does not, or if the card's code is not trusted.
        """
        spec = encoder or self.card["encoder"]
        with torch.random.fork_rng(devices=[]):  # keep the random state: the initial weights are replaced
            try:
                if not encoder:
                    check_trusted(spec, "encoder")
                module, _ = build_encoder(spec, self.shape[0], self.shape[-1], torch.zeros(2, *self.shape))
            except ConfigError as error:
                if encoder:
                    raise
                reason = f"{error} Or name"
                if spec.startswith(f"{GIVEN}:"):
                    name = spec.partition(":")[2]
                    reason = f"{self.client}'s encoder was passed as an object, '{name}', not by a name. Name"
                raise ConfigError(f"{reason} the callable that builds it: --encoder package.module:callable.") from None
        self.fill(module, spec)
        return module.eval()

    def fill(self, module: nn.Module, spec: str) -> None:
        """Load the trained weights into an encoder of the same architecture."""
        weights = load_tensors(self.path / "encoder.safetensors")[0]
        wrong = _first_difference(module.state_dict(), weights)
        if wrong:
            raise ConfigError(
                f"the weights of {self.client} do not fit encoder '{spec}': {wrong}. "
                "Name the callable that builds the trained encoder: --encoder package.module:callable."
            )
        module.load_state_dict(weights)


def _first_difference(expected: dict[str, Tensor], saved: dict[str, Tensor]) -> str:
    for name in sorted(expected.keys() | saved.keys()):
        if name not in saved:
            return f"the file does not have '{name}'"
        if name not in expected:
            return f"the file has '{name}', but the encoder does not"
        if expected[name].shape != saved[name].shape:
            return (
                f"'{name}' is {tuple(expected[name].shape)} in the encoder and {tuple(saved[name].shape)} in the file"
            )
    return ""


def find_model(path: Path, client: str | None) -> ModelFolder:
    """Return the model of one client."""
    if client == "all":
        raise ConfigError("--client all selects several encoders, expected one. Name one client.")
    return find_models(path, client)[0]


def find_models(path: Path, client: str | None) -> list[ModelFolder]:
    """Return the model of one client, by name or number, or of each client for `all`.

    `path` is a run folder or the folder of one model.
    """
    if (path / "card.json").is_file() and not (path / "config.toml").exists():
        model = ModelFolder.read(path)
        if client not in (None, "all", model.client):
            raise ConfigError(f"'{path}' is the model of {model.client}, not of '{client}'. Leave --client out.")
        return [model]
    if not (path / "config.toml").is_file():
        raise RunError(
            f"'{path}' is neither a run folder (it has no config.toml) nor a model folder (it has no card.json). "
            "Check the path."
        )
    run = RunFolder.open(path)
    run.read_json("results.json")  # models are written at the end; the error says how to finish the run
    folders = _model_folders(run)
    if client == "all":
        return [ModelFolder.read(folder, run) for folder in folders.values()]
    if client is None and len(folders) > 1:
        raise ConfigError(f"'{path}' has several clients: {_names(folders)}. Choose one with --client.")
    return [ModelFolder.read(folders[_resolve(client, folders)], run)]


def _model_folders(run: RunFolder) -> dict[str, Path]:
    """Return the folder of each client's model, by name."""
    from ..federation.participants import open_site

    if run.read_facts().elsewhere:
        raise RunError(
            f"'{run.path}' contains no models: the participants keep them on their own machines. There, use the folder "
            f"federations/{run.read_json('facts.json').get('federation', 'ID')}/model in the node's home instead."
        )
    return {client.name: client.model for client in open_site(run).clients(run)}


def _resolve(client: str | None, folders: dict[str, Path]) -> str:
    names = list(folders)
    if client is None:
        return names[0]
    if client in folders:
        return client
    if client.isdecimal():
        numbered = client_name(int(client))
        if numbered in folders:
            return numbered
        if int(client) < len(names) and "client-000" not in folders:
            return names[int(client)]
    raise ConfigError(f"there is no client '{client}', expected one of {_names(folders)}, or its number.")


def _names(folders: dict[str, Path]) -> str:
    names = list(folders)
    return ", ".join(names if len(names) <= 12 else [*names[:5], "...", names[-1]])
