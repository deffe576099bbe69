"""Trained encoders on disk: those of a run folder, or the one that a node of a federation keeps for itself."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, RunError
from ..models import build_encoder
from ..plugins import GIVEN, check_trusted
from ..runs import RunFolder, load_tensors


@dataclass(frozen=True)
class ModelFolder:
    """encoder.safetensors and card.json, and the run they came from where that is at hand."""

    path: Path
    card: dict[str, Any]
    run: RunFolder | None

    @classmethod
    def read(cls, path: Path, run: RunFolder | None = None) -> "ModelFolder":
        try:
            card = json.loads((path / "card.json").read_text())
            shape = _shape(card["input"])
            known = isinstance(card["client"], str) and isinstance(card["encoder"], str)
        except OSError as error:
            raise RunError(
                f"the model in '{path}' has no readable card.json ({error.strerror}). Restore it from a copy."
            ) from None
        except (ValueError, KeyError, TypeError):
            shape, known = (), False
        if not known or not shape or not all(isinstance(size, int) and size > 0 for size in shape):
            raise RunError(
                f"'{path / 'card.json'}' does not say which encoder it is and what it takes. "
                "Restore it from a copy, or run again with this version of hetero-ssfl."
            )
        return cls(path, card, run)

    @property
    def client(self) -> str:
        return str(self.card["client"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input: (channels, side, side) of an image."""
        return _shape(self.card["input"])

    @property
    def takes_images(self) -> bool:
        """Square ones, which is what any image can be made into."""
        return "channels" in self.card["input"] and len(self.shape) == 3 and self.shape[1] == self.shape[2]

    @property
    def normalisation(self) -> tuple[float, float]:
        """Mean and deviation by which pixel values from 0 to 1 are normalised; other data goes in as it is."""
        given = self.card["input"]
        return given.get("mean", 0.0), given.get("std", 1.0)

    def load(self, encoder: str | None = None) -> nn.Module:
        """The trained encoder, ready to use; built from `encoder` where the card cannot say how, or is not trusted."""
        spec = encoder or self.card["encoder"]
        with torch.random.fork_rng(devices=[]):  # its random first weights are nobody's business
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
                    reason = f"{self.client}'s encoder was handed over as an object, '{name}', not by a name. Name"
                raise ConfigError(f"{reason} what builds it: --encoder package.module:callable.") from None
        self.fill(module, spec)
        return module.eval()

    def fill(self, module: nn.Module, spec: str) -> None:
        """Put the trained weights into an encoder of the same architecture."""
        weights = load_tensors(self.path / "encoder.safetensors")[0]
        wrong = _first_difference(module.state_dict(), weights)
        if wrong:
            raise ConfigError(
                f"the weights of {self.client} do not fit encoder '{spec}': {wrong}. "
                "Name what builds the encoder that was trained: --encoder package.module:callable."
            )
        module.load_state_dict(weights)


def _shape(takes: dict[str, Any]) -> tuple[int, ...]:
    return tuple(takes["shape"]) if "shape" in takes else (takes["channels"], takes["side"], takes["side"])


def _first_difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"it has '{name}', which the file lacks"
        if name not in expected:
            return f"the file has '{name}', which it lacks"
        if expected[name].shape != found[name].shape:
            return f"'{name}' is {tuple(expected[name].shape)} in it and {tuple(found[name].shape)} in the file"
    return ""


def find_model(path: Path, client: str | None) -> ModelFolder:
    """One client's model."""
    if client == "all":
        raise ConfigError("--client all means several encoders, expected one. Name it.")
    return find_models(path, client)[0]


def find_models(path: Path, client: str | None) -> list[ModelFolder]:
    """The model of one client, by name or number; of each for `all`. `path` is a run folder, or a model's own."""
    if (path / "card.json").is_file() and not (path / "config.toml").exists():
        model = ModelFolder.read(path)
        if client not in (None, "all", model.client):
            raise ConfigError(f"'{path}' is the model of {model.client} alone, not of '{client}'. Leave --client out.")
        return [model]
    if not (path / "config.toml").is_file():
        raise RunError(
            f"'{path}' is neither a run folder (it has no config.toml) nor a model's folder (no card.json). "
            "Check the path."
        )
    run = RunFolder.open(path)
    run.read_json("results.json")  # models are written at the end; says how to get there
    folders = _model_folders(run)
    if client == "all":
        return [ModelFolder.read(folder, run) for folder in folders.values()]
    if client is None and len(folders) > 1:
        raise ConfigError(f"'{path}' has several clients: {_names(folders)}. Choose one with --client.")
    return [ModelFolder.read(folders[_resolve(client, folders)], run)]


def _model_folders(run: RunFolder) -> dict[str, Path]:
    """Where each client's model lies, by name."""
    from ..federation.sites import open_site

    found = open_site(run).model_folders(run)
    if not found:
        raise RunError(
            f"'{run.path}' holds no models: the participants keep them on their own machines. There, name the folder "
            f"federations/{run.read_json('facts.json').get('federation', 'ID')}/model under the node's home instead."
        )
    return found


def _resolve(client: str | None, folders: dict[str, Path]) -> str:
    names = list(folders)
    if client is None:
        return names[0]
    if client in folders:
        return client
    if client.isdecimal():
        numbered = f"client-{int(client):03d}"
        if numbered in folders:
            return numbered
        if int(client) < len(names) and "client-000" not in folders:
            return names[int(client)]
    raise ConfigError(f"there is no client '{client}', expected one of {_names(folders)}, or its number.")


def _names(folders: dict[str, Path]) -> str:
    names = list(folders)
    return ", ".join(names if len(names) <= 12 else [*names[:5], "...", names[-1]])
