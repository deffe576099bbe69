"""A deployment on this machine with Flower's programs: unknown nodes are refused, and everything ends.

Without nginx, as on a machine that does not have it. test_proxy.py and test_federation.py use it.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.deployments import flwr, kill_program
from helpers.waiting import group_runs, runs, until
from hetero_ssfl.cli import app
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy import layout, local, pki
from hetero_ssfl.deploy.check_machine import free_ports
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import LocalDeployment, RunWatch, free_port
from hetero_ssfl.deploy.write import initialise
from hetero_ssfl.errors import RunError
from hetero_ssfl.report.progress import RunView
from hetero_ssfl.terminal import Console


def deployment(folder: Path, *nodes: str) -> Deployment:
    it = Deployment(folder, nodes, port=free_port())
    initialise(it)
    return it


def log(running: LocalDeployment, name: str) -> str:
    return (running.logs / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """One SuperLink and three nodes: a valid one, one with an unregistered key, one that trusts another CA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SUPERLINK_PORT", free_port())  # written into flwr.sh
        patch.setenv("ALLOW_ROOT", "yes")
        yield from _meeting(tmp_path_factory.mktemp("meeting") / "fl")


def _meeting(folder: Path) -> Iterator[LocalDeployment]:
    it = deployment(folder, "good", "unregistered", "mistrusting")
    (it.server / "node-keys/unregistered.pub").write_bytes(pki.node_key()[1])
    (it.node("mistrusting") / "ca.crt").write_bytes(pki.new_authority().certificate_pem())
    with LocalDeployment(it, it.superlink_port, proxy=False) as running:
        running.start_superlink()
        running.register_nodes()
        for name in it.nodes:
            running.start_node(name)
        until(lambda: "SuperNode ID" in log(running, "good"))
        yield running


@pytest.mark.parametrize(
    ("name", "reason"), [("unregistered", "Failed to activate SuperNode"), ("mistrusting", "CERTIFICATE_VERIFY_FAILED")]
)
def test_a_node_without_valid_credentials_never_takes_part(meeting: LocalDeployment, name: str, reason: str) -> None:
    until(lambda: reason in log(meeting, name))
    assert "SuperNode ID" not in log(meeting, name)
    nodes = flwr(meeting, "supernode", "list", "hetero-ssfl")["nodes"]
    assert [node["status"] for node in nodes].count("online") == 1, "only the good one"


def test_a_new_node_is_registered_with_the_running_superlink(meeting: LocalDeployment) -> None:
    (meeting.source.server / "federation.toml").write_text("[clients]\ncount = 3\nseats = [{ name = 'good' }]\n")
    shown = CliRunner().invoke(app, ["deploy", "add-node", str(meeting.source.folder), "late"])
    assert shown.exit_code == 0, shown.output
    known = {node["node-id"] for node in flwr(meeting, "supernode", "list", "hetero-ssfl")["nodes"]}
    seat = load_config(str(meeting.source.server / "federation.toml")).clients.seats[0].node
    assert str(seat) in {str(node) for node in known}
    assert f"has registered its key as node {seat}" in shown.stdout
    assert "register-nodes.sh" not in shown.stdout


def test_a_running_deployment_is_recognised_by_its_certificate(meeting: LocalDeployment) -> None:
    it = meeting.source
    for certificate, level in ((it.server / "server.crt", "ok"), (it.node("good") / "local.crt", "stops")):
        ((shown, text),) = free_ports([(it.loopback, meeting.superlink_port)], certificate)
        assert shown == level, text


def test_nobody_else_can_read_the_files_of_a_test(meeting: LocalDeployment) -> None:
    """The SuperLink's database contains a token with which anyone could act as the server app."""
    database = meeting.deployment.server / "superlink.db"
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    for folder in (meeting.deployment.folder, meeting.logs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (meeting.source.server / "superlink.db").exists(), "the deployment itself stays as it was"


def test_a_folder_can_be_tested_only_once_at_a_time(meeting: LocalDeployment) -> None:
    with pytest.raises(RunError, match="another process"):
        LocalDeployment(meeting.source).__enter__()


def test_a_port_in_use_is_reported(meeting: LocalDeployment, tmp_path: Path) -> None:
    other, port = deployment(tmp_path / "fl", "node-1"), meeting.deployment.port
    with LocalDeployment(other, port, proxy=False) as running, pytest.raises(RunError, match=f"port {port} is in use"):
        running.start_superlink()


def test_nodes_refuse_a_server_with_an_expired_certificate(tmp_path: Path) -> None:
    it = deployment(tmp_path / "fl", "node-1")
    authority = pki.load((it.folder / "ca/ca.crt").read_bytes(), (it.folder / "ca/ca.key").read_bytes())
    old = pki.server_certificate(authority, it.host, 1, datetime.now(UTC) - timedelta(days=2))
    (it.server / "server.crt").write_bytes(old.certificate_pem())
    (it.server / "server.key").write_bytes(old.key_pem())
    with LocalDeployment(it, proxy=False) as running:
        running.start_superlink()
        running.start_node("node-1")
        until(lambda: "certificate has expired" in log(running, "node-1"))
        with pytest.raises(RunError, match="does not accept the nodes' keys: node-1"):
            running.register_nodes()
        assert "POST" not in log(running, "superlink"), "no request came through"


# --- scripts as child processes, without Flower ---

CHILDREN = "sleep 300 & echo $!; wait"  # a script with a child, whose id it prints


def write_script(running: LocalDeployment, text: str) -> str:
    script = running.deployment.server / "test.sh"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return "server/test.sh"


@pytest.mark.parametrize("script", [CHILDREN, f"trap '' TERM; {CHILDREN}"])
def test_scripts_end_with_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(local, "GRACE", 0.5)
    with LocalDeployment(deployment(tmp_path / "fl", "node-1"), proxy=False) as running:
        running.start("test", write_script(running, script))
        until(lambda: log(running, "test"))
        child = int(log(running, "test"))
        assert runs(child)
    until(lambda: not runs(child))
    assert running.processes["test"].poll() is not None


def test_everything_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    deployment(tmp_path / "fl", "node-1")
    program = (
        "import time; from pathlib import Path; from hetero_ssfl.deploy.layout import Deployment\n"
        "from hetero_ssfl.deploy.local import LocalDeployment\n"
        "running = LocalDeployment(Deployment.load(Path('fl')), proxy=False).__enter__()\n"
        f"script = running.deployment.server / 'run.sh'; script.write_text({f'#!/bin/sh{os.linesep}{CHILDREN}'!r})\n"
        "running.start('test', 'server/run.sh'); print(running.processes['test'].pid, flush=True); time.sleep(300)"
    )
    command = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    group = int(command.stdout.readline())
    assert group_runs(group)
    command.kill()
    command.wait()
    until(lambda: not group_runs(group))


def test_a_script_that_cannot_start_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with LocalDeployment(deployment(tmp_path / "fl", "node-1"), proxy=False) as running:
        script = write_script(running, "echo nginx is missing; exit 2")
        with pytest.raises(RunError, match=r"test did not start: nginx is missing\. .*logs/test\.log"):
            running.start("test", script, free_port())


def test_a_second_test_keeps_states_and_links_what_is_new(tmp_path: Path) -> None:
    it = deployment(tmp_path / "fl", "node-1")
    with LocalDeployment(it, proxy=False) as running:
        (running.deployment.node("node-1") / "state").mkdir()
        (running.deployment.server / "superlink.db").write_text("of an earlier SuperLink")
    (it.node("node-1") / "my_encoder.py").write_text("")
    (it.server / "superlink.db").write_text("of the deployment")
    with LocalDeployment(it, proxy=False) as running:
        names = {path.name for path in running.deployment.node("node-1").iterdir()}
        assert {"state", "my_encoder.py", "node.toml"} <= names
        assert not (running.deployment.server / "superlink.db").exists()
        assert not (running.deployment.node("node-1") / "start.sh").is_symlink()
    assert (it.server / "superlink.db").read_text() == "of the deployment"


APP = '''
"""A federation that only counts. Its first start fails after the first round."""
import json, time
from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server_app = ServerApp()
client_app = ClientApp()

@server_app.main()
def main(grid, context):
    folder = Path(context.run_config["run-dir"])
    folder.mkdir(parents=True, exist_ok=True)
    events = folder / "events.jsonl"
    done = len(events.read_text().splitlines()) if events.exists() else 0
    while not list(grid.get_node_ids()):
        time.sleep(0.1)
    for number in range(done + 1, 4):
        time.sleep(1)
        with events.open("a") as file:
            file.write(json.dumps({"event": "round", "round": number, "seconds": 1.0}) + "\\n")
        if number == 1:
            raise RuntimeError("the first start fails")
    (folder / "results.json").write_text(json.dumps({"nodes": len(list(grid.get_node_ids()))}))
'''


@pytest.mark.soak
def test_a_failed_run_is_continued_and_programs_that_die_start_again(tmp_path: Path) -> None:
    it = deployment(tmp_path / "fl", "node-1")
    (it.server / "app/counting.py").write_text(APP)
    app = (it.server / "app/pyproject.toml").read_text()
    app = app.replace("hetero_ssfl.federation.superlink:server_app", "counting:server_app")
    app = app.replace("hetero_ssfl.federation.client.app:app", "counting:client_app")
    (it.server / "app/pyproject.toml").write_text(app)
    with LocalDeployment(it, proxy=False) as running:
        watch = RunWatch(running.run_dir, RunView(Console(quiet=True), "test"))
        running.start_all()
        with pytest.raises(RunError, match=r"ended early: .*the first start fails.*logs/run\.log"):
            running.run(watch)
        assert (watch.round, watch.finished) == (1, False)
        assert "the first start fails" in log(running, "run") + log(running, "superexec")
        before = log(running, "superlink").count("Started server process")
        kill_program(running, "superlink")
        until(lambda: log(running, "superlink").count("Started server process") > before)
        running.register_nodes()  # registering again is safe
        running.run(watch)
        groups = [process.pid for process in running.processes.values()]
    assert (watch.round, watch.finished) == (3, True)
    until(lambda: not any(group_runs(group) for group in groups))
