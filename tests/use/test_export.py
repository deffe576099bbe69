"""`hetero-ssfl export`: the same features without this package."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from hetero_ssfl.errors import RunError
from hetero_ssfl.runs.files import load_tensors, save_tensors, write_atomically, write_json
from hetero_ssfl.use import export as exporting
from hetero_ssfl.use.card import model_card
from hetero_ssfl.use.models import ModelFolder, find_models

Call = Callable[..., tuple[int, str, str]]

USERS = """
from torch import nn
class Net(nn.Module):
    def __init__(self, in_channels, depth):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Conv2d(in_channels, in_channels, 3) for _ in range(depth)], nn.Flatten())
    def forward(self, x):
        return self.layers(x)
"""
# `python -I` ignores PYTHONPATH and the current folder; None in sys.modules makes an import fail.
ISOLATED = """
import sys
sys.modules["hetero_ssfl"] = None
sys.path.insert(0, ".")
import numpy, torch
images = numpy.load("images.npy")
if {tensors}: images = torch.from_numpy(images)
torch.set_grad_enabled(False)
{snippet}
numpy.save("features.npy", numpy.asarray(features))
"""


def snippet(folder: Path, heading: str) -> str:
    """Return the code under a heading of the model card."""
    found = re.search(rf"### {heading}.*?```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    assert found
    return found[1]


def features_without_package(folder: Path, heading: str, images: np.ndarray) -> np.ndarray:
    np.save(folder / "images.npy", images)
    code = ISOLATED.format(tensors=heading != "ONNX", snippet=snippet(folder, heading))
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return np.load(folder / "features.npy")


def expected_features(model: ModelFolder, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        out: np.ndarray = model.load()((torch.from_numpy(images) - 0.5) / 0.25).numpy()
    return out


@pytest.mark.parametrize(("client", "to", "heading"), [("0", "onnx", "ONNX"), ("2", "torch-export", r"torch\.export")])
def test_the_code_on_the_card_gives_the_same_features_without_this_package(
    client: str, to: str, heading: str, run: Path, tmp_path: Path, call: Call
) -> None:
    folder = tmp_path / "exported"
    code, said, complaints = call("export", run, "--client", client, "--to", to, "-o", folder)
    assert (code, complaints) == (0, "")
    assert str(folder) in said
    assert len(snippet(folder, heading).splitlines()) == 3
    images = np.random.default_rng(0).random((7, 1, 16, 16), np.float32)  # a larger batch than in tracing
    found = features_without_package(folder, heading, images)
    np.testing.assert_allclose(found, expected_features(find_models(run, client)[0], images), atol=1e-4)
    if to == "onnx":
        inside = {entry.key: entry.value for entry in onnx.load(folder / "encoder.onnx").metadata_props}
        assert json.loads(inside["hetero_ssfl"])["client"] == "client-000"


def users_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (path / "my_nets.py").write_text(USERS)
    monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("HETERO_SSFL_TRUST", "my_nets")
    my_nets = importlib.import_module("my_nets")
    takes = {"shape": [3, 12, 12], "channels": 3, "side": 12, "mean": 0.5, "std": 0.25}
    card = {"client": "clinic", "encoder": "my_nets:Net(depth=2)", "parameters": 168, "input": takes}
    save_tensors(path / "model" / "encoder.safetensors", my_nets.Net(3, 2).state_dict(), card)
    write_json(path / "model" / "card.json", card)
    return path / "model"


def test_a_users_class_loads_from_safetensors_without_this_package(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = users_model(tmp_path, monkeypatch)
    folder = tmp_path / "exported"
    assert call("export", model, "-o", folder)[0] == 0
    (folder / "my_nets.py").write_text(USERS)
    images = np.random.default_rng(0).random((2, 3, 12, 12), np.float32)
    found = features_without_package(folder, "safetensors", images)
    np.testing.assert_allclose(found, expected_features(ModelFolder.read(model), images), atol=1e-5)


def test_the_card_describes_model_accuracy_and_training(run: Path, tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "exported"
    call("export", run, "--client", "1", "-o", folder)
    call("export", run, "--client", "1", "--to", "torch-export", "-o", folder)
    text = (folder / "README.md").read_text()
    results = json.loads((run / "results.json").read_text())
    assert text.startswith("---\nlibrary_name: pytorch\n")
    for part in (
        "# client-001: `mobilenet(width=8, depth=1)`",
        f"| linear, all | {results['clients']['client-001']['linear_all']:.1f} "
        f"| {results['untrained']['client-001']['linear_all']:.1f} |",
        "| participants | 3 |",
        "| examples of the shared set (RAD) | 32 |",
        'load_file("encoder.safetensors")',
        'torch.export.load("encoder.pt2")',
        "## Limits",
    ):
        assert part in text
    assert "onnx" not in text
    assert json.loads((folder / "card.json").read_text())["client"] == "client-001"
    source = run / "models" / "client-001" / "encoder.safetensors"
    assert (folder / "encoder.safetensors").read_bytes() == source.read_bytes()


def test_an_exported_file_has_the_card_next_to_it_and_inside_it(run: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "README.md").write_text("mine")
    file = tmp_path / "net.pt2"
    assert call("export", run, "--client", "1", "--to", "torch-export", "-o", file)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "net.pt2", "net.pt2.md"]
    assert (tmp_path / "README.md").read_text() == "mine"
    assert 'torch.export.load("net.pt2")' in (tmp_path / "net.pt2.md").read_text()
    inside = {"card.json": ""}
    torch.export.load(file, extra_files=inside)
    assert json.loads(inside["card.json"])["client"] == "client-001"


@pytest.mark.parametrize("name", ["net.safetensors", "net.safetensors.md", "folder/README.md"])
def test_only_exports_of_the_same_model_are_overwritten(name: str, run: Path, tmp_path: Path, call: Call) -> None:
    kept = tmp_path / name
    target = tmp_path / "folder" if kept.parent.name == "folder" else tmp_path / "net.safetensors"
    command = ["export", run, "--client", "1", "-o", target]
    assert call(*command)[0] == 0
    kept.write_text("mine")
    if kept == target:
        kept.with_name(f"{name}.md").unlink()
    code, _, said = call(*command)
    assert code == 2
    assert f"'{target}' exists and is not an export of this model" in said
    assert kept.read_text() == "mine"
    kept.unlink()
    if kept == target:
        assert call(*command)[0] == 0
        assert call(*command)[0] == 0  # an export of the same model may be overwritten
        retrained = tmp_path / "retrained"
        shutil.copytree(run / "models" / "client-001", retrained)
        weights, card = load_tensors(retrained / "encoder.safetensors")
        save_tensors(retrained / "encoder.safetensors", {key: 2 * value for key, value in weights.items()}, card)
        assert "is not an export of this model" in call("export", retrained, "-o", target)[2]


@pytest.mark.parametrize("file", ["encoder.safetensors", "README.md", "card.json"])
def test_a_failed_export_leaves_nothing_behind(
    file: str, run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name == file:
            raise RunError(f"cannot write '{path}': no space left.")
        write_atomically(path, content)

    monkeypatch.setattr(exporting, "write_atomically", full)
    assert call("export", run, "--client", "1", "-o", tmp_path / "out")[0] == 2
    assert not list(tmp_path.rglob("*"))


def test_a_file_with_different_features_is_not_written(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = exporting._torch_export

    def off_by_little(module: nn.Module, example: torch.Tensor, card: str) -> bytes:
        assert isinstance(module, exporting.Normalised)
        return true(exporting.Normalised(module.encoder, module.mean + 1e-3, module.std), example, card)

    monkeypatch.setattr(exporting, "_torch_export", off_by_little)
    code, _, said = call("export", run, "--client", "0", "--to", "torch-export", "-o", tmp_path / "a.pt2")
    assert code == 2
    assert "differ from the encoder's by" in said
    assert not list(tmp_path.iterdir())


class Fixed(nn.Module):
    """Depends on values, which cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(1))
        return out if float(out.sum()) > 0 else -out


def test_an_encoder_that_cannot_be_exported_raises_an_error(tmp_path: Path, call: Call) -> None:
    own = f"{__name__}:Fixed"
    card = {"client": "a", "encoder": own, "input": {"shape": [1, 8, 8], "channels": 1, "side": 8}}
    save_tensors(tmp_path / "model" / "encoder.safetensors", Fixed().state_dict(), card)
    write_json(tmp_path / "model" / "card.json", card)
    command = ["export", tmp_path / "model", "--encoder", own, "-o"]
    code, _, said = call(*command, tmp_path / "a.pt2", "--to", "torch-export")
    assert code == 2
    assert "cannot be exported to torch-export" in said
    assert len(said.strip().splitlines()) == 1
    assert call(*command, tmp_path / "a.safetensors")[0] == 0


def test_inputs_other_than_images_are_not_normalised(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv1d(6, 4, 3), nn.Flatten())
    card = {"client": "sensor", "encoder": "given:Net", "input": {"shape": [6, 10]}}
    model = ModelFolder(tmp_path, card, None)
    content = exporting.convert(model, module, "torch-export")
    x = torch.randn(4, 6, 10)
    torch.testing.assert_close(exporting._run_torch_export(content)(x), module(x))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--to", "keras", "-o", "a"], "unknown format 'keras', expected one of safetensors, torch-export, onnx"),
        (["--to", "onnx", "-o", "a.pt2"], "--to onnx writes .onnx files, but 'a.pt2' ends in .pt2"),
        (["-o", "mine"], "'mine' exists and is not an export of this model"),
        (["-o", "another"], "'another' exists and is not an export of this model"),
        (["--client", "9", "-o", "a"], "there is no client '9'"),
    ],
)
def test_wrong_arguments_give_a_one_line_error(
    arguments: list[str], sentence: str, run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine", "thesis.tex").touch()
    write_json(Path("another", "card.json"), find_models(run, "2")[0].card)
    code, _, said = call("export", run, "--client", "0", *arguments)
    assert code == 2
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert len(list(tmp_path.rglob("*"))) == 4


def test_a_missing_extra_is_named(run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, _, said = call("export", run, "--client", "0", "--to", "onnx", "-o", tmp_path / "a.onnx")
    assert code == 2
    assert "pip install 'hetero-ssfl[onnx]'" in said
    assert not list(tmp_path.iterdir())


def test_text_on_a_card_cannot_become_markup_or_code(run: Path, tmp_path: Path, call: Call) -> None:
    folder = Path(shutil.copytree(run / "models" / "client-000", tmp_path / "model"))
    card = json.loads((folder / "card.json").read_text())
    hostile = "x`\n# Owned\n<script>a|b</script>[c]\x1b[2J"
    card |= {"client": hostile, "method": hostile, "hetero_ssfl": hostile, "encoder": f"given:{hostile}"}
    model = ModelFolder(folder, card, None)
    text = model_card(model, None, {"safetensors": "encoder.safetensors"})
    assert "\x1b" not in text
    assert "\n# Owned" not in text
    heading, code = text.partition("# ")[2].partition("\n")[0], text.partition("```python")[2]
    assert heading.count("`") == 2, "the encoder stays within its code span"
    assert "<script>" not in text.replace(heading, "").replace(code, "")
    assert code.count("```") == 1
    assert "# x` # Owned" in code
    imported = model_card(
        ModelFolder(folder, card | {"encoder": "os\nimport evil:x"}, None), None, {"safetensors": "e"}
    )
    assert "import evil" not in imported.partition("```python")[2]
