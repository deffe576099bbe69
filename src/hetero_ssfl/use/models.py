"""Find and load trained encoders on disk: those of a run folder, or the model of a single node."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, RunError
from ..learning.encoders import build_encoder
from ..plugins import GIVEN, check_trusted
from ..runs.files import load_tensors, read_json
from ..runs.folder import RunFolder, client_name

NAME_IT = "--encoder package.module:callable"


@dataclass(frozen=True)
class ModelFolder:
    """A folder with encoder.safetensors and card.json, and the run it came from, if available."""

    path: Path
    card: dict[str, Any]
    run: RunFolder | None

    @classmethod
    def read(cls, path: Path, run: RunFolder | None = None) -> "ModelFolder":
        model = cls(path, read_json(path / "card.json", "Restore it from a copy."), run)
        with suppress(KeyError, TypeError):
            names = isinstance(model.card["client"], str) and isinstance(model.card["encoder"], str)
            if names and model.shape and all(isinstance(size, int) and size > 0 for size in model.shape):
                return model
        raise RunError(f"'{path / 'card.json'}' does not describe an encoder and its input. Restore it from a copy.")

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
    def normalisation(self) -> tuple[float, float]:
        """Mean and standard deviation for pixel values from 0 to 1; (0, 1) for other data, which is not normalised."""
        given = self.card["input"]
        return given.get("mean", 0.0), given.get("std", 1.0)

    def load(self, encoder: str | None = None) -> nn.Module:
        """Return the trained encoder in evaluation mode; built by `encoder` if the card's own code cannot be used."""
        spec = encoder or self.card["encoder"]
        with torch.random.fork_rng(devices=[]):  # keep the random state: the initial weights are replaced
            try:
                if not encoder:
                    check_trusted(spec, "encoder")
                if spec.startswith("timm:"):  # its trained weights are replaced, and need not be here
                    spec = re.sub(r"pretrained\s*=\s*True", "pretrained=False", spec)
                module, _ = build_encoder(spec, self.shape[0], self.shape[-1], torch.zeros(2, *self.shape))
            except ConfigError as error:
                if encoder:
                    raise
                source, _, name = spec.partition(":")
                passed = f"{self.client}'s encoder was passed as an object, '{name}', not by a name."
                reason = passed if source == GIVEN else str(error)
                raise ConfigError(f"{reason} Name the code that builds it: {NAME_IT}.") from None
        try:
            module.load_state_dict(load_tensors(self.path / "encoder.safetensors")[0])
        except RuntimeError as error:
            first = " ".join(str(error).splitlines()[1].split())
            what = f"the weights of {self.client} do not fit encoder '{spec}': {first}"
            raise ConfigError(f"{what} Name the code that built it: {NAME_IT}.") from None
        return module.eval()


def find_model(path: Path, client: str | None) -> ModelFolder:
    """Return the model of one client."""
    if client == "all":
        raise ConfigError("--client all selects several encoders, expected one. Name one client.")
    return find_models(path, client)[0]


def find_models(path: Path, client: str | None) -> list[ModelFolder]:
    """Return the model of one client, by name or number, or of each client for `all`, in a run or model folder."""
    if (path / "card.json").is_file() and not (path / "config.toml").exists():
        model = ModelFolder.read(path)
        if client not in (None, "all", model.client):
            raise ConfigError(f"'{path}' is the model of {model.client}, not of '{client}'. Leave --client out.")
        return [model]
    if not (path / "config.toml").is_file():
        raise RunError(f"'{path}' is neither a run folder (with config.toml) nor a model folder (with card.json).")
    run = RunFolder.open(path)
    run.read_json("results.json")  # models are written at the end; the error says how to finish the run
    facts = run.read_facts()
    if facts.elsewhere:
        place = f"federations/{facts.federation}/model in its home"
        raise RunError(f"'{path}' contains no models: each participant keeps its own, in {place}. Use it there.")
    from ..federation.participants import open_site  # Flower is needed only here

    folders = {own.name: own.model for own in open_site(run).clients(run)}
    if client == "all":
        return [ModelFolder.read(folders[name], run) for name in sorted(folders)]
    if client is None and len(folders) > 1:
        raise ConfigError(f"'{path}' has several clients: {_names(folders)}. Choose one with --client.")
    return [ModelFolder.read(folders[_resolve(client or next(iter(folders)), folders)], run)]


def _resolve(client: str, folders: dict[str, Path]) -> str:
    if client in folders:
        return client
    if client.isdecimal():
        if client_name(int(client)) in folders:
            return client_name(int(client))
        if int(client) < len(folders) and "client-000" not in folders:
            return list(folders)[int(client)]
    raise ConfigError(f"there is no client '{client}', expected one of {_names(folders)}, or its number.")


def _names(folders: dict[str, Path]) -> str:
    names = list(folders)
    return ", ".join(names if len(names) <= 12 else [*names[:5], "...", names[-1]])
