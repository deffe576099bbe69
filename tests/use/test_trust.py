"""Code named in a model or run folder is imported only if the user has trained with it or trusts it explicitly."""

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ssfl import plugins
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.start import start
from hetero_ssfl.plugins import check_trusted, is_trusted, remember
from hetero_ssfl.report.page import render
from hetero_ssfl.runs.files import read_text, save_tensors, write_json, write_text
from hetero_ssfl.use.encoders import read_rad_features
from hetero_ssfl.use.models import find_model

Call = Callable[..., tuple[int, str, str]]
NET = """
from pathlib import Path
from torch import nn
Path({trace!r}).touch()

class Net(nn.Sequential):
    def __init__(self, in_channels, width=4):
        super().__init__(nn.Conv2d(in_channels, width, 5, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten())
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file that exists after foreign code has run."""
    return tmp_path / "trace"


@pytest.fixture
def module(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module on the path that creates the trace file when it is imported."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "code" / "nets_of_mine.py"
    file.parent.mkdir()
    file.write_text(NET.format(trace=str(trace)))
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "nets_of_mine", raising=False)
    return file


def new_process(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    monkeypatch.setattr(plugins, "_used", set())
    monkeypatch.delitem(sys.modules, "nets_of_mine", raising=False)
    importlib.invalidate_caches()
    trace.unlink(missing_ok=True)


def model_of(folder: Path, encoder: str) -> Path:
    """Write a model folder that could come from another person."""
    card = {"client": "clinic", "encoder": encoder, "input": {"shape": [1, 16, 16], "channels": 1, "side": 16}}
    save_tensors(folder / "encoder.safetensors", {}, card)
    write_json(folder / "card.json", card)
    return folder


@pytest.mark.parametrize("encoder", ["subprocess:getoutput(cmd='touch {trace}')", "nets_of_mine:Net"])
@pytest.mark.parametrize(
    "command",
    [
        ["embed", "model", "--images", "digits", "-o", "f.npy"],
        ["export", "model", "--to", "torch-export", "-o", "out"],
        ["neighbours", "model", "--images", "digits", "-o", "a.html"],
    ],
)
def test_a_card_from_another_machine_runs_no_code(
    command: list[str],
    encoder: str,
    module: Path,
    trace: Path,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model_of(tmp_path / "model", encoder.format(trace=trace))
    code, _, said = call(*command)
    assert not trace.exists()
    assert code == 2
    assert "is code that you have not trained with on this machine" in said
    assert "--encoder package.module:callable" in said
    assert len(said.strip().splitlines()) == 1


def test_weights_are_exported_without_importing_the_class(
    module: Path, trace: Path, tmp_path: Path, call: Call
) -> None:
    model = model_of(tmp_path / "model", "nets_of_mine:Net(width=3)")
    assert call("export", model, "-o", tmp_path / "out")[0] == 0
    assert not trace.exists()
    assert "encoder = Net(width=3)" in (tmp_path / "out" / "README.md").read_text()
    assert call("export", model, "-o", tmp_path / "said", "--encoder", "nets_of_mine:Net(width=3)")[0] == 0
    assert "encoder = Net(in_channels=1, width=3)" in (tmp_path / "said" / "README.md").read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('encoder = "resnet8(width=8)"', "encoder = \"subprocess:getoutput(cmd='touch {trace}')\""),
        ('method = "hetero-ssfl"', 'method = "nets_of_mine:Net"'),
    ],
)
def test_a_run_from_another_machine_runs_no_code(
    old: str, new: str, run: Path, module: Path, trace: Path, tmp_path: Path, call: Call
) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    text = read_text(config)
    assert old in text
    write_text(config, text.replace(old, new.format(trace=trace)))  # a stranger also writes the digest
    assert "is code that you have not trained with" in render([tmp_path / "run"], read_rad_features)
    code, _, said = call("evaluate", tmp_path / "run")
    assert code == 2
    assert "If you trust it, set HETERO_SSFL_TRUST=" in said
    assert not trace.exists()


@pytest.mark.parametrize(
    ("setting", "old"),
    [
        ("ssl.kind", 'kind = "byol"'),
        ("optim.kind", 'kind = "sgd"'),
        ("views.function", "count = 2"),
        ("alignment.kernel", 'kernel = "linear"'),
        ("method", 'method = "hetero-ssfl"'),
    ],
)
@pytest.mark.parametrize("command", ["theory", "audit"])
def test_commands_that_train_import_no_code_of_a_run_from_another_machine(
    command: str, setting: str, old: str, run: Path, module: Path, trace: Path, tmp_path: Path, call: Call
) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    text = read_text(config)
    assert text.count(old) == 1
    new = f'{setting.rpartition(".")[2]} = "nets_of_mine:Net"'
    write_text(config, text.replace(old, new))
    code, _, said = call(command, tmp_path / "run")
    assert code == 2
    assert f"{setting} = 'nets_of_mine:Net' is code that you have not trained with" in said.replace("\n", " ")
    assert not trace.exists()


def test_a_run_runs_no_code_from_node_settings(
    run: Path, trace: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    node = tmp_path / "run" / "node.toml"
    node.write_text(f"name = 'a'\nencoder = \"subprocess:getoutput(cmd='touch {trace}')\"\n[data]\nsource = 'digits'\n")
    write_json(
        tmp_path / "run" / "facts.json",
        {"site": "nodes", "nodes": [str(node)], "federation": "0" * 32, "rad_digest": "0"},
    )
    assert "on other machines" in call("evaluate", tmp_path / "run")[2]
    monkeypatch.setenv("HETERO_SSFL_TRUST", str(node))
    assert "is code that you have not trained with" in call("evaluate", tmp_path / "run")[2]
    assert not trace.exists()


def test_code_that_the_user_trained_with_is_trusted_until_it_changes(
    module: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = "nets_of_mine:Net(width=3)"
    settings = [
        "rounds=1",
        "local_epochs=1",
        "clients.count=2",
        f"clients.models=['{spec}']",
        "evaluation.probes=['knn']",
    ]
    start(load_config("smoke", settings), tmp_path / "run", lambda _: None)
    new_process(monkeypatch, trace)
    encoder: Any = find_model(tmp_path / "run", "0").load()
    assert encoder[0].out_channels == 3
    assert "The encoders of run cannot be loaded here" not in render([tmp_path / "run"], read_rad_features)
    assert not is_trusted("nets_of_mine:Net(width=4)")
    new_process(monkeypatch, trace)
    elsewhere = tmp_path / "unpacked"
    shutil.copytree(module.parent, elsewhere)
    monkeypatch.syspath_prepend(elsewhere)
    with pytest.raises(ConfigError, match="not trained with on this machine"):
        find_model(tmp_path / "run", "0").load()
    assert not trace.exists()


def test_without_a_writable_home_trust_lasts_only_for_the_process(
    module: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    remember(["nets_of_mine:Net"])
    assert is_trusted("nets_of_mine:Net")
    new_process(monkeypatch, trace)
    assert not is_trusted("nets_of_mine:Net")


def test_the_user_can_trust_modules_explicitly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_SSFL_TRUST", "lab.nets,other")
    check_trusted("lab.nets:Net(width=3)", "encoder")
    with pytest.raises(ConfigError, match="HETERO_SSFL_TRUST=lab in the environment"):
        check_trusted("lab:Net", "encoder")


@pytest.mark.parametrize(
    ("spec", "trusted"),
    [
        ("resnet10(width=16)", True),
        ("timm:resnet18.a1_in1k(pretrained=True, img_size=(32, 32))", True),
        ("torchvision:resnet18", True),
        ("timm:resnet18(checkpoint_path='mail/weights.pth')", False),  # timm would unpickle it
        ('timm:resnet18(pretrained_cfg={"file": "x"})', False),
        ("timm:hf-hub:somebody/something", False),
    ],
)
def test_model_zoos_are_trusted_unless_a_file_or_address_is_named(spec: str, trusted: bool) -> None:
    assert is_trusted(spec) == trusted
