"""`hetero-ssfl embed`: features of any images with a trained encoder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch import nn

from hetero_ssfl.data import load_images
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.runs.files import load_tensors, save_tensors, write_json
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.use.models import ModelFolder, find_models

Call = Callable[..., tuple[int, str, str]]


class Twisted(nn.Module):
    """A user's encoder, which a card cannot name if it was passed as an object."""

    def __init__(self, side: int, width: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(side * side, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(1)).tanh()
        return out


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """Write the test digits to files, in the shape that the run used."""
    folder = tmp_path_factory.mktemp("images")
    pixels = load_images(RunFolder.open(run).read_config().data, "test").pixels[:300]  # more than one batch
    for row, image in enumerate(pixels):
        path = folder / f"part{row % 2}" / f"{row:04d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    return folder


def test_embed_gives_the_features_of_the_trained_encoder(run: Path, images: Path, tmp_path: Path, call: Call) -> None:
    code, said, _ = call("embed", run, "--client", "2", "--images", images, "-o", tmp_path / "f.parquet")
    assert code == 0
    assert "300 images, 32 features each" in said
    table = pandas.read_parquet(tmp_path / "f.parquet")
    assert list(table.columns) == ["row", "path", "feature"]
    assert table["path"][0] == "part0/0000.png"
    (model,) = find_models(run, "client-002")
    rows = [int(Path(path).stem) for path in table["path"]]
    pixels = load_images(RunFolder.open(run).read_config().data, "test").pixels[rows]
    expected = extract_features(model.load(), pixels)
    np.testing.assert_allclose(np.stack(table["feature"]), expected.numpy(), atol=1e-5)


def test_the_loaded_encoder_has_the_trained_weights(run: Path) -> None:
    model = find_models(run, "0")[0]
    saved = load_tensors(model.path / "encoder.safetensors")[0]
    before = torch.get_rng_state()
    loaded = model.load()
    assert torch.equal(before, torch.get_rng_state())
    assert not loaded.training
    assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())


def test_embed_writes_numpy_and_prints_json(run: Path, images: Path, tmp_path: Path, call: Call) -> None:
    target = tmp_path / "deep" / "f.npy"
    code, said, _ = call("embed", run, "--client", "client-000", "--images", images / "part1", "-o", target, "--json")
    assert code == 0
    assert json.loads(said) == {"file": str(target), "client": "client-000", "images": 150, "width": 32, "skipped": 0}
    assert np.load(target).shape == (150, 32)


def test_a_data_set_by_name_is_embedded_completely(run: Path, tmp_path: Path, call: Call) -> None:
    assert call("embed", run, "--client", "1", "--images", "digits", "-o", tmp_path / "f.parquet")[0] == 0
    table = pandas.read_parquet(tmp_path / "f.parquet")
    assert table["row"].tolist() == list(range(1797))
    assert table["path"].isna().all()


def test_bad_images_are_named_or_skipped_and_other_sizes_and_colours_are_converted(
    run: Path, images: Path, tmp_path: Path, call: Call
) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    shutil.copy(images / "part0" / "0000.png", folder / "a.png")
    Image.new("RGB", (90, 31), (200, 10, 10)).save(folder / "b.jpg")
    (folder / "c.png").write_text("torn")
    (folder / "readme.txt").write_text("hello")
    command = ["embed", run, "--client", "0", "--images", folder, "-o", tmp_path / "f.parquet"]
    code, _, said = call(*command)
    assert code == 2
    assert "image 2 (c.png)" in said
    assert not (tmp_path / "f.parquet").exists()
    code, said, _ = call(*command, "--on-bad-image", "skip")
    assert "2 images, 32 features each, 1 bad images skipped" in said
    assert pandas.read_parquet(tmp_path / "f.parquet")["path"].tolist() == ["a.png", "b.jpg"]


def test_a_model_folder_works_without_its_run(run: Path, images: Path, tmp_path: Path, call: Call) -> None:
    alone = tmp_path / "model"
    shutil.copytree(run / "models" / "client-001", alone)
    assert call("embed", alone, "--images", images / "part0", "-o", tmp_path / "alone.npy")[0] == 0
    assert call("embed", run, "--client", "1", "--images", images / "part0", "-o", tmp_path / "of-run.npy")[0] == 0
    assert np.array_equal(np.load(tmp_path / "alone.npy"), np.load(tmp_path / "of-run.npy"))
    code, _, said = call("embed", alone, "--client", "0", "--images", images, "-o", tmp_path / "f.npy")
    assert code == 2
    assert "is the model of client-001, not of '0'" in said


def own_model(folder: Path, spec: str) -> Path:
    """Write a model folder like that of `federate` for an encoder that was passed as an object."""
    card = {
        "client": "clinic",
        "encoder": spec,
        "parameters": 1,
        "input": {"shape": [1, 8, 8], "channels": 1, "side": 8},
    }
    save_tensors(folder / "encoder.safetensors", Twisted(8).state_dict(), card)
    write_json(folder / "card.json", card)
    return folder


def test_an_encoder_passed_as_an_object_needs_the_encoder_option(images: Path, tmp_path: Path, call: Call) -> None:
    folder = own_model(tmp_path / "model", "given:Twisted")
    command = ["embed", folder, "--images", images / "part0", "-o", tmp_path / "f.npy"]
    code, _, said = call(*command)
    assert code == 2
    assert "clinic's encoder was passed as an object, 'Twisted'" in said
    assert "--encoder package.module:callable" in said
    assert call(*command, "--encoder", f"{__name__}:Twisted")[0] == 0
    assert np.load(tmp_path / "f.npy").shape == (150, 5)
    code, _, said = call(*command, "--encoder", f"{__name__}:Twisted(width=6)")
    assert code == 2
    assert "do not fit encoder" in said
    assert "size mismatch for layer.weight" in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--client": "7"}, "there is no client '7', expected one of client-000, client-001, client-002"),
        ({"--client": "anna"}, "there is no client 'anna'"),
        ({"--client": "all"}, "expected one"),
        ({"--client": None}, "has several clients: client-000, client-001, client-002"),
        ({"-o": "f.csv"}, "expected a name that ends in .parquet or .npy"),
        ({"--images": "nowhere"}, "no data at 'nowhere'"),
        ({"--images": "empty"}, "'empty' is empty, expected images"),
        ({"--encoder": "resnet19"}, "unknown encoder 'resnet19'"),
        ({"--encoder": "mobilenet"}, "do not fit encoder 'mobilenet'"),
    ],
)
def test_wrong_arguments_give_a_one_line_error(
    change: dict[str, str | None], sentence: str, run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    options = {"--client": "0", "--images": "digits", "-o": "f.npy", **change}
    arguments = [part for key, value in options.items() if value is not None for part in (key, value)]
    code, _, said = call("embed", run, *arguments)
    assert code == 2
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_an_error_says_why_a_run_has_no_models(run: Path, tmp_path: Path, call: Call) -> None:
    rest = ["--client", "0", "--images", "digits", "-o", tmp_path / "f.npy"]
    broken = tmp_path / "run"
    shutil.copytree(run, broken)
    (broken / "models" / "client-000" / "encoder.safetensors").write_bytes(b"torn")
    assert "cannot be read" in call("embed", broken, *rest)[2]
    write_json(broken / "models" / "client-000" / "card.json", {"client": "client-000"})
    assert "does not describe an encoder" in call("embed", broken, *rest)[2]
    shutil.rmtree(broken / "models")
    assert "client-000/card.json' is missing" in call("embed", broken, *rest)[2]
    write_json(broken / "facts.json", {"site": "nodes", "nodes": []})
    assert "each participant keeps its own" in call("embed", broken, *rest)[2]
    shutil.copy(run / "facts.json", broken)
    (broken / "results.json").unlink()
    assert "Continue it with: hetero-ssfl run --resume" in call("embed", broken, *rest)[2]
    assert "neither a run folder" in call("embed", tmp_path / "nowhere", *rest)[2]


def test_an_encoder_for_other_data_refuses_images(tmp_path: Path, call: Call) -> None:
    card = {"client": "sensor", "encoder": "given:Net", "input": {"shape": [6, 128]}}
    write_json(tmp_path / "model" / "card.json", card)
    assert ModelFolder.read(tmp_path / "model").shape == (6, 128)
    code, _, said = call("embed", tmp_path / "model", "--images", "digits", "-o", tmp_path / "f.npy")
    assert code == 2
    assert "takes inputs of shape (6, 128), not square images" in said
