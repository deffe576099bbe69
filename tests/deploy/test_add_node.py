"""`deploy add-node`, without a running SuperLink: what it writes and says. test_local.py registers with a real one."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from hetero_ssfl.cli import app
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy import add_node as adding
from hetero_ssfl.deploy import layout
from hetero_ssfl.deploy.add_node import add_node, seat_node
from hetero_ssfl.deploy.certificates import revoke_node
from hetero_ssfl.deploy.check_machine import agreement, node_certificates
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import free_port
from hetero_ssfl.deploy.write import initialise
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.participants import NodeSite
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.federation.start import open_run


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setattr(layout, "SUPERLINK_PORT", free_port())  # nothing listens there
    made = Deployment(tmp_path / "fl", ("node-1", "node-2"), "fl.example.org")
    initialise(made)
    return made


def call(it: Deployment, name: str) -> str:
    shown = CliRunner().invoke(app, ["deploy", "add-node", str(it.folder), name])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_node_has_what_the_others_have(it: Deployment) -> None:
    before = files(it.folder)
    assert call(it, "late").startswith("late was added; its client certificate is valid until 20")
    wider, after = Deployment.load(it.folder), files(it.folder)
    assert wider.nodes == ("node-1", "node-2", "late")
    of_first = {path.replace("node-1", "late") for path in before if "node-1" in path and "peers" not in path}
    everyone, known = ("node-1", "node-2", "late"), key(it, "late").read_bytes()
    peers = {f"nodes/late/peers/{name}.pub" for name in everyone} | {
        f"nodes/{name}/peers/late.pub" for name in everyone
    }
    assert set(after) - set(before) == of_first | peers
    assert all(after[f"nodes/{name}/peers/late.pub"] == known for name in everyone)
    assert {path for path in before if after[path] != before[path]} == {"deployment.toml", "server/federation.toml"}
    parts = [*node_certificates(wider.node("late"), ""), *agreement(wider.node("late"), it.server, key(it, "late"), "")]
    assert {level for level, _ in parts} == {"ok"}
    assert x509.load_pem_x509_certificate(after["ca/clients/late.crt"]).subject.rfc4514_string() == "CN=late"
    assert read_node(wider.node("late") / "node.toml").name == "late"
    for path in wider.node("late").rglob("*"):
        mode = (
            (wider.node("node-1") / str(path.relative_to(wider.node("late"))).replace("late", "node-1")).stat().st_mode
        )
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(mode)
    assert stat.S_IMODE(wider.node("late").stat().st_mode) == 0o700
    assert revoke_node(wider, "late") == 1


def key(it: Deployment, name: str) -> Path:
    return it.server / "node-keys" / f"{name}.pub"


def test_it_says_what_to_send_to_whom(it: Deployment, tmp_path: Path) -> None:
    said = call(it, "late")
    assert "Send the folder nodes/late/ to late over a confidential channel" in said
    assert "while its SuperLink runs: server/register-nodes.sh" in said
    assert "server/federation.toml has clients.newcomers = 1" in said
    assert "flwr.sh stop RUN_ID" in said
    it.server.rename(tmp_path / "on the server")
    said = call(it, "later")
    assert "Send nodes/later/node.pub to the server, as server/node-keys/later.pub" in said
    assert "raise clients.newcomers by 1" in said
    assert not it.server.exists()


@pytest.mark.parametrize("name", ["node-1", "../x", "", "a;b"])
def test_a_name_that_cannot_be_used_changes_nothing(it: Deployment, name: str) -> None:
    before = files(it.folder)
    with pytest.raises(ConfigError, match=r"already has a node|is not the name of a node"):
        add_node(it, name)
    assert files(it.folder) == before


def test_nothing_is_half_written(it: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(it.folder)
    (it.folder / "ca/client-ca.key").rename(it.folder.parent / "safe")
    with pytest.raises(ConfigError, match=r"Restore client-ca\.crt and client-ca\.key"):
        add_node(it, "late")
    (it.folder.parent / "safe").rename(it.folder / "ca/client-ca.key")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        add_node(it, "late")
    assert files(it.folder) == before
    assert not it.node("late").exists()


@pytest.mark.parametrize(
    "seats",
    [
        "seats = [{ name = 'node-1', node = 7 }]",
        "seats = [\n  { name = 'node-1', node = 7 },  # the first\n]",
        "[[clients.seats]]\nname = 'node-1'\nnode = 7",
    ],
)
@pytest.mark.parametrize("node", [None, 12])
def test_a_seat_is_added_however_seats_are_written(it: Deployment, seats: str, node: int | None) -> None:
    path = it.server / "federation.toml"
    path.write_text(f"[clients]\ncount = 2  # nodes\nnewcomers = 1\n{seats}\n[rad]\nsource = 'digits'\n")
    wider = add_node(it, "clinic.b")
    assert seat_node(wider, "clinic.b", node) == "a seat for 'clinic.b' in clients.seats"
    found = load_config(str(path))
    assert {seat.name: seat.node for seat in found.clients.seats} == {"node-1": 7, "clinic.b": node}
    assert (found.clients.newcomers, found.rad.source) == (1, "digits")
    assert "count = 2  # nodes" in path.read_text()
    assert seat_node(wider, "clinic.b", node) is None, "it has a seat now"


def test_a_config_that_cannot_be_edited_is_left_alone(it: Deployment) -> None:
    path = it.server / "federation.toml"
    path.write_text("clients = { count = 2 }\n")
    with pytest.raises(ConfigError, match=r"Add clients\.newcomers = 1 there"):
        seat_node(add_node(it, "late"), "late", None)
    assert path.read_text() == "clients = { count = 2 }\n"


def test_a_run_that_has_begun_continues_with_more_seats_and_nothing_else(it: Deployment, tmp_path: Path) -> None:
    path = it.server / "federation.toml"
    path.write_text("[clients]\ncount = 2\n[rad]\nsource = 'digits'\nsize = 8\n[data]\nside = 8\n")
    run = open_run(tmp_path / "run", load_config(str(path)), NodeSite())
    seat_node(add_node(it, "late"), "late", None)
    again = open_run(run.path, load_config(str(path)), NodeSite())
    assert again.read_config().clients.newcomers == 1
    assert [before.clients.newcomers for _, before in again.read_earlier()] == [0]
    path.write_text(path.read_text().replace("size = 8", "size = 9"))
    with pytest.raises(Exception, match=r"different settings \(rad\.size is 8 there and 9 here\)"):
        open_run(run.path, load_config(str(path)), NodeSite())


def test_an_insecure_deployment_needs_no_keys(tmp_path: Path) -> None:
    made = Deployment(tmp_path / "fl", ("node-1",), secure=False)
    initialise(made, demo=True)
    said = call(made, "late")
    assert "register" not in said
    assert {path.name for path in made.node("late").iterdir()} == {path.name for path in made.node("node-1").iterdir()}
    assert read_node(made.node("late") / "node.toml").data.source == "digits"
    assert adding.register_node(made, "late") is None
