"""A damaged file of a run folder is found and named, or replaced by repeating a round; it never changes a result.

`tests/soak/test_every_damage.py` continues an unfinished run after each kind of damage to each of its files.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.damage import DAMAGE, Killed, contents, damaged_copy, files_of, train
from helpers.whole_runs import assert_same, everything
from hetero_ssfl.errors import RunError
from hetero_ssfl.federation.start import continue_with
from hetero_ssfl.runs.check import check_run
from hetero_ssfl.runs.events import Event, Warned
from hetero_ssfl.runs.folder import RunFolder

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("finished") / "run").path


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds that was killed in the third."""
    path = tmp_path_factory.mktemp("unfinished") / "run"
    with pytest.raises(Killed):
        train(path, killed_in=3)
    return path


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Compare what was read from two runs."""
    if a.keys() != b.keys() or a["tensors"].keys() != b["tensors"].keys():
        return False
    rest = all(a[key] == b[key] for key in a if key != "tensors")
    return rest and all(torch.equal(value, b["tensors"][key]) for key, value in a["tensors"].items())


def attempt(read: Callable[[Path], Any], path: Path) -> Any:
    """Return what is read, or the text of the error."""
    try:
        return read(path)
    except RunError as error:
        return str(error)


def test_no_damage_to_a_finished_run_goes_unnoticed(finished: Path, tmp_path: Path) -> None:
    """Every kind of damage to every file: it is named, or what is read is the same."""
    whole, files = contents(finished), files_of(finished)
    assert len(files) >= 15
    harmless = []
    for file in files:
        for kind, damage in DAMAGE.items():
            copy = damaged_copy(finished, tmp_path / "copy", file, damage)
            found = attempt(contents, copy)
            if isinstance(found, str):
                assert Path(file).name in found, f"{file} {kind}: {found}"
                assert "\n" not in found
                continue
            assert same(whole, found), f"{file} {kind}"
            harmless.append((file, kind))
    unused = {"server-before.safetensors", *(f"clients/client-00{k}/round-000002.safetensors" for k in (0, 1))}
    unused |= {f"shares/client-00{k}/round-000002.safetensors" for k in (0, 1)}
    assert {file for file, kind in harmless if kind in ("emptied", "deleted")} <= unused


@pytest.mark.parametrize(
    ("file", "kind", "recovers"),
    [
        ("server.safetensors", "flipped in the middle", True),
        ("server.safetensors", "deleted", True),
        ("server-before.safetensors", "zeroed", True),
        ("clients/client-000/round-000002.safetensors", "flipped in the middle", True),
        ("clients/client-001/round-000002.safetensors", "deleted", True),
        ("clients/client-001/round-000001.safetensors", "emptied", True),
        ("shares/client-001/round-000002.safetensors", "cut", True),
        ("events.jsonl", "flipped at the end", True),
        ("events.jsonl", "flipped at the start", False),
        ("events.jsonl", "deleted", False),
        ("split.safetensors", "flipped in the middle", False),
        ("rad.safetensors", "flipped in the middle", False),
        ("facts.json", "cut", False),
        ("config.toml", "emptied", False),
    ],
)
def test_an_unfinished_run_repeats_a_damaged_round_to_the_same_bits_or_stops(
    finished: Path, unfinished: Path, tmp_path: Path, file: str, kind: str, recovers: bool
) -> None:
    copy = damaged_copy(unfinished, tmp_path / "run", file, DAMAGE[kind])
    warnings: list[str] = []

    def listen(event: Event) -> None:
        warnings.extend([event.text] if isinstance(event, Warned) else [])

    if not recovers:
        with pytest.raises(RunError, match=Path(file).name):
            train(copy, listen)
        return
    assert_same(everything(RunFolder(finished)), everything(train(copy, listen)))
    if any(file in text for text in warnings):
        assert "goes back to round 1 and repeats what followed" in warnings[0]
    else:  # it was not needed
        assert kind == "deleted" or "000001" in file or "before" in file or "shares" in file
    assert [finding.what for finding in check_run(copy) if not finding.ok] == ([file] if "shares" in file else [])


def test_a_number_changed_in_the_config_is_found_when_the_run_is_opened_or_continued(
    unfinished: Path, tmp_path: Path, call: Call
) -> None:
    path = tmp_path / "run"
    shutil.copytree(unfinished, path)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("rounds = 3", "rounds = 4"))
    for command in (["run", "--resume", path], ["status", path]):
        code, _, said = call(*command)
        assert code == 2
        assert "config.toml' does not match its digest" in said
        assert "To train with other settings, start another run" in said
        assert len(said.strip().splitlines()) == 1


def test_a_state_in_the_place_of_another_is_noticed(unfinished: Path, tmp_path: Path) -> None:
    shutil.copytree(unfinished, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    shutil.copy(folder.states("client-001").file(2), folder.states("client-000").file(2))
    with pytest.raises(RunError, match="holds the state of client-001 after round 2"):
        folder.states("client-000").load(2)


def test_a_run_goes_back_only_once(unfinished: Path, tmp_path: Path) -> None:
    """Both states of a client are damaged: going back one round does not help."""
    copy = damaged_copy(unfinished, tmp_path / "run", "clients/client-000/round-000002.safetensors", DAMAGE["emptied"])
    DAMAGE["emptied"](copy / "clients" / "client-000" / "round-000001.safetensors")
    with pytest.raises(RunError, match=r"round-000001.safetensors' cannot be read .* cannot be repeated"):
        train(copy)


def test_a_round_that_was_played_with_other_settings_is_not_repeated(unfinished: Path, tmp_path: Path) -> None:
    file = "clients/client-000/round-000002.safetensors"
    copy = damaged_copy(unfinished, tmp_path / "run", file, DAMAGE["emptied"])
    continue_with(RunFolder(copy), {"optim.lr": 0.001})
    with pytest.raises(RunError, match=r"round-000002.safetensors' cannot be read .* cannot be repeated"):
        train(copy)


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_check_run_lists_what_is_damaged(
    state: str, tmp_path: Path, call: Call, request: pytest.FixtureRequest
) -> None:
    run: Path = request.getfixturevalue(state)
    code, said, _ = call("check", "run", run)
    assert code == 0
    assert "damaged" not in said
    for file in files_of(run):
        copy = damaged_copy(run, tmp_path / "copy", file, DAMAGE["flipped in the middle"])
        code, said, _ = call("check", "run", copy)
        assert code == 1, file
        assert Path(file).name in said
    shutil.rmtree(copy / "clients" / "client-000")
    code, said, _ = call("check", "run", copy)
    assert (code, "client-000" in said, "is missing" in said) == (1, True, True)


@pytest.mark.parametrize("file", ["facts.json", "config.toml", "server.safetensors"])
def test_a_file_without_its_digest_is_damaged(file: str, finished: Path, tmp_path: Path) -> None:
    """One flipped bit in the word `sha256` must not make a file look as if it never had a digest."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    content = (run / file).read_bytes()
    assert b"sha256" in content
    (run / file).write_bytes(content.replace(b"sha256", b"sha257"))
    assert [finding.what for finding in check_run(run) if not finding.ok] == [file]


def test_a_run_of_another_format_is_refused(finished: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(finished, tmp_path / "run"))
    run.write_json("environment.json", {**run.read_json("environment.json"), "format": 3})
    with pytest.raises(RunError, match="format 3, expected 4"):
        RunFolder.open(run.path)
