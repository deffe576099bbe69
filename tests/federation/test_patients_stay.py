"""Federations of hospitals with DICOM and NIfTI files: nothing of a file's header is in any file or message."""

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from helpers.federations import write_node
from helpers.rig import Rig
from helpers.saved import lines
from helpers.scans import DIGITS, PATIENT, dicom, save_nifti, write_scans
from hetero_ssfl import Client, federate
from hetero_ssfl.federation.wire import encode

PLANTED = [*PATIENT.values(), "Planted", "19170805", "1.2.826.0.1.3680043.8.498"]  # the last begins all ids of pydicom
FILE_NAME = "DOE-JANE"


def write_hospital(folder: Path, first: int) -> None:
    """Write CT images by class, one of them named by its patient, and a volume."""
    write_scans(folder, first, 40, classes=2)
    place = folder / "class-0"
    next(iter(place.iterdir())).rename(place / f"{FILE_NAME}.dcm")
    slices = (DIGITS.images[first : first + 4] * 100 - 700).astype(np.int16).transpose(1, 2, 0)
    save_nifti(folder / "class-1" / f"{FILE_NAME}.nii.gz", slices)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path / "federation", "rounds=2", "evaluation.every=1")
    write_scans(rig.root / "scans", 0, 30)
    rig.config = rig.config.model_copy(
        update={"rad": rig.config.rad.model_copy(update={"source": str(rig.root / "scans")})}
    )
    for number, path in enumerate(rig.paths):
        write_node(path.parent, path.parent.name, rig_encoder(path), "data.window = [-512, 1024]")
        path.write_text(path.read_text().replace("[data]\n", "").replace('source = "images"', 'data.source = "scans"'))
        write_hospital(path.parent / "scans", 100 + 50 * number)
    return rig


def rig_encoder(path: Path) -> str:
    return next(line.partition('"')[2].strip('"') for line in path.read_text().splitlines() if "encoder" in line)


def test_no_header_is_in_any_file_or_message_of_a_federation(
    rig: Rig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    replies: list[bytes] = []

    def keep(_: Message, reply: Message) -> Message:
        replies.append(encode(reply))
        return reply

    rig.grid.tamper = dict.fromkeys(rig.grid.nodes, keep)
    broken = rig.root / "node-2" / "scans" / "class-1" / "torn.dcm"

    def spoil() -> None:
        dataset = dicom(np.zeros((8, 8), np.uint8))
        dataset.Rows = 9
        dataset.save_as(broken)

    rig.at["begin", 2] = spoil
    rig.run()
    assert [event["client"] for event in lines(rig.folder) if event["event"] == "client" and event["round"] == 1] == [
        "node-0",
        "node-1",
        "node-2",
    ]
    assert rig.excluded() == [(2, "node-2")]
    server = [path.read_bytes() for path in rig.folder.path.rglob("*") if path.is_file()]
    sent = [encode(message) for message in rig.grid.sent]
    homes = [p.read_bytes() for path in rig.paths for p in (path.parent / "state").rglob("*") if p.is_file()]
    cache = [path.read_bytes() for path in (tmp_path / "cache").iterdir()]
    said = "".join([*capfd.readouterr(), caplog.text, json.dumps(rig.events)]).encode()
    assert min(map(len, (server, sent, replies, homes, cache))) > 3
    everything = [*server, *sent, *replies, *homes, *cache, said]
    for planted in PLANTED:
        assert not [text for text in everything if planted.encode() in text], planted
    for name in (FILE_NAME, "torn.dcm", "class-1"):  # names of files stay with their node
        assert not [text for text in [*server, *sent, *replies] if name.encode() in text], name
    assert [text for text in homes if b"torn.dcm" in text]
    card = json.loads(next((rig.root / "node-0").rglob("card.json")).read_text())
    assert (card["input"]["window"], card["input"]["axis"]) == ([-512, 1024], "axial")


def test_folders_of_scans_work_from_training_to_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(tmp_path / "cache"))
    for number, name in enumerate("ab"):
        write_hospital(tmp_path / name, 200 + 60 * number)
    write_scans(tmp_path / "shared", 400, 24)
    run = federate(
        [
            Client(tmp_path / "a", "resnet8(width=4)", name="a"),
            Client(tmp_path / "b", "mobilenet(width=8, depth=1)", name="b"),
        ],
        rad=tmp_path / "shared",
        config="smoke",
        settings={"data.side": 16, "data.window": [-512, 1024], "evaluation.epochs": 5},
        rounds=1,
        run_dir=tmp_path / "run",
    )
    assert {"linear_all", "knn_all"} <= set(run.table().columns)
    features = run.embed(tmp_path / "a", client="a")["a"]
    assert len(features) == 44
    assert [name for name in features.index if FILE_NAME in name] == [f"class-0/{FILE_NAME}.dcm"] + [
        f"class-1/{FILE_NAME}.nii.gz#{k}" for k in range(4)
    ]
    assert len(run.evaluate(tmp_path / "b")) == 2
    run.neighbours(tmp_path / "near.html", images=tmp_path / "a", queries=[f"class-1/{FILE_NAME}.nii.gz#2"])
    assert f"{FILE_NAME}.nii.gz#2" in (tmp_path / "near.html").read_text()
    card = json.loads((tmp_path / "run" / "models" / "a" / "card.json").read_text())
    assert card["input"]["window"] == [-512, 1024]
