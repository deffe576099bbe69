"""What a node logs about its work, and what happens if its version is not the server's."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import Message

from helpers.rig import Rig
from hetero_ssfl.errors import ProtocolError, RunError
from hetero_ssfl.federation import logs, wire


@pytest.fixture
def fresh_logger() -> Iterator[None]:
    """A process of its own has no handlers yet."""
    logger = logging.getLogger("hetero_ssfl")
    before, logger.handlers = logger.handlers, []
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.propagate = before, True


def test_a_nodes_log_names_rounds_and_sizes_and_no_content(tmp_path: Path, fresh_logger: None) -> None:
    rig = Rig(tmp_path, "rounds=1")
    folder = rig.run()
    lines = [json.loads(line) for line in (tmp_path / "node-0" / "state" / "node.log").read_text().splitlines()]
    assert {line["level"] for line in lines} <= {"info", "warning"}
    texts = [line["text"] for line in lines]
    sent = [text for text in texts if text.startswith("round 1, train: sends")]
    assert sent
    (factor,) = folder.shares("node-0").load(1).values()
    assert f"float32 {list(factor.shape)}" in sent[0]
    assert any(text.startswith("round 1: training on") for text in texts)
    assert max(map(len, texts)) < 2000


def test_a_log_file_is_rotated(tmp_path: Path, fresh_logger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 2000)
    logger = logs.log_to_stderr("node")
    for _ in range(2):
        logs.log_to_file("node", tmp_path / "node.log")
    for k in range(100):
        logger.info("line %d", k)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["node.log", "node.log.1", "node.log.2", "node.log.3"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert json.loads(files[0].read_text().splitlines()[-1])["text"] == "line 99"


@pytest.mark.parametrize(("version", "fits"), [("0.1.9", True), ("0.2.0", False), ("1.1.0", False), ("x" * 99, False)])
def test_only_the_same_minor_version_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    fields: dict[str, wire.Scalar] = {"version": version}
    wire.check_version({}, "an older one")
    if fits:
        wire.check_version(fields, "it")
        return
    with pytest.raises(ProtocolError, match=r"expected 0\.1\.x\. Install the same version"):
        wire.check_version(fields, "it")


def test_the_server_refuses_a_node_of_another_version(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "engine.join_timeout=1", "engine.round_timeout=2")

    def other(_: Message, reply: Message) -> Message:
        reply.content.config_records["settings"]["version"] = "9.9.0"
        return reply

    rig.grid.tamper[101] = other
    with pytest.raises(RunError, match=r"'9\.9\.0', expected 0\.1\.x"):
        rig.run()
