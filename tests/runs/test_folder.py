import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero_ssfl.config import load_config
from hetero_ssfl.errors import LostStateError, ProtocolError, RunError
from hetero_ssfl.runs.events import RoundDone
from hetero_ssfl.runs.files import SavedTensors, load_tensors, save_tensors, write_atomically
from hetero_ssfl.runs.folder import RunFolder


def make(path: Path) -> RunFolder:
    return RunFolder.create(path, load_config("smoke"), lambda _: None)


def test_the_config_survives_a_round_trip(tmp_path: Path) -> None:
    make(tmp_path / "a")
    assert RunFolder.open(tmp_path / "a").read_config() == load_config("smoke")


def test_a_folder_whose_creation_failed_is_not_a_run(tmp_path: Path) -> None:
    def fail(_: RunFolder) -> None:
        raise RunError("no")

    with pytest.raises(RunError):
        RunFolder.create(tmp_path / "a", load_config("smoke"), fail)
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder.open(tmp_path / "a")


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    folder.write_json("environment.json", {"format": 99})
    with pytest.raises(RunError, match="format 99, expected 4"):
        RunFolder.open(tmp_path / "a")


def test_a_failed_write_keeps_the_old_content_and_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_and_metadata_survive_a_round_trip(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 2),
        "b": torch.arange(4),
        "c": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    save_tensors(tmp_path / "t", tensors, {"round": 3})
    loaded, about = load_tensors(tmp_path / "t")
    assert about == {"round": 3}
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)


def test_tied_weights_can_be_saved(tmp_path: Path) -> None:
    shared = torch.randn(3)
    save_tensors(tmp_path / "t", {"a": shared, "b": shared})
    loaded, _ = load_tensors(tmp_path / "t")
    assert torch.equal(loaded["a"], loaded["b"])


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_a_damaged_tensor_file_gives_a_one_sentence_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(RunError, match="cannot be read"):
        load_tensors(tmp_path / "t")


def test_saved_tensors_are_read_on_access(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", {"a": torch.ones(2), "b": torch.zeros(1)})
    saved = SavedTensors(tmp_path / "t")
    assert (sorted(saved), len(saved)) == (["a", "b"], 2)
    save_tensors(tmp_path / "t", {"a": torch.full((2,), 5.0)})
    assert torch.equal(saved["a"], torch.full((2,), 5.0))


def test_events_survive_an_incomplete_last_line(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    folder.append_events([RoundDone(1), RoundDone(2)])
    with (folder.path / "events.jsonl").open("a") as file:
        file.write('{"event": "round", "rou')
    assert folder.events() == [RoundDone(1), RoundDone(2)]


def test_events_count_up_to_the_commit_point(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    folder.append_events([RoundDone(1)])
    about = {"round": 1, "roster": [], "examples": {}, "shares": {}}
    save_tensors(folder.path / "server.safetensors", {}, {**about, "events": folder.log.mark()})
    folder.append_events([RoundDone(2)])
    assert RunFolder(folder.path).events() == [RoundDone(1)]
    again = RunFolder(folder.path)
    again.append_events([RoundDone(3)])
    whole = (folder.path / "events.jsonl").read_bytes()
    assert again.log.mark() == {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    (folder.path / "events.jsonl").write_bytes(whole.replace(b"1", b"7", 1))
    with pytest.raises(LostStateError, match=r"events.jsonl' does not match its digest.*Restore it from a copy"):
        folder.events()


def test_a_client_keeps_its_two_newest_rounds(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    for number in (1, 4, 9):
        folder.states("x").save(number, {"w": torch.tensor([float(number)])})
    assert folder.states("x").newest(limit=3) == 1  # until the server has saved the round
    folder.states("x").prune()
    assert folder.states("x").newest(limit=9) == 9
    assert folder.states("x").newest(limit=8) == 4
    with pytest.raises(ProtocolError, match=r"after round 3, but 'x' has only rounds \[4, 9\]"):
        folder.states("x").newest(limit=3)  # older rounds existed, so untrained networks would be wrong
    assert float(folder.states("x").load(4)["w"]) == 4.0


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    script = (
        "import sys; from pathlib import Path; from hetero_ssfl.runs.folder import RunFolder\n"
        "try:\n    with RunFolder(Path(sys.argv[1])).lock(): print('free')\n"
        "except Exception as error: print(type(error).__name__)"
    )
    command = [sys.executable, "-c", script, str(folder.path)]
    with folder.lock():
        assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "RunError"
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "free"
