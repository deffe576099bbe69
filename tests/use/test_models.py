"""Trained encoders are found for each kind of run."""

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.federations import ENCODERS, write_federation
from hetero_ssfl import Client, federate
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.start import start
from hetero_ssfl.use.export import _run_torch_export, convert, export
from hetero_ssfl.use.models import find_model, find_models


def test_models_of_nodes_are_found_in_their_homes(tmp_path: Path) -> None:
    federation, nodes = write_federation(tmp_path)
    config = load_config(str(federation), ["rounds=1", "evaluation.untrained=false"])
    start(config, tmp_path / "run", lambda _: None, nodes)
    models = find_models(tmp_path / "run", "all")
    assert [model.client for model in models] == ["node-0", "node-1", "node-2"]
    assert [model.card["encoder"] for model in models] == list(ENCODERS)
    second = find_model(tmp_path / "run", "1")
    assert second.path.is_relative_to(tmp_path / "node-1")
    assert second.load()(torch.zeros(2, 1, 8, 8)).shape[0] == 2


def series(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 20, generator=torch.Generator().manual_seed(count))


def noisy(batch: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return batch + 0.1 * torch.randn(batch.shape, generator=rng)


def network(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, width, 5), nn.BatchNorm1d(width), nn.ReLU(), nn.Flatten())


def test_models_of_clients_passed_from_python_are_found_by_position(tmp_path: Path) -> None:
    """Uses sensor data instead of images, with an encoder that another process cannot build."""
    clients = [Client(series(20), network(), name="zeta"), Client(series(24), network(6), name="alpha")]
    settings = {"local_epochs": 1, "optim.batch": 8, "alignment.rad_batch": 8}
    run = federate(
        clients, series(16), rounds=1, run_dir=tmp_path / "run", views=noisy, settings=settings, progress=False
    )
    model = find_model(tmp_path / "run", "0")
    assert model.client == "zeta"
    trained = run.encoder(0).eval()
    x = series(5)
    by_name = model.load(f"{__name__}:network")
    torch.testing.assert_close(_run_torch_export(convert(model, by_name, "torch-export"))(x), trained(x))
    with pytest.raises(ConfigError, match=r"zeta's encoder was passed as an object.*--encoder"):
        model.load()
    torch.testing.assert_close(model.load(f"{__name__}:network")(x), trained(x))
    text = export(model, "safetensors", tmp_path / "out").with_name("README.md").read_text()
    assert "Inputs are float32 of shape (n, 3, 20)." in text
    assert "values from 0 to 1" not in text
