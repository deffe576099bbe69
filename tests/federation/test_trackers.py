"""Trackers: MLflow and W&B with the real packages, an own one, and one that fails."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import until
from helpers.whole_runs import tiny
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.server.trackers import tracking
from hetero_ssfl.federation.start import start
from hetero_ssfl.runs.events import ClientTrained, Event, Finished, RoundDone, Started, Warned
from hetero_ssfl.runs.folder import RunFolder

SCORES = {"a": {"linear_all": 40.0, "finetune_1%": 2.0}, "b": {"linear_all": 60.0}}


def interrupted(path: Path, *settings: str) -> RunFolder:
    """A run of three rounds that is interrupted after the second, and continues to the end."""
    facts = {"site": "simulated"}
    folder = RunFolder.create(
        path, load_config("smoke", list(settings)), lambda run: run.write_json("facts.json", facts)
    )
    for rounds in ((1, 2), (3,)):
        warnings: list[Event] = []
        listen = tracking(folder, warnings.append)
        listen(Started(rounds[0] - 1, 3))
        for number in rounds:
            done = RoundDone(number, 2, 1.0)
            figures = {"loss_ssl": 1.0 / number}
            folder.append_events([ClientTrained(number, name, 1, 2, figures=figures) for name in "ab"] + [done])
            listen(done)
        if rounds == (3,):
            listen(Finished(3, {"clients": SCORES, "mean": {"linear_all": 50.0}}))
        assert not [event for event in warnings if isinstance(event, Warned)]
    return folder


def test_mlflow_has_every_point_once_after_an_interruption(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    where = f"sqlite:///{tmp_path}/mlflow.db"
    interrupted(tmp_path / "run", f"tracking.mlflow={where}")
    client = mlflow.MlflowClient(tracking_uri=where)
    experiment = client.get_experiment_by_name("smoke")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "hetero-ssfl"
    points = client.get_metric_history(run.info.run_id, "loss_ssl/b")
    assert [point.step for point in points] == [1, 2, 3]
    assert [point.value for point in points] == pytest.approx([1, 1 / 2, 1 / 3])
    assert run.data.metrics["test_linear_all/mean"] == 50
    assert run.data.metrics["test_finetune_1_/a"] == 2


def records_of(file: Path) -> Iterator[bytes]:
    """Read W&B's file: 7 bytes, then blocks of 32 kB with parts of records, each after CRC, length and kind."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_wandb_has_every_point_once_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    folder = interrupted(tmp_path / "run", "tracking.wandb=project")
    files = sorted((folder.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2, "before and after the interruption"
    until(lambda: min(len([*records_of(file)]) for file in files) > 10)  # W&B writes them a little later
    seen: list[dict[str, Any]] = []
    ids = set()
    for file in files:
        for data in records_of(file):
            record = proto.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = record.history.item
                seen.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    assert len(ids) == 1, "W&B joins both when they are synchronised"
    found = [row["loss_ssl/b"] for row in seen if "loss_ssl/b" in row]
    assert found == pytest.approx([1, 1 / 2, 1 / 3])


OWN = """
class Lines:
    def __init__(self, folder):
        self.file = folder / "lines.txt"

    def event(self, event):
        with self.file.open("a") as file:
            file.write(f"{event.kind}\\n")
        if event.kind == "round" and event.round == FAILS:
            raise ValueError("the disk of the tracker is full")
"""


@pytest.mark.parametrize("fails", [1, 99])
def test_an_own_tracker_hears_every_event_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    (tmp_path / f"own{fails}.py").write_text(f"FAILS = {fails}\n{OWN}")
    monkeypatch.syspath_prepend(tmp_path)
    heard, warnings = list[str](), list[str]()

    def listen(event: Event) -> None:
        heard.append(event.kind)
        if isinstance(event, Warned):
            warnings.append(event.text)

    folder = start(tiny(f"tracking.own=own{fails}:Lines"), tmp_path / "run", listen)
    assert folder.finished
    told = (folder.path / "lines.txt").read_text().split()
    if fails == 99:
        assert told == heard
        assert not warnings
    else:
        assert told == heard[: len(told)]
        assert told.count("round") == 2
        assert len(warnings) == 1
        assert "tracking.own" in warnings[0]
        assert "the disk of the tracker is full" in warnings[0]
        assert folder.read_status()["last_warning"] == warnings[0]


def test_a_missing_tracker_is_found_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"pip install 'hetero-ssfl\[{name}\]'"):
            start(tiny(f"tracking.{name}=x"), tmp_path / "run", lambda _: None)
    with pytest.raises(ConfigError, match=r"no callable 'Nothing'"):
        start(tiny("tracking.own=json:Nothing"), tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()
