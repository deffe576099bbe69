"""What a node's faults tell the server: a code and a sentence, but no names, paths or values of its data."""

import json
import re
from pathlib import Path

import pytest

from helpers.rig import Rig
from helpers.saved import lines
from hetero_ssfl.errors import ConfigError, DataError, DivergedError, ProtocolError, RunError
from hetero_ssfl.federation.client.faults import full_text, public_text
from hetero_ssfl.runs.files import write_json

PATIENT = "patient-0417.png"


def everything_the_server_has(rig: Rig) -> str:
    """Return the text of all files of the run folder and of all events, which also go to the server's log."""
    files = [path.read_bytes().decode("latin-1") for path in rig.folder.path.rglob("*") if path.is_file()]
    return "\n".join([*files, *(json.dumps(event) for event in rig.events)])


def test_nothing_that_the_server_writes_names_a_nodes_files(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "federation", "rounds=1")

    def spoil() -> None:
        home = rig.root / "node-1"
        (home / "images" / "class-0" / PATIENT).write_bytes(b"not an image")

    rig.at["begin", 1] = spoil
    rig.run()
    (reason,) = [e["excluded"] for e in lines(rig.folder) if "excluded" in e]
    found = re.fullmatch(
        r"node-1 failed: data: its images cannot be used \(fault (\w{8}); faults\.log in its home has the details\)"
        r" \(Flower error \d+\)\.",
        reason,
    )
    assert found, reason
    kept = [json.loads(line) for line in (rig.root / "node-1" / "state" / "faults.log").read_text().splitlines()]
    (own,) = [entry["text"] for entry in kept if entry["fault"] == found[1]]
    assert PATIENT in own  # what the server must not have is in the node's own log
    written = everything_the_server_has(rig)
    assert "node-1" in written
    for private in (PATIENT, "class-0", "node-1/images", str(rig.root / "node-1")):
        assert private not in written, private


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("image 7 (secret.png) is broken"), "data: its images cannot be used ("),
        (ConfigError("encoder '/secret:Net' fails"), "settings: its settings, or the code that they name, cannot"),
        (RunError("cannot write '/secret'"), "files: it cannot read or write its own files ("),
        (MemoryError("secret"), "memory: it ran out of memory ("),
        (ValueError("value 0417 of secret.png"), "code: its own code failed with ValueError ("),
    ],
)
def test_each_kind_of_error_has_a_sentence(error: Exception, said: str, tmp_path: Path) -> None:
    text = public_text(error, tmp_path)
    assert text.startswith(said)
    assert "secret" not in text
    assert str(error) in json.loads((tmp_path / "faults.log").read_text())["text"]


@pytest.mark.parametrize("error", [ProtocolError("its limit is 3."), DivergedError("the loss of a is nan.")])
def test_refusals_are_told_as_they_are_and_write_nothing(error: Exception, tmp_path: Path) -> None:
    assert public_text(error, tmp_path) == f"{type(error).__name__}: {error}"
    assert not list(tmp_path.iterdir())


def test_the_systems_reason_is_told_without_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError) as raised:
        write_json(tmp_path / "file" / "secret.json", {})
    assert "secret.json" in str(raised.value)
    assert "its own files: File exists (fault" in public_text(raised.value, None)


def test_on_one_machine_the_whole_text_is_told() -> None:
    def fail() -> None:
        raise ValueError("boom")

    try:
        fail()
    except ValueError as error:
        *frames, last = full_text(error).splitlines()
    assert last == f"ValueError: boom ({__file__}, line {fail.__code__.co_firstlineno + 1}, in fail)"
    assert f'File "{__file__}", line {fail.__code__.co_firstlineno + 1}, in fail' in "\n".join(frames)
    assert full_text(DataError("image 7 is broken.")) == "DataError: image 7 is broken."
