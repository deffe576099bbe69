"""What is published loads in a process that has torch and safetensors, and not this package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hetero_ssfl import build_encoder
from hetero_ssfl.api import Run
from hetero_ssfl.cli import app
from hetero_ssfl.errors import ConfigError, RunError
from hetero_ssfl.use.models import find_model
from hetero_ssfl.use.publish import source_of, write_folder

LOADER = """
import sys
for blocked in ("hetero_ssfl", "flwr", "timm", "torchvision"):
    sys.modules[blocked] = None
sys.path.insert(0, sys.argv[1])
import torch
from encoder import build
from safetensors.torch import load_file, save_file
images = load_file(sys.argv[2])["images"]
with torch.no_grad():
    save_file({"features": build()(images)}, sys.argv[3])
assert not [name for name, module in sys.modules.items() if name.startswith("hetero_ssfl.")]
"""


def features_elsewhere(folder: Path, images: torch.Tensor, scratch: Path) -> torch.Tensor:
    save_file({"images": images}, scratch / "images")
    places = [folder, scratch / "images", scratch / "features"]
    subprocess.run([sys.executable, "-I", "-c", LOADER, *map(str, places)], check=True, cwd=scratch, timeout=120)
    return load_file(scratch / "features")["features"]


@pytest.mark.parametrize("client", [0, 1, 2])
def test_a_published_folder_gives_the_same_features_without_this_package(
    run: Path, tmp_path: Path, client: int
) -> None:
    folder = Run.open(run).push_to_hub("me/model", client, tmp_path / "out", dry_run=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("README.md", "config.json", "encoder.py", "model.safetensors")
    ]
    model = find_model(run, str(client))
    images = torch.rand(3, *model.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.load()(images)
    assert torch.allclose(features_elsewhere(folder, images, tmp_path), expected, atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["encoder"] == model.card["encoder"]


@pytest.mark.parametrize(
    "spec", ["resnet50(width=4)", "resnet10(width=8, whiten=3, pool=2)", "mobilenet(width=8)", "vit(width=32, heads=2)"]
)
def test_the_source_of_every_kind_of_encoder_has_the_same_weights(spec: str, tmp_path: Path) -> None:
    encoder, _ = build_encoder(spec, 3, 16)
    (tmp_path / "encoder.py").write_text(source_of(spec, 3, 16))
    save_file(dict(encoder.state_dict()), tmp_path / "model.safetensors")
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(features_elsewhere(tmp_path, images, tmp_path), encoder.eval()(images), atol=1e-5)


def test_the_card_has_data_method_floors_and_the_code_that_loads_it(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["publish", str(run), "me/model", "--client", "2", "--to", "hub", "--dry-run", "-o", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    card = (tmp_path / "out" / "README.md").read_text()
    config, results = Run.open(run).config, Run.open(run).folder.read_json("results.json")
    assert f"| data | {config.data.source} |" in card
    assert f"| method | {config.method} |" in card
    assert "from encoder import build" in card
    head = next(line for line in card.splitlines() if line.startswith("| probe"))
    assert head.count("floor: ") == len(results.get("floors", {}))
    rows = [line for line in card.splitlines() if line.startswith("| linear")]
    assert rows
    assert all(row.count("|") == head.count("|") for row in rows)


def test_only_the_same_model_is_overwritten_and_own_code_is_not_published(run: Path, tmp_path: Path) -> None:
    out = write_folder(find_model(run, "0"), tmp_path / "out")
    write_folder(find_model(run, "0"), out)
    with pytest.raises(RunError, match="Choose another output"):
        write_folder(find_model(run, "1"), out)
    model = find_model(run, "0")
    model.card["encoder"] = "my_module:Net"
    with pytest.raises(ConfigError, match="torch-export"):
        write_folder(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_upload_that_fails_is_one_sentence(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at this address; the folder stays."""
    code = (
        "import sys; from hetero_ssfl.cli import main;"
        "sys.argv = ['x', 'publish', sys.argv[1], 'me/model', '--client', '0', '-o', sys.argv[2]]; main()"
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot publish 'me/model'" in done.stderr
    assert (tmp_path / "out" / "encoder.py").exists()
