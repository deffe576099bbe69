"""Runs from Python that last: in a new process, with more rounds, and after a script with random weights was killed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from helpers.photographs import write_photographs
from helpers.pieces import AnyNet
from hetero_ssfl import Client, Run, RunFolder, federate
from hetero_ssfl.errors import ConfigError, DataError, RunError
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.runs.files import load_tensors

QUICK: dict[str, Any] = {
    "data.side": 16,
    "local_epochs": 1,
    "evaluation.epochs": 5,
    "optim.schedule": "constant",
    "engine.workers": 1,
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    for seed, (name, count) in enumerate({"a": 24, "b": 24, "shared": 12, "new": 30}.items()):
        write_photographs(root / name, count, seed=seed, classes=name != "shared")
    return root


def tiny(root: Path, run_dir: Path | None, **other: Any) -> Run:
    """One client without labels, whose encoder has other random weights each time."""
    client = Client(root / "shared", AnyNet(3), "own")
    given = {"config": "smoke", "rounds": 1, "settings": QUICK, "progress": False, **other}
    return federate([client], 4, "local", run_dir=run_dir, **given)


@pytest.fixture(scope="module")
def mixed(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with an encoder that is built in, one that is an object, and one that can be imported."""
    clients = [
        Client(photographs / "a", "resnet8(width=4)"),
        Client(photographs / "b", lambda in_channels: AnyNet(in_channels), "own"),
        Client(photographs / "b", AnyNet, "class"),
    ]
    run_dir = tmp_path_factory.mktemp("mixed") / "run"
    rad = photographs / "shared"
    return federate(clients, rad, config="smoke", run_dir=run_dir, rounds=2, settings=QUICK, progress=False)


# --- starting weights ---


def test_the_same_script_with_other_random_weights_continues_its_run(
    photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = tiny(photographs, tmp_path / "run")
    started = load_tensors(tmp_path / "run" / "start" / "own.safetensors")[0]
    trained = begun.encoder("own").state_dict()
    shutil.rmtree(begun.path / "clients")  # as if it was killed in its first round
    (begun.path / "server.safetensors").unlink()
    (begun.path / "results.json").unlink()
    again = tiny(photographs, tmp_path / "run")
    assert all(torch.equal(value, again.encoder("own").state_dict()[key]) for key, value in trained.items())
    assert not any(torch.equal(value, started[key]) for key, value in trained.items())
    assert "own: the run in" in caplog.text
    assert "keeps its own" in caplog.text


def test_without_a_folder_the_same_arguments_give_the_same_run(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def said(**other: Any) -> tuple[Run, list[str]]:
        run = tiny(photographs, None, progress=True, **other)
        return run, [
            line for line in capsys.readouterr().err.splitlines() if "round " not in line and "loss" not in line
        ]

    first, lines = said()
    assert lines[0].startswith("own: encoders of this process only")
    assert lines[-2:] == [
        "no labels, so no accuracy: look at run.report() and hetero-ssfl neighbours",
        f"run folder: {first.path}",
    ]
    again, lines = said()
    assert again.path == first.path
    assert lines == [f"run folder: {first.path} (finished before; to train again, pass another run_dir)"]
    (first.path / "results.json").unlink()
    again, lines = said()
    assert again.path == first.path
    assert lines[0] == f"continuing the unfinished run in {first.path}"
    other, lines = said(settings={**QUICK, "optim.lr": 0.002})
    assert other.path.name == f"{first.path.name}-2"
    assert lines[0].startswith(f"{first.path} holds a run with different settings (optim.lr is ")
    assert lines[0].endswith(f" there and 0.002 here); this is a new run in {other.path}")
    (first.path / "results.json").unlink()
    with first.folder.lock():  # another process is training in it
        assert tiny(photographs, None).path.name == f"{first.path.name}-3"
    assert not capsys.readouterr().err


# --- a new process ---


def test_a_missing_encoder_does_not_hide_the_others(
    mixed: Run, photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.open(mixed.path)
    assert isinstance(run.encoder("class"), AnyNet)
    with pytest.raises(
        RunError, match=r"lambda.*process\. Call where it was passed: federate\(\.\.\., run_dir='.*/run'\) and"
    ):
        run.encoder("own")
    rad = load_tensors(mixed.path / "rad.safetensors")[0]["pixels"]
    features = run.embed(photographs / "shared")
    assert set(features) == {"client-000", "class"}
    assert "own is left out: encoder = 'given:mixed.lambda' is a Python object" in caplog.text
    for name, found in features.items():
        assert found.index[0].endswith(".jpg")
        assert np.allclose(found, extract_features(mixed.encoder(name), rad), atol=1e-6)
        assert np.array_equal(run.embed(rad, name)[name], extract_features(mixed.encoder(name), rad))
    assert run.table()["mutual_cka"].notna().tolist() == [True, False, True]
    assert set(run.export(tmp_path / "out")) == {"client-000", "own", "class"}  # weights need no class
    with pytest.raises(ConfigError, match="own's encoder was passed as an object"):
        run.export(tmp_path / "own", "torch-export", "own")
    pictures = run.neighbours(tmp_path / "neighbours.html").read_text()
    assert ("client-000, " in pictures, "own, " in pictures, "class, " in pictures) == (True, False, True)
    with pytest.raises(ConfigError, match="own's encoder was passed as an object"):
        run.neighbours(tmp_path / "own.html", client="own")
    assert "own, " in mixed.neighbours(tmp_path / "all.html").read_text(), "in the process that has them"
    page = run.report(tmp_path / "report.html").read_text()
    assert "own is missing: encoder =" in page
    assert "class helpers.pieces:AnyNet" in page


def test_a_torn_photo_names_the_argument_that_skips_it_and_rows_have_their_paths(
    mixed: Run, photographs: Path, tmp_path: Path
) -> None:
    shutil.copytree(photographs / "new", tmp_path / "new")
    torn = sorted((tmp_path / "new").rglob("*.*"))[1]
    torn.write_text("torn")
    with pytest.raises(DataError, match=r"or skip such images with on_bad_image='skip'\.$"):
        mixed.embed(tmp_path / "new", client=0)
    table = mixed.embed(tmp_path / "new", client=0, on_bad_image="skip")["client-000"]
    everything = sorted(file.relative_to(tmp_path / "new").as_posix() for file in (tmp_path / "new").rglob("*.*"))
    assert list(table.index) == [path for path in everything if path != torn.relative_to(tmp_path / "new").as_posix()]
    with pytest.raises(DataError, match=r"Remove it\.$"):  # evaluate has no such argument
        mixed.evaluate(tmp_path / "new")
    again = {"data.on_bad_image": "skip"}
    with pytest.raises(DataError, match=r"settings=\{'data.on_bad_image': 'skip'\}"):
        federate([Client(tmp_path / "new", AnyNet)], 4, settings=QUICK, run_dir=tmp_path / "run", config="smoke")
    options: dict[str, Any] = {"config": "smoke", "rounds": 1, "settings": {**QUICK, **again}, "progress": False}
    run = federate([Client(tmp_path / "new", AnyNet)], 4, "local", run_dir=tmp_path / "run", **options)
    listed = pandas.read_csv(run.path / "skipped.csv")
    assert listed["image"].tolist() == [torn.relative_to(tmp_path / "new").as_posix()]
    assert listed["reason"].tolist() == ["cannot be decoded"]


def test_new_data_are_tested_without_the_runs_own_data(mixed: Run, photographs: Path) -> None:
    table = Run.open(mixed.path).evaluate(photographs / "new")
    assert list(table.index) == ["client-000", "class"]
    assert list(table.columns) == ["linear", "knn"]
    assert mixed.evaluate(photographs / "new").loc["class"].equals(table.loc["class"])
    with pytest.raises(DataError, match="the new data have no labels"):
        mixed.evaluate(photographs / "shared")
    with pytest.raises(ConfigError, match=r"'rounds' cannot be set here: only evaluation\.\* can change"):
        mixed.evaluate(photographs / "new", settings={"rounds": 3})


def test_own_data_with_names_are_read_again_and_checked(mixed: Run) -> None:
    def found(run: Run) -> dict[str, float]:
        return {name: row["linear_all"] for name, row in run.evaluate().iterrows()}

    recorded = mixed.folder.read_json("results.json")["clients"]
    assert found(mixed) == {name: scores["linear_all"] for name, scores in recorded.items()}
    again = found(Run.open(mixed.path))
    assert again == {name: recorded[name]["linear_all"] for name in ("client-000", "class")}


# --- more rounds ---


def test_more_rounds_are_bit_identical_to_a_run_that_had_them_from_the_beginning(
    photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def named(run_dir: Path, rounds: int) -> Run:
        clients = [Client(photographs / "a", "resnet8(width=4)"), Client(photographs / "b", AnyNet)]
        settings = {**QUICK, "evaluation.every": 0}
        return federate(clients, 12, config="smoke", run_dir=run_dir, rounds=rounds, settings=settings, progress=False)

    whole, short = named(tmp_path / "whole", 3), named(tmp_path / "short", 2)
    longer = Run.open(short.path).more(rounds=3, progress=False)  # as a new process would
    assert longer.config.rounds == 3
    assert longer.table().equals(whole.table())
    assert (short.path / "results-000002.json").exists()
    for name in whole.clients:
        wanted, found = whole.encoder(name).state_dict(), longer.encoder(name).state_dict()
        assert all(torch.equal(value, found[key]) for key, value in wanted.items())
    assert named(short.path, 2).config.rounds == 3  # the same script still continues it
    longer.more(rounds=3, progress=False)  # a script that runs again
    assert "has all of its 3 rounds already" in caplog.text
    with pytest.raises(ConfigError, match="expected more than the 3 finished"):
        longer.more(rounds=3, settings={"optim.lr": 0.01})
    with pytest.raises(ConfigError, match="'seed' cannot change within a run"):
        longer.more(rounds=4, settings={"seed": 2})


def test_objects_are_named_before_anything_changes(mixed: Run) -> None:
    with pytest.raises(RunError, match=r"the encoder of own \('mixed.lambda'\)\. Call there: federate\("):
        Run.open(mixed.path).more(rounds=5)
    assert RunFolder.open(mixed.path).read_config().rounds == 2
    assert mixed.folder.finished


# --- tables ---


def test_a_printed_table_shows_all_columns(mixed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    table = mixed.table()
    assert all(column in str(table) for column in table.columns)
    assert all(f"<th>{column}</th>" in table._repr_html_() for column in table.columns)
    assert max(map(len, str(table).splitlines())) <= 62  # pandas adds a mark where it continues below
    assert "..." in str(table.copy())  # plain tables are shortened, so this test can fail
