import json
import sys
from pathlib import Path

import pytest

from hetero_ssfl.cli import main
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.studies.sweep import Axis


def test_an_axis_is_a_key_and_its_values() -> None:
    assert Axis.parse("alignment.mu=0, 0.5,4") == Axis("alignment.mu", ("0", "0.5", "4"))
    for wrong in ("alignment.mu", "alignment.mu="):
        with pytest.raises(ConfigError, match="expected key=value,value"):
            Axis.parse(wrong)


def sweep(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hetero-ssfl", "sweep", "smoke", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_a_sweep_runs_every_point_once_and_plots_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--set", "rounds=1", "--set", "evaluation.every=0", "--set", "evaluation.epochs=2", "--quiet", "--json"]
    arguments = ["--over", "alignment.mu=0,4", "--root", str(tmp_path), *small]
    assert sweep(monkeypatch, *arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["point"] for row in shown["rows"]] == [{"alignment.mu": "0"}, {"alignment.mu": "4"}]
    assert Path(shown["picture"]).read_bytes().startswith(b"\x89PNG")
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("results.json")}
    assert len(times) == 2
    assert sweep(monkeypatch, *arguments) == 0
    assert all(p.stat().st_mtime_ns == t for p, t in times.items())


def test_a_misspelt_key_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, "--over", "rounds=1,2", "--over", "alignment.muu=1", "--root", str(tmp_path)) == 2
    assert "expected 'mu'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
