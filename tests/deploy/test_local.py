"""A rehearsal with Flower's programs on loopback: unknown nodes are refused, and failed programs are restarted.

Without nginx, as on a machine that does not have it. test_proxy.py and test_federation.py rehearse with it.
"""

import json
import os
import signal
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.waiting import group_runs, until
from hetero_ssfl.cli import app
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy import layout, local, pki
from hetero_ssfl.deploy.check_files import free_ports
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import Rehearsal, free_port
from hetero_ssfl.deploy.watch import RunWatch
from hetero_ssfl.deploy.write import initialise
from hetero_ssfl.errors import ConfigError, RunError
from hetero_ssfl.report.progress import RunView
from hetero_ssfl.runs.events import Event, RoundDone, Warned
from hetero_ssfl.terminal import Console


def deployment(folder: Path, *nodes: str) -> Deployment:
    it = Deployment(folder, nodes, port=free_port())
    initialise(it)
    return it


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """One SuperLink and three nodes: a valid one, one with an unregistered key, one that trusts another CA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SUPERLINK_PORT", free_port())  # written into flwr.sh
        patch.setenv("ALLOW_ROOT", "yes")
        yield from _meeting(tmp_path_factory.mktemp("meeting") / "fl")


def _meeting(folder: Path) -> Iterator[Rehearsal]:
    it = deployment(folder, "good", "unregistered", "mistrusting")
    (it.server / "node-keys/unregistered.pub").write_bytes(pki.node_key()[1])
    (it.node("mistrusting") / "ca.crt").write_bytes(pki.new_authority().certificate_pem())
    with Rehearsal(it, it.superlink_port, proxy=False) as rehearsal:
        rehearsal.start_superlink()
        rehearsal.register_nodes()
        for name in it.nodes:
            rehearsal.start_node(name)
        until(lambda: "SuperNode ID" in rehearsal.processes["good"].log.read_text())
        yield rehearsal


@pytest.mark.parametrize(
    ("name", "reason"), [("unregistered", "Failed to activate SuperNode"), ("mistrusting", "CERTIFICATE_VERIFY_FAILED")]
)
def test_a_node_without_valid_credentials_never_takes_part(meeting: Rehearsal, name: str, reason: str) -> None:
    node = meeting.processes[name]
    until(lambda: not node.alive)
    assert reason in node.last_words()
    assert "SuperNode ID" not in node.log.read_text()
    assert meeting.online() == 1, "only the good one"
    assert meeting.processes["good"].alive


def test_a_new_node_is_registered_with_the_running_superlink(meeting: Rehearsal) -> None:
    (meeting.deployment.server / "federation.toml").write_text("[clients]\ncount = 3\nseats = [{ name = 'good' }]\n")
    shown = CliRunner().invoke(app, ["deploy", "add-node", str(meeting.deployment.folder), "late"])
    assert shown.exit_code == 0, shown.output
    known = {node["node-id"] for node in meeting.flwr("supernode", "list", "hetero-ssfl", "--format", "json")["nodes"]}
    seat = load_config(str(meeting.deployment.server / "federation.toml")).clients.seats[0].node
    assert str(seat) in {str(node) for node in known}
    assert f"has registered its key as node {seat}" in shown.stdout
    assert "register-nodes.sh" not in shown.stdout


def test_a_running_deployment_is_recognised_by_its_certificate(meeting: Rehearsal) -> None:
    it = meeting.deployment
    for certificate, level in ((it.server / "server.crt", "ok"), (it.node("good") / "local.crt", "stops")):
        ((found, text),) = free_ports(iter([(it.loopback, meeting.superlink_port)]), certificate)
        assert found == level, text


def test_nobody_else_can_read_the_files_of_a_rehearsal(meeting: Rehearsal) -> None:
    """The SuperLink's database contains a token with which anyone could act as the server app."""
    database = meeting.place / "superlink.db"
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    for folder in (meeting.place, meeting.logs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_can_have_only_one_rehearsal_at_a_time(meeting: Rehearsal) -> None:
    with pytest.raises(RunError, match="is already rehearsing"):
        Rehearsal(meeting.deployment).__enter__()


def test_a_port_in_use_is_reported(meeting: Rehearsal, tmp_path: Path) -> None:
    other = deployment(tmp_path / "fl", "node-1")
    with (
        Rehearsal(other, meeting.port, proxy=False) as rehearsal,
        pytest.raises(RunError, match=f"port {meeting.port} is in use"),
    ):
        rehearsal.start_superlink()


def test_an_expired_certificate_of_a_node_is_named_before_anything_starts(tmp_path: Path) -> None:
    it = deployment(tmp_path / "fl", "node-1", "node-2")
    client = pki.client_certificate(pki.new_authority(), "node-2", 1, datetime.now(UTC) - timedelta(days=2))
    (it.node("node-2") / "client.crt").write_bytes(client.certificate_pem())
    rehearsal = Rehearsal(it)
    rehearsal.proxied = True
    with pytest.raises(ConfigError, match=r"of node-2 expired on .* deploy renew .* --node node-2"):
        rehearsal.check_certificates()


def test_nodes_refuse_a_server_with_an_expired_certificate(tmp_path: Path) -> None:
    it = deployment(tmp_path / "fl", "node-1")
    authority = pki.load((it.folder / "ca/ca.crt").read_bytes(), (it.folder / "ca/ca.key").read_bytes())
    old = pki.server_certificate(authority, it.host, 1, datetime.now(UTC) - timedelta(days=2))
    (it.server / "server.crt").write_bytes(old.certificate_pem())
    (it.server / "server.key").write_bytes(old.key_pem())
    with Rehearsal(it, proxy=False) as rehearsal:
        rehearsal.start_superlink()
        rehearsal.start_node("node-1")
        node = rehearsal.processes["node-1"]
        until(lambda: not node.alive)
        assert "certificate has expired" in node.last_words()
        with pytest.raises(RunError, match="cannot be registered"):
            rehearsal.register_nodes()
        assert "POST" not in rehearsal.processes["superlink"].log.read_text(), "no request came through"
        with pytest.raises(ConfigError, match="hetero-ssfl deploy renew"):
            rehearsal.start_all()


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


class Killing(RunView):
    """A view that kills the SuperLink when the second round is done."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__(Console(quiet=True), "test")
        self.rehearsal, self.seen = rehearsal, list[Event]()

    def __call__(self, event: Event) -> None:
        self.seen.append(event)
        if isinstance(event, RoundDone) and event.round == 2:
            os.kill(self.rehearsal.processes["superlink"].pid, signal.SIGKILL)


@pytest.mark.soak
def test_a_rehearsal_finishes_despite_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PAUSE", 1.0)
    it = deployment(tmp_path / "fl", "node-1")
    (it.server / "app/counting.py").write_text(APP)
    app = (it.server / "app/pyproject.toml").read_text()
    app = app.replace("hetero_ssfl.federation.superlink:server_app", "counting:server_app")
    app = app.replace("hetero_ssfl.federation.client.app:app", "counting:client_app")
    (it.server / "app/pyproject.toml").write_text(app)
    rehearsal = Rehearsal(it, proxy=False)
    view = Killing(rehearsal)
    with rehearsal:
        rehearsal.run(RunWatch(rehearsal.run_dir, view))
        rehearsal.register_nodes()  # registering again is safe
        groups = [process.pid for process in rehearsal.processes.values()]
    assert json.loads((rehearsal.run_dir / "results.json").read_text())["nodes"] <= 1
    warnings = [event.text for event in view.seen if isinstance(event, Warned)]
    assert any("ServerApp failed with exception: the first start fails" in text for text in warnings)
    assert any("superlink ended (signal 9)" in text for text in warnings)
    assert [event.round for event in view.seen if isinstance(event, RoundDone)] == [1, 2, 3]
    until(lambda: not any(group_runs(group) for group in groups))


class Failing(Rehearsal):
    """A rehearsal whose server app fails after the planned numbers of rounds."""

    plan = (0, 0, 1, 1, 1, 9)

    def start_all(self) -> None:
        self.starts = 0

    def run_once(self, watch: RunWatch) -> str:
        self.starts += 1
        watch.round = self.plan[self.starts - 1]
        return "no RAD"

    def attend(self, watch: RunWatch, seconds: float = 0.0) -> None:
        pass


def test_a_server_that_keeps_failing_is_restarted_only_while_rounds_finish(tmp_path: Path) -> None:
    it = deployment(tmp_path / "fl", "node-1")
    rehearsal = Failing(it)
    with rehearsal:
        watch = RunWatch(rehearsal.run_dir, RunView(Console(quiet=True), "test"))
        with pytest.raises(RunError, match="failed 3 times in a row: no RAD") as raised:
            rehearsal.run(watch)
    assert str(rehearsal.logs / "run.log") in str(raised.value)
    assert rehearsal.starts == 5, "the round done at the third start makes it worth two more"
