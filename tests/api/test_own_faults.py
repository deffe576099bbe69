"""Errors in the user's own code: shown with file and line, once, on the screen and in the run folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from helpers.pieces import Net, net
from hetero_ssfl import Client, Run, federate
from hetero_ssfl.data import Images
from hetero_ssfl.errors import ConfigError, RunError
from hetero_ssfl.runs.events import Event, Warned


class Failing(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("this encoder fails")
        return super().forward(x)


LINE = Failing.forward.__code__.co_firstlineno + 2


class NotANumber(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (0 if self.training else 1)


def failing_views(batch: Tensor, rng: Generator) -> Tensor:
    return batch * (torch.nan if len(batch) > 2 else 1)  # the dry run has two samples


def failing_loss(learner: Any, views: list[Tensor]) -> tuple[Tensor, Tensor]:
    raise KeyError("this loss fails")


def train(digits: Images, path: Path, encoders: list[Any], **more: Any) -> tuple[str, list[str]]:
    """Return the error that ends the run, and its warnings."""
    warnings: list[str] = []

    def listen(event: Event) -> None:
        warnings.extend([event.text] if isinstance(event, Warned) else [])

    clients = [Client(digits.pixels[20 * k : 20 * k + 20], encoder) for k, encoder in enumerate(encoders)]
    settings = {"local_epochs": 1, "engine.workers": 1, **more.pop("settings", {})}
    with pytest.raises(RunError) as ended:
        federate(clients, 8, config="smoke", run_dir=path, settings=settings, progress=listen, rounds=2, **more)
    return str(ended.value), warnings


def test_the_place_in_an_encoder_is_shown_once(digits: Images, tmp_path: Path) -> None:
    error, warnings = train(digits, tmp_path / "run", [Failing(), Failing()])
    assert f"ValueError: this encoder fails ({__file__}, line {LINE}, in forward)" in error
    (shown,) = [text for text in warnings if "your code failed:" in text]
    assert f'File "{__file__}", line {LINE}, in forward\n    raise ValueError("this encoder fails")' in shown
    assert shown in (tmp_path / "run" / "faults.log").read_text()
    assert sum("client-001 failed: ValueError: this encoder fails" in text for text in warnings) == 1


def test_the_place_in_a_loss_is_shown(digits: Images, tmp_path: Path) -> None:
    error, warnings = train(digits, tmp_path / "run", [net()], loss=failing_loss)
    assert f"KeyError: 'this loss fails' ({__file__}" in error
    assert any("in failing_loss" in text for text in warnings)


def test_the_place_is_shown_when_the_encoder_fails_before_the_run(digits: Images, tmp_path: Path) -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("never works")

    with pytest.raises(ConfigError, match=rf"never works \({__file__}, line \d+, in forward\)"):
        federate([Client(digits.pixels[:20], Broken())], 8, config="smoke", run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"encoders": [NotANumber()]}, "the encoder of client-000 returned nan or inf for 12 of 12 samples in round 1"),
        (
            {"encoders": [net()], "views": failing_views},
            "the views of client-000 ('test_own_faults:failing_views') have values",
        ),
    ],
)
def test_a_nan_is_called_by_its_origin(digits: Images, tmp_path: Path, parts: dict[str, Any], sentence: str) -> None:
    error, _ = train(digits, tmp_path / "run", **parts)
    assert sentence in error
    assert "the loss diverged" not in error


def test_an_encoder_that_always_gives_nan_is_refused_at_once(digits: Images, tmp_path: Path) -> None:
    class Never(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.nan

    with pytest.raises(ConfigError, match="returns nan or inf for finite inputs"):
        federate([Client(digits.pixels[:20], Never())], 8, config="smoke", run_dir=tmp_path / "run")


def test_a_diverged_run_continues_with_other_settings(digits: Images, tmp_path: Path) -> None:
    path, given = tmp_path / "run", [net()]
    steps = {"optim.schedule": "constant", "optim.momentum": 0.0, "optim.batch": 4}
    error, _ = train(digits, path, given, settings={**steps, "optim.lr": 1e30})
    assert "the loss diverged: client-000 failed" in error
    assert f"federate(..., run_dir='{path}', settings={{'optim.lr': 1e+29}}, more=True)" in error
    settings = {"local_epochs": 1, "engine.workers": 1, **steps, "optim.lr": 0.01}
    clients = [Client(digits.pixels[:20], given[0])]
    run: Run = federate(
        clients, 8, config="smoke", run_dir=path, settings=settings, rounds=2, more=True, progress=False
    )
    assert run.folder.finished
    ((after, before),) = run.folder.read_earlier()
    assert (after, before.optim.lr) == (0, 1e30)
    assert "Its settings changed after round 0: optim.lr = 0.01." in run.report(tmp_path / "r.html").read_text()
    assert run.config.optim.lr == 0.01
