"""The command line: output, exit codes, and one-sentence errors."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.blocks import ROOT
from helpers.commands import PROGRAM
from helpers.saved import change_config
from hetero_ssfl import Run
from hetero_ssfl.cli import app, main
from hetero_ssfl.config import load_config, preset_names
from hetero_ssfl.plugins import install_command
from hetero_ssfl.runs import environment as machine
from hetero_ssfl.runs.environment import Finding
from hetero_ssfl.runs.folder import RunFolder

TINY = [
    *("--set", "data.limit=260", "--set", "data.validation=60", "--set", "rad.size=32"),
    *("--set", "alignment.rad_batch=16", "--set", "evaluation.epochs=5", "--set", "optim.batch=16"),
]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    command = [*PROGRAM, "run", "smoke", *TINY, "--run-dir", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "mean ± sd" in done.stdout
    assert "round 2/2" in done.stderr
    return path


def test_compare_shows_the_difference_for_people_and_machines(finished: Path, tmp_path: Path, call: Call) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    change_config(other, {"method": "local"})
    results = RunFolder(other).read_json("results.json")
    for scores in results["clients"].values():
        scores["linear_all"] += 7
    RunFolder(other).write_json("results.json", results)
    _, shown, _ = call("compare", finished, other, "--json", "--plot", tmp_path / "plot.png")
    rows = json.loads(shown)["rows"]
    assert [round(row["difference_to_first"], 6) for row in rows] == [0, 7]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "+7.0" in call("compare", finished, other, "--csv", tmp_path / "t.csv")[1]
    assert "+7.0" in (tmp_path / "t.csv").read_text()


def test_curves_per_round_as_a_table_and_a_plot(finished: Path, tmp_path: Path, call: Call) -> None:
    target = tmp_path / "curves.csv"
    code, shown, _ = call("compare", finished, "--rounds", "--metric", "knn_all", "--json", "--csv", target)
    assert code == 0
    (curve,) = json.loads(shown)["curves"]
    events = [e.to_json() for e in RunFolder(finished).events()]
    expected = {e["round"]: e["mean"]["knn_all"] for e in events if e.get("split") == "validation" and "round" in e}
    assert {int(at): value for at, value in curve.items()} == expected
    assert len(target.read_text().splitlines()) == 1 + len(expected) > 2
    figure = Run.open(finished).plot(tmp_path / "curves.png", "knn_all")
    losses, accuracies = figure.axes
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(losses.lines) == len(Run.open(finished).clients)
    assert np.array_equal(accuracies.lines[0].get_xdata(), sorted(expected))
    assert all(float(tick).is_integer() for tick in losses.get_xticks())


def test_evaluate_reproduces_the_recorded_figures_and_can_compute_others(finished: Path, call: Call) -> None:
    again = json.loads(call("evaluate", finished, "--split", "test", "--json")[1])
    recorded = json.loads((finished / "results.json").read_text())
    assert again["clients"] == recorded["clients"]
    shown = call("evaluate", finished, "--split", "test")[1].splitlines()
    assert shown[-1] == "chance level: 10.0 (all 10 classes)"
    assert any(line.startswith("the same encoders untrained, linear_all: ") for line in shown)
    _, fewer, _ = call("evaluate", finished, "--set", "evaluation.probes=['knn']", "--json")
    assert set(json.loads(fewer)["clients"]["client-000"]) == {"knn_all", "knn_own"}


def test_interrupting_before_training_says_that_nothing_was_written(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt  # as SIGTERM does

    monkeypatch.setattr("hetero_ssfl.cli.commands.load_config", stop)
    code, _, said = call("run", "smoke", "--run-dir", tmp_path / "run")
    assert (code, "Interrupted before training began; nothing was written." in said) == (130, True)


def test_interrupting_leaves_a_run_that_can_be_resumed(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "run"
    arguments = ["run", "smoke", *TINY, "--set", "rounds=50", "--run-dir", str(path)]
    child = subprocess.Popen([*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "round 1/50" in line:
            break
    os.kill(child.pid, signal.SIGINT)
    _, rest = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"hetero-ssfl run --resume {path}" in rest
    assert "Traceback" not in rest
    change_config(path, {"rounds": 2})
    code, shown, said = call("run", "--resume", path, "--json", "--quiet")
    assert (code, said) == (0, "")
    assert json.loads(shown)["round"] >= 2


def test_an_unfinished_run_cannot_be_compared(finished: Path, tmp_path: Path, call: Call) -> None:
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    for name in ("config.toml", "environment.json", "facts.json"):
        (unfinished / name).write_bytes((finished / name).read_bytes())
    code, _, said = call("compare", unfinished)
    assert code == 2
    assert "the run is not finished" in said


def test_check_machine_lists_what_is_available_and_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    findings = json.loads(call("check", "machine", "--json")[1])["findings"]
    by_name = {f["what"]: f for f in findings}
    assert by_name["torch"]["ok"]
    assert all("Remedy" in f["text"] for f in findings if f["what"] in ("ray", "timm", "onnx") and not f["ok"])
    if platform.machine() == "x86_64":  # the processors that have AVX2
        assert by_name["instructions"]["ok"]
        assert "AVX2" in by_name["instructions"]["text"]
        assert "hetero-ssfl guards against it" in by_name["instructions"]["text"]


def test_versions_that_were_not_tested_are_named_with_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: pinned[name] for name in machine.TESTED} == machine.TESTED
    monkeypatch.setattr(machine, "_version", lambda name: "99.1+cu13" if name == "torch" else pinned[name])
    found = {finding.what: finding for finding in machine.diagnose()}
    assert found["flwr"].level == "ok"
    assert found["torch"].level == "warning"
    assert f"pip install torch=={pinned['torch']}" in found["torch"].text


def test_an_extra_is_installed_beside_the_torch_that_is_here() -> None:
    assert f"torch=={torch.__version__.partition('+')[0]}" in install_command("timm")


def test_the_counter_of_operations_is_imported_only_where_it_is_used() -> None:
    """torch.utils.flop_counter imports triton, which leaves many lines when a process ends."""
    program = "import sys, hetero_ssfl.federation.start; print('torch.utils.flop_counter' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_remedies_with_brackets_are_printed_completely(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "check_instructions", lambda: Finding("instructions", True, "not asked here"))
    _, shown, _ = call("check", "machine")
    missing = {line.split()[1]: line for line in shown.splitlines() if line.startswith("missing")}
    extras = {"timm", "onnx", "tensorboard"} & missing.keys()
    assert all(f"hetero-ssfl[{extra}]" in missing[extra] for extra in extras)
    assert "hetero-ssfl'" not in shown


def test_describe_counts_and_draws(tmp_path: Path, call: Call) -> None:
    picture = tmp_path / "who.png"
    facts = json.loads(call("data", "describe", "demo", "--plot", picture, "--json")[1])
    assert facts["shape"] == [1, 16, 16]
    assert facts["train_images"] + facts["test_images"] == 1797
    counts = facts["clients"]
    assert all(sum(c > 0 for c in row) == 2 for row in counts.values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_describe_recommends_a_side_for_images_of_unequal_sizes(tmp_path: Path, call: Call) -> None:
    for number in range(10):
        Image.new("RGB", (20 + number, 30)).save(tmp_path / f"{number}.png")
    facts = json.loads(call("data", "describe", tmp_path, "--json")[1])
    assert facts["sizes"] == "20x30 to 29x30 pixels"
    assert facts["advice"].startswith("set data.side, for example 32, to crop and resize all images")
    assert (facts["train_images"], facts["shape"]) == (10, [3, 32, 32])
    assert "advice" not in json.loads(call("data", "describe", tmp_path, "--set", "data.side=8", "--json")[1])


def test_describe_of_a_data_source_shows_no_clients(capsys: pytest.CaptureFixture[str]) -> None:
    app(["data", "describe", "digits", "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["shape"] == [1, 8, 8]
    assert facts["kept_by_a_run"] == {"validation": 143, "rad": 287, "clients": facts["train_images"] - 430}
    assert sum(facts["images_per_class"]) == facts["train_images"]
    assert "clients" not in facts


@pytest.mark.parametrize("command", [["--version"], *([c, "--help"] for c in ("run", "demo", "evaluate", "compare"))])
def test_help_and_version(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hetero-ssfl", *command])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert "hetero-ssfl" in capsys.readouterr().out


def test_the_demo_makes_a_table_and_a_picture(tmp_path: Path, call: Call) -> None:
    """A shortened demo: three arms, five encoders, one picture."""
    quick = ["--set", "rounds=1", "--set", "local_epochs=1", "--set", "data.limit=400", "--set", "rad.size=40"]
    quick += ["--set", "data.validation=100", "--set", "evaluation.epochs=5", "--set", "data.side=8", "--quiet"]
    code, shown, said = call("demo", *quick, "--run-dir", tmp_path / "demo")
    assert code == 0, said
    for word in ("resnet14", "mobilenet", "vit", "alone", "together", "untrained", "mean ± sd"):
        assert word in shown
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 20_000
    assert "together" in (tmp_path / "demo" / "report.html").read_text()
    assert str(tmp_path / "demo" / "report.html") in "".join(shown.splitlines())
    _, again, _ = call("demo", *quick, "--run-dir", tmp_path / "demo", "--json")
    assert len(json.loads(again)["rows"]) == 5


@pytest.mark.parametrize(
    ("kind", "pattern", "expected"),
    [
        ("encoders", "*vit", "vit"),
        ("encoders", "resnet1?", "resnet10"),
        ("methods", "fed[ab]*", "fedbyol"),
        ("losses", "sim*", "simclr"),
        ("presets", "*", "smoke"),
    ],
)
def test_list_prints_the_names_that_match(kind: str, pattern: str, expected: str, call: Call) -> None:
    names = json.loads(call("list", kind, pattern, "--json")[1])[kind]
    assert expected in names
    assert set(names) <= set(call("list", kind)[1].split())
    assert call("list", kind, pattern)[1].split() == names


def test_list_shows_settings_by_pattern(call: Call) -> None:
    found = json.loads(call("list", "settings", "*.lr", "--json")[1])["settings"]
    assert [setting["key"] for setting in found] == ["optim.lr", "evaluation.lr"]


def test_a_printed_preset_is_a_config(tmp_path: Path, call: Call) -> None:
    copy = tmp_path / "my.toml"
    for name in preset_names():
        copy.write_text(call("preset", name)[1])
        assert load_config(str(copy)) == load_config(name)
