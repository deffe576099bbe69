"""Real programs survive kill -9 of a node, of the server and of the SuperLink, and a network failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.deployments import ONE_ROUND, assert_same_as_in_process, deployed, to_the_end
from helpers.federations import ENCODERS
from helpers.sabotage import Saboteur, kill_server
from hetero_ssfl.deploy.local import LocalDeployment

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.soak
# A network of its own, with the same user as here: nginx started as root gives its folders to another user.
PRIVATE = ["unshare", *([] if os.geteuid() == 0 else ["--map-current-user", "--keep-caps"]), "--net", "sh", "-c"]


@pytest.mark.timeout(600)  # waits until dead nodes are removed
def test_a_run_survives_the_loss_of_a_node_the_server_the_superlink_and_the_network(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m helpers.sabotage {tmp_path / 'root'}"
    whole = ["sh", "-c", command]
    if not subprocess.run([*PRIVATE, "ip link set lo up"], capture_output=True).returncode:
        whole = [*PRIVATE, f"ip link set lo up && {command} cut"]
    done = subprocess.run(whole, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(600)  # Flower notices the dead server after a minute
def test_a_server_killed_in_its_round_changes_no_number(tmp_path: Path) -> None:
    root = tmp_path / "there"
    with LocalDeployment(deployed(root, *ONE_ROUND, encoders=ENCODERS[:2])) as running:
        saboteur = Saboteur(running.run_dir, {1: lambda: kill_server(root)})
        saboteur.start()
        there = to_the_end(running, seconds=300)
    assert saboteur.done == [1]
    assert_same_as_in_process(there, tmp_path / "here", ENCODERS[:2])
