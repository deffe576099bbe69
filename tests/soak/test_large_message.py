"""A message of 100 MB through a real SuperLink."""

import shutil
from pathlib import Path

import pytest

from helpers.deployments import deployed, to_the_end
from helpers.federations import write_federation, write_node
from helpers.saved import lines
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.local import LocalDeployment

pytestmark = pytest.mark.soak


def test_a_message_of_100_mb_is_carried_in_both_directions(tmp_path: Path) -> None:
    """Average the weights of a wide transformer (25 million, float32), with the repository itself as the app."""
    wide = "vit(width=1800, depth=1, heads=2)"
    it = deployed(tmp_path, encoders=(wide,), images=8)
    settings = write_node(it.node("node-0"), "node-0", wide, more="[limits]\nweights_may_leave = true\n")
    settings.write_text(settings.read_text() + "limit = 8\n")
    federation, _ = write_federation(tmp_path / "averaging", (wide,), images=8)
    averaging = ["method=fedsimsiam", "ssl.kind=simsiam", "evaluation.probes=[]", "rounds=1"]
    (it.server / "federation.toml").write_text(load_config(str(federation), averaging).to_toml())
    shutil.rmtree(it.server / "app")
    (it.server / "app").symlink_to(Path(__file__).parents[2])
    with LocalDeployment(it) as running:
        folder = to_the_end(running)
    (event,) = [e for e in lines(folder) if e["event"] == "client" and e["round"] == 1]
    assert event["bytes_up"] > 100 * 10**6
    assert event["bytes_down"] > 100 * 10**6
