"""A fault at a real SuperNode: neither the SuperLink's database nor any log of the server names the node's files."""

from pathlib import Path

import pytest

from helpers.deployments import deployed, to_the_end
from helpers.sabotage import Saboteur
from helpers.saved import lines
from hetero_ssfl.deploy.local import LocalDeployment

PATIENT = "patient-0417.png"
pytestmark = pytest.mark.soak


@pytest.mark.timeout(600)
def test_a_broken_image_at_a_node_is_named_only_there(tmp_path: Path) -> None:
    it = deployed(tmp_path / "there", "rounds=2", "engine.min_replies=2")
    images = it.node("node-1") / "images" / "class-0"
    with LocalDeployment(it) as running:
        spoil = Saboteur(running.run_dir, {1: lambda: _write(images / PATIENT)})
        spoil.start()
        run = to_the_end(running)
        servers = [path for path in (*running.deployment.folder.rglob("*"),) if path.is_file()]
        servers = [path for path in servers if "node-1" not in str(path.relative_to(running.deployment.folder))]
        written = {path: path.read_bytes() for path in servers}
    assert {"superlink.db", "superlink.log"} <= {path.name for path in written}
    excluded = [event["excluded"] for event in lines(run) if "excluded" in event]
    assert any("node-1 failed: data: its images cannot be used" in reason for reason in excluded), excluded
    assert any(PATIENT in path.read_text() for path in running.deployment.node("node-1").rglob("faults.log"))
    for private in (PATIENT, "class-0", str(images.parent)):
        assert [path.name for path, content in written.items() if private.encode() in content] == [], private


def _write(path: Path) -> None:
    path.write_bytes(b"not an image")
