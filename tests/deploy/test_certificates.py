"""`deploy renew` and `deploy revoke`, without a proxy: what they write. test_proxy.py shows what a revocation does."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from helpers.certificates import accepts
from hetero_ssfl.cli import app
from hetero_ssfl.deploy import pki
from hetero_ssfl.deploy.certificates import renew_node, renew_server, revoke_node
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.write import initialise
from hetero_ssfl.errors import ConfigError


@pytest.fixture
def it(tmp_path: Path) -> Deployment:
    made = Deployment(tmp_path / "fl", ("node-1", "node-2"), "fl.example.org")
    initialise(made, days=1)
    return made


def revoked(it: Deployment, folder: str = "ca") -> set[int]:
    """Return the serial numbers in the revocation list, whose signature and dates are checked."""
    found = x509.load_pem_x509_crl((it.folder / folder / "client.crl").read_bytes())
    authority = x509.load_pem_x509_certificate((it.folder / "ca/client-ca.crt").read_bytes())
    assert found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    assert found.next_update_utc == authority.not_valid_after_utc, "an expired list would lock out all nodes"
    return {entry.serial_number for entry in found}


def serial(it: Deployment, name: str) -> int:
    return x509.load_pem_x509_certificate((it.node(name) / "client.crt").read_bytes()).serial_number


def test_a_revoked_node_is_in_the_list_with_all_its_certificates(it: Deployment) -> None:
    old = {serial(it, "node-1")}
    renew_node(it, "node-1", 100)
    both = old | {serial(it, "node-1")}
    assert len(both) == 2
    assert revoked(it) == revoked(it, "server") == set()
    assert revoke_node(it, "node-1") == 2
    assert revoked(it) == revoked(it, "server") == both
    assert revoke_node(it, "node-1") == 0
    renew_node(it, "node-1", 100)
    assert serial(it, "node-1") not in revoked(it), "a revoked node may get a new certificate"
    assert revoke_node(it, "node-2") == 1
    assert revoked(it) == both | {serial(it, "node-2")}


def test_revoking_says_what_to_do_on_the_server(it: Deployment) -> None:
    shown = CliRunner().invoke(app, ["deploy", "revoke", str(it.folder), "node-2"])
    assert shown.exit_code == 0
    assert "node-2: revoked certificates: 1" in shown.stdout
    assert "server/reload-proxy.sh" in shown.stdout
    assert "supernode unregister" in shown.stdout
    assert "was revoked before" in CliRunner().invoke(app, ["deploy", "revoke", str(it.folder), "node-2"]).stdout


def test_revoking_needs_a_known_name_and_the_key_of_the_client_ca(it: Deployment, tmp_path: Path) -> None:
    before = (it.folder / "ca/client.crl").read_bytes()
    for name in ("node-3", "../server/server"):
        with pytest.raises(ConfigError, match="Its nodes are node-1, node-2"):
            revoke_node(it, name)
    (it.folder / "ca/client-ca.key").unlink()
    with pytest.raises(ConfigError, match=r"Restore client-ca\.crt and client-ca\.key"):
        revoke_node(it, "node-1")
    assert (it.folder / "ca/client.crl").read_bytes() == before
    initialise(Deployment(tmp_path / "open", ("node-1",), secure=False))
    with pytest.raises(ConfigError, match="made with --insecure"):
        revoke_node(Deployment.load(tmp_path / "open"), "node-1")


def test_nothing_is_half_written_when_the_disk_is_full(it: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    files = {path: path.read_bytes() for path in it.folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        revoke_node(it, "node-1")
    assert {path: path.read_bytes() for path in it.folder.rglob("*") if path.is_file()} == files


def test_the_revocation_list_is_written_where_only_ca_was_kept(it: Deployment) -> None:
    it.server.rename(it.folder.parent / "moved to the server")
    assert revoke_node(it, "node-1") == 1
    assert revoked(it) == {serial(it, "node-1")}
    assert not it.server.exists()


def test_a_renewed_server_is_trusted_by_existing_nodes(it: Deployment) -> None:
    authority, old = (it.node("node-1") / "ca.crt").read_bytes(), (it.server / "server.crt").read_bytes()
    renew_server(it, 100)
    new = pki.load((it.server / "server.crt").read_bytes(), (it.server / "server.key").read_bytes())
    in_a_month = datetime.now(UTC) + timedelta(days=30)
    assert not accepts(old, authority, it.host, in_a_month)
    assert accepts(new.certificate_pem(), authority, it.host, in_a_month)
    assert stat.S_IMODE((it.server / "server.key").stat().st_mode) == 0o600
    (it.folder / "ca/ca.key").unlink()
    with pytest.raises(ConfigError, match="Restore ca"):
        renew_server(it, 100)


def test_a_renewed_node_has_a_new_key_that_only_its_owner_reads(it: Deployment) -> None:
    old = (it.node("node-1") / "client.key").read_bytes()
    shown = CliRunner().invoke(app, ["deploy", "renew", str(it.folder), "--node", "node-1", "--days", "100"])
    assert shown.exit_code == 0
    assert "Copy client.crt and client.key from nodes/node-1/" in shown.stdout
    new = pki.load((it.node("node-1") / "client.crt").read_bytes(), (it.node("node-1") / "client.key").read_bytes())
    assert new.key_pem() != old
    assert new.certificate.not_valid_after_utc > datetime.now(UTC) + timedelta(days=99)
    assert stat.S_IMODE((it.node("node-1") / "client.key").stat().st_mode) == 0o600


def test_a_nodes_certificate_is_not_a_servers(it: Deployment) -> None:
    """A node must not be able to stand in for the server, neither with its client nor with its loopback certificate."""
    ca, client_ca = ((it.folder / "ca" / name).read_bytes() for name in ("ca.crt", "client-ca.crt"))
    for name in ("client.crt", "local.crt"):
        certificate = (it.node("node-1") / name).read_bytes()
        for authority in (ca, client_ca):
            assert not any(accepts(certificate, authority, host) for host in ("fl.example.org", "localhost", "node-1"))
