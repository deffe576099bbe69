"""The scripts that `init` writes, with substitutes for Flower's programs."""

import os
import subprocess
from pathlib import Path

import pytest

from helpers.waiting import runs, until
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.writing import initialise


@pytest.fixture
def moved(tmp_path: Path) -> Deployment:
    """A deployment folder that was moved to a path with a space."""
    made = Deployment(tmp_path / "fl", ("node-1", "node-2"), "fl.example.org", 9443)
    initialise(made)
    made.folder.rename(tmp_path / "another place")
    return Deployment.load(tmp_path / "another place")


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "FLOWER_BIN": str(folder / "bin"), "PAUSE": "0"}


def test_a_refused_node_retries_until_it_is_stopped(moved: Deployment, tmp_path: Path) -> None:
    stand_in(
        tmp_path,
        "flower-supernode",
        'for word; do echo "$word"; done > words; echo x >> starts; [ $(wc -l < starts) -ge 3 ] || exit 49; '
        "echo $$ > pid; exec sleep 300",
    )
    node = moved.node("node-1")
    script = subprocess.Popen([node / "start.sh"], env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    until(lambda: (node / "pid").exists() and (node / "pid").read_text())
    pid = int((node / "pid").read_text())
    assert runs(pid)
    script.terminate()
    _, said = script.communicate(timeout=60)
    assert said.count("ended with code 49; it starts again") == 2
    until(lambda: not runs(pid))
    words = (node / "words").read_text().splitlines()
    assert words[words.index("--superlink") + 1] == "fl.example.org:9443"
    assert words[words.index("--node-config") + 1] == f'settings="{node}/node.toml"'
    for option, name in (("--root-certificates", "ca.crt"), ("--auth-supernode-private-key", "node.key")):
        assert words[words.index(option) + 1] == str(node / name)


def test_registering_twice_succeeds_but_a_refusal_fails(moved: Deployment, tmp_path: Path) -> None:
    def register() -> subprocess.CompletedProcess[str]:
        script = moved.server / "register-nodes.sh"
        return subprocess.run([script], env=environment(tmp_path), capture_output=True, text=True, timeout=60)

    stand_in(
        tmp_path, "flwr", """case "$*" in *node-1*) echo '"success": true';; *) echo 'key already in use';; esac"""
    )
    assert register().stdout == "node-1: registered\nnode-2: was registered before\n"
    config = (moved.server / "flower-home/config.toml").read_text()
    assert f'root-certificates = "{moved.server}/ca.crt"' in config
    stand_in(tmp_path, "flwr", "echo no connection")
    refused = register()
    assert refused.returncode == 1
    assert "node-2: not registered: no connection" in refused.stderr


def test_the_run_script_passes_the_config_and_the_run_folder(moved: Deployment, tmp_path: Path) -> None:
    stand_in(tmp_path, "flwr", 'for word; do echo "$word"; done')
    asked = subprocess.run(
        [moved.server / "run.sh"], env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert f'config="{moved.server}/federation.toml" run-dir="{moved.server}/run"' in asked.stdout.splitlines()
