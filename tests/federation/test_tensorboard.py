"""TensorBoard files and events of a run, read with TensorBoard and pandas."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.saved import lines
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.start import resume, start
from hetero_ssfl.runs.events import Event, RoundDone
from hetero_ssfl.runs.folder import RunFolder

SETTINGS = [
    *("data.limit=260", "data.validation=60", "rad.size=32", "alignment.rad_batch=16", "evaluation.epochs=2"),
    *("optim.batch=32", "rounds=3", "tracking.tensorboard=true", "evaluation.untrained=false"),
]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    seen = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that crashed in round 2 before its state was saved, and was then resumed."""
    path = tmp_path_factory.mktemp("tracked") / "run"
    kept = path.parent / "server.safetensors"

    def stop(event: Event) -> None:
        if isinstance(event, RoundDone) and event.round == 1:
            shutil.copy(path / "server.safetensors", kept)
        if isinstance(event, RoundDone) and event.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(load_config("smoke", SETTINGS), path, stop)
    assert [step for step, _ in scalars(path)["loss_ssl/client-000"]] == [1, 2]
    shutil.copy(kept, path / "server.safetensors")
    resume(RunFolder.open(path), lambda _: None)
    return path


def test_every_figure_is_written_once_even_after_a_crash(run: Path) -> None:
    found = scalars(run)
    expected: Counter[tuple[str, int]] = Counter()
    values = {}
    for event in lines(RunFolder.open(run)):
        figures: dict[str, Any] = {}
        if event["event"] == "client":
            figures = {f"{key}/{event['client']}": value for key, value in event.items()}
        elif event["event"] == "evaluation":
            for client, scores in {**event["clients"], "mean": event["mean"]}.items():
                figures |= {f"validation_{key}/{client}": value for key, value in scores.items()}
        elif event["event"] == "round":
            figures = {f"round/{key}": value for key, value in event.items()}
        for tag, value in figures.items():
            if isinstance(value, int | float) and tag != "round/round" and not tag.startswith("round/client-"):
                expected[tag, event["round"]] += 1
                values[tag, event["round"]] = value
    results = json.loads((run / "results.json").read_text())
    for client, scores in {**results["clients"], "mean": results["mean"]}.items():
        for key, value in scores.items():
            expected[f"test_{key}/{client}", 3] += 1
            values[f"test_{key}/{client}", 3] = value
    assert Counter((tag, step) for tag, points in found.items() for step, _ in points) == expected
    for tag, points in found.items():
        for step, value in points:
            assert value == pytest.approx(values[tag, step], rel=1e-5)
    for tag in ("loss_alignment/client-001", "effective_rank/client-002", "bytes_up/client-000", "spread/client-000"):
        assert len(found[tag]) >= 3
    assert [step for step, _ in found["validation_linear_all/mean"]] == [0, 1, 2, 3]


def test_the_folder_is_created_only_on_request_and_requires_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'hetero-ssfl\[tensorboard\]'"):
        start(load_config("smoke", SETTINGS), tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()
    plain = [*SETTINGS, "rounds=1", "tracking.tensorboard=false"]
    start(load_config("smoke", plain), tmp_path / "plain", lambda _: None)
    assert not (tmp_path / "plain" / "tensorboard").exists()


def test_pandas_reads_the_events_in_one_line(run: Path) -> None:
    events = pandas.read_json(run / "events.jsonl", lines=True)
    table = events[events["event"] == "client"].pivot(index="round", columns="client", values="loss_ssl")
    assert list(table.columns) == ["client-000", "client-001", "client-002"]
    assert list(table.index) == [0, 1, 2, 3]
    recorded = [e["loss_ssl"] for e in lines(RunFolder.open(run)) if e.get("client") == "client-001" and e["round"]]
    assert table["client-001"][1:].tolist() == pytest.approx(recorded)
