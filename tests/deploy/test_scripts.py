"""The scripts that `init` writes, with substitutes for Flower's programs and nginx."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from helpers.waiting import runs, until
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.write import initialise


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
    return {**os.environ, "FLOWER_BIN": str(folder / "bin"), "PAUSE": "0", "ALLOW_ROOT": "yes"}


def test_a_refused_node_retries_until_it_is_stopped(moved: Deployment, tmp_path: Path) -> None:
    stand_in(
        tmp_path,
        "flower-supernode",
        'echo "$PYTHONPATH" > modules; '
        'for word; do echo "$word"; done > words; echo x >> starts; [ $(wc -l < starts) -ge 3 ] || exit 49; '
        "echo $$ > pid; exec sleep 300",
    )
    stand_in(tmp_path, "nginx", 'echo $$ "$@" > nginx; exec sleep 300')
    node = moved.node("node-1")
    config = node / "forwarder.conf"
    config.write_text(config.read_text().replace("listen 127.0.0.1:9095", "listen 127.0.0.1:7777"))
    script = subprocess.Popen([node / "start.sh"], env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    until(lambda: all((node / name).exists() and (node / name).read_text() for name in ("pid", "nginx")))
    pid, (forwarder, *options) = int((node / "pid").read_text()), (node / "nginx").read_text().split(maxsplit=1)
    assert runs(pid)
    assert runs(int(forwarder))
    assert options == [f"-e stderr -p {node}/ -c {node}/forwarder.conf\n"]
    assert stat.S_IMODE((node / "pid").stat().st_mode) == 0o600, "files of the programs are for their owner only"
    script.terminate()
    _, said = script.communicate(timeout=60)
    assert said.count("ended with code 49; it starts again") == 2
    until(lambda: not runs(pid) and not runs(int(forwarder)))
    words = (node / "words").read_text().splitlines()
    assert (node / "modules").read_text().strip().split(":")[-1] == str(node), "it finds modules next to node.toml"
    assert words[words.index("--superlink") + 1] == "127.0.0.1:7777", "the port of forwarder.conf"
    assert words[words.index("--node-config") + 1] == f'settings="{node}/node.toml"'
    for option, name in (("--root-certificates", "local.crt"), ("--auth-supernode-private-key", "node.key")):
        assert words[words.index(option) + 1] == str(node / name)


def test_an_nginx_that_outlived_a_killed_script_is_ended_and_no_other(moved: Deployment, tmp_path: Path) -> None:
    stand_in(tmp_path, "flower-supernode", "exec sleep 300")
    stand_in(tmp_path, "nginx", "echo $$ > forwarder.pid; while :; do sleep 0.2; done")
    node, other = moved.node("node-1"), moved.node("node-2")
    file = node / "forwarder.pid"

    def start(folder: Path) -> tuple["subprocess.Popen[bytes]", int]:
        before = (folder / "forwarder.pid").read_text() if (folder / "forwarder.pid").exists() else ""
        script = subprocess.Popen([folder / "start.sh"], env=environment(tmp_path), start_new_session=True)
        pid = folder / "forwarder.pid"
        until(lambda: pid.exists() and pid.read_text() not in ("", before))
        return script, int(pid.read_text())

    neighbour, unrelated = start(other)
    script, orphan = start(node)
    script.kill()
    script.wait()
    assert runs(orphan)
    again, new = start(node)
    until(lambda: not runs(orphan))
    assert (runs(new), runs(unrelated)) == (True, True)
    again.terminate()
    again.wait(timeout=60)
    file.write_text(str(unrelated))  # a number that now belongs to another program
    last, _ = start(node)
    assert runs(unrelated)
    for process in (last, neighbour):
        process.terminate()
        process.wait(timeout=60)
    for process in (script, again, last, neighbour):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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


@pytest.mark.parametrize("script", ["nodes/node-1/start.sh", "server/start-superlink.sh", "server/start-proxy.sh"])
def test_programs_do_not_run_as_root(moved: Deployment, tmp_path: Path, script: str) -> None:
    stand_in(tmp_path, "id", "echo 0")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    told = {**environment(tmp_path), "PATH": path, "ALLOW_ROOT": ""}
    done = subprocess.run([moved.folder / script], env=told, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "as root: use an ordinary account" in done.stderr


@pytest.mark.parametrize("script", ["nodes/node-1/start.sh", "server/start-proxy.sh", "server/reload-proxy.sh"])
def test_a_machine_without_nginx_is_told_so(moved: Deployment, tmp_path: Path, script: str) -> None:
    loop = (moved.folder / script).parent / "keep-running.sh"
    loop.write_text(loop.read_text().replace("/usr/sbin:/usr/local/sbin:/opt/homebrew/bin", "/nowhere"))
    (tmp_path / "bin").mkdir()
    for name in ("sh", "id", "dirname", "basename"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    told = {**environment(tmp_path), "PATH": str(tmp_path / "bin")}
    done = subprocess.run([moved.folder / script], env=told, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "nginx is not installed. Install it (apt-get install nginx)" in done.stderr


def test_the_proxy_is_reloaded_only_with_a_valid_configuration(moved: Deployment, tmp_path: Path) -> None:
    stand_in(tmp_path, "nginx", 'echo "$@" >> asked; case "$*" in *"-t -q") exit ${INVALID:-0};; esac')
    script = moved.server / "reload-proxy.sh"
    subprocess.run([script], env=environment(tmp_path), check=True, timeout=60)
    told = {**environment(tmp_path), "INVALID": "1"}
    assert subprocess.run([script], env=told, timeout=60).returncode == 1
    asked = (moved.server / "asked").read_text().splitlines()
    assert [line.rsplit("proxy.conf ")[1] for line in asked] == ["-t -q", "-s reload", "-t -q"]


def test_the_scripts_become_services_of_the_account(moved: Deployment, tmp_path: Path) -> None:
    stand_in(tmp_path, "systemctl", 'echo "$@" >> calls')
    told = {**environment(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_RUNTIME_DIR": str(tmp_path)}
    for folder in (moved.server, moved.node("node-1")):
        subprocess.run([folder / "install-services.sh"], env=told, check=True, capture_output=True, timeout=60)
    calls = (moved.server / "calls").read_text().splitlines()
    servers = [f"hetero-ssfl-{name}" for name in ("superlink", "superexec", "proxy")]
    assert calls == ["--user daemon-reload", f"--user enable --now {' '.join(servers)}"], "the run is started by hand"
    units = sorted((tmp_path / "config/systemd/user").iterdir())
    assert [unit.stem for unit in units] == sorted([*servers, "hetero-ssfl-run", "hetero-ssfl-node-1"])
    for unit in units:
        assert "@" not in unit.read_text()
    assert f'ExecStart="{moved.node("node-1")}/start.sh"' in units[0].read_text()
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", *units], env=told, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
