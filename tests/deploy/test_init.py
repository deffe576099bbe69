"""`deploy init`: the files of each machine, their permissions, and that writing them is atomic."""

import stat
import subprocess
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from helpers.certificates import accepts
from hetero_ssfl.cli import app
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy import pki
from hetero_ssfl.deploy import write as writing
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.write import initialise
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.participants.limits import LimitsConfig
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.learning.encoders import build_encoder

SECRETS = {
    "ca/ca.key",
    "ca/client-ca.key",
    "server/server.key",
    "server/superexec.secret",
    *(f"nodes/node-{number}/{kind}.key" for number in (1, 2) for kind in ("node", "client", "local")),
}


def deployment(folder: Path, host: str = "fl.example.org", secure: bool = True) -> Deployment:
    return Deployment(folder, ("node-1", "node-2"), host, 9443, secure)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    it = deployment(tmp_path_factory.mktemp("deploy") / "fl")
    initialise(it)
    return it


def test_only_the_owner_can_read_secret_files(made: Deployment) -> None:
    files = {str(path.relative_to(made.folder)): path for path in made.folder.rglob("*") if path.is_file()}
    assert files.keys() >= SECRETS
    private = {name for name, path in files.items() if stat.S_IMODE(path.stat().st_mode) & 0o077 == 0}
    assert private == SECRETS
    folders = [made.folder, *(path for path in made.folder.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    for name, path in files.items():
        assert ("PRIVATE KEY" in path.read_text()) == name.endswith(".key"), name


def test_the_server_is_verified_only_by_its_ca_and_its_names(made: Deployment) -> None:
    certificate, authority = (made.server / "server.crt").read_bytes(), (made.node("node-2") / "ca.crt").read_bytes()
    assert accepts(certificate, authority, "fl.example.org")
    assert accepts(certificate, authority, "127.0.0.1")
    assert not accepts(certificate, authority, "other.example.org")
    assert not accepts(certificate, pki.new_authority().certificate_pem(), "fl.example.org")
    in_years = datetime.now(UTC) + timedelta(days=830)
    assert not accepts(certificate, authority, "fl.example.org", in_years)


def test_the_server_cannot_sign_for_others(made: Deployment) -> None:
    server = pki.load((made.server / "server.crt").read_bytes(), (made.server / "server.key").read_bytes())
    forged = pki.server_certificate(server, "fl.example.org")
    assert not accepts(forged.certificate_pem(), (made.server / "ca.crt").read_bytes(), "fl.example.org")


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "localhost", "a-b.example.org"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    authority = pki.new_authority()
    assert accepts(pki.server_certificate(authority, host).certificate_pem(), authority.certificate_pem(), host)


@pytest.mark.parametrize(
    "host",
    [
        *("https://a.org", "a.org:80", "a b", "", "192.0.2.777", "-a.org", "*.org"),
        *(
            "fe80::1%$(touch${IFS}x)",
            "fe80::1%eth0",
            "a.org;x",
            "$(x).org",
            "`x`",
            "a.org\n",
            "::1%\nssl_verify_client off;",
        ),
    ],
)
def test_an_invalid_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither an IP address nor a DNS name"):
        initialise(deployment(tmp_path / "fl", host))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value"), [("host", "::1%$(x)"), ("nodes", ["../../x"]), ("nodes", ["a;b"]), ("port", "1; x")]
)
def test_a_deployment_file_from_someone_else_names_no_command_and_no_path(
    made: Deployment, tmp_path: Path, key: str, value: object
) -> None:
    values = tomllib.loads((made.folder / "deployment.toml").read_text())
    (tmp_path / "deployment.toml").write_text(tomli_w.dumps({**values, key: value}))
    with pytest.raises(ConfigError, match=r"is not the name of a node|is not a port|neither an IP"):
        Deployment.load(tmp_path)


def test_each_node_has_its_own_key_that_the_server_can_register(made: Deployment) -> None:
    seen = set()
    for name in made.nodes:
        key = load_ssh_private_key((made.node(name) / "node.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(key.curve, ec.SECP384R1)
        registered = (made.server / "node-keys" / f"{name}.pub").read_bytes()
        assert load_ssh_public_key(registered) == key.public_key()
        assert registered == (made.node(name) / "node.pub").read_bytes()
        seen.add(registered)
    assert len(seen) == 2


def test_the_written_config_and_node_settings_are_valid(made: Deployment) -> None:
    config = load_config(str(made.server / "federation.toml"))
    assert (config.clients.count, config.clients.rejoin, config.rad.source) == (2, "key", "rad")
    node = tomllib.loads((made.node("node-2") / "node.toml").read_text())
    assert read_node(made.node("node-2") / "node.toml").limits == LimitsConfig(message_mb=512)  # all others: defaults
    assert (node["name"], node["data"]["source"], node["limits"]["weights_may_leave"]) == ("node-2", "images", False)
    for encoder in writing.ENCODERS:
        build_encoder(encoder, 3, 32)


def test_scripts_are_valid_and_belong_to_this_deployment(made: Deployment) -> None:
    scripts = list(made.folder.rglob("*.sh"))
    assert len(scripts) == 15
    for script in scripts:
        subprocess.run(["sh", "-n", script], check=True)
        assert str(made.folder) not in script.read_text()  # the folder is copied to another machine
    assert "server fl.example.org:9443;" in (made.node("node-1") / "forwarder.conf").read_text()
    assert "listen 0.0.0.0:9443 ssl;" in (made.server / "proxy.conf").read_text()


@pytest.mark.parametrize(("host", "loopback"), [("fl.example.org", "127.0.0.1"), ("2001:db8::7", "::1")])
@pytest.mark.parametrize("port", [443, 9093])
def test_only_the_proxy_listens_to_other_machines(host: str, loopback: str, port: int, tmp_path: Path) -> None:
    initialise(Deployment(tmp_path / "fl", ("node-1",), host, port))
    start = (tmp_path / "fl/server/start-superlink.sh").read_text()
    inner = 9092 if port == 9093 else 9093
    assert f'--host "{loopback}" --port {inner} ' in start
    assert "BIND" not in start
    assert "listen 127.0.0.1:9095 ssl;" in (tmp_path / "fl/nodes/node-1/forwarder.conf").read_text()


def test_a_deployment_is_read_as_it_was_written(made: Deployment) -> None:
    assert Deployment.load(made.folder) == made
    with pytest.raises(ConfigError, match="is not a deployment"):
        Deployment.load(made.folder / "server")


def test_the_demo_needs_no_images(tmp_path: Path) -> None:
    initialise(deployment(tmp_path / "fl"), demo=True)
    node = tomllib.loads((tmp_path / "fl/nodes/node-1/node.toml").read_text())
    assert node["data"]["source"] == load_config(str(tmp_path / "fl/server/federation.toml")).rad.source == "digits"


def test_nodes_have_the_names_that_were_given(tmp_path: Path) -> None:
    made = ["deploy", "init", str(tmp_path / "fl"), "--names"]
    for wrong, why in (
        ("a,b,a", "'a,b,a' has a name twice"),
        ("a,", "'' is not the name"),
        ("../a", "'../a' is not the name"),
    ):
        assert why in str(CliRunner().invoke(app, [*made, wrong]).exception)
    assert "2 names, but --nodes is 3" in str(CliRunner().invoke(app, [*made, "a,b", "--nodes", "3"]).exception)
    assert CliRunner().invoke(app, [*made, "seaside, city"]).exit_code == 0
    for name, other in (("seaside", "city"), ("city", "seaside")):
        folder = tmp_path / "fl/nodes" / name
        assert read_node(folder / "node.toml").name == name
        assert f"also rename {name}.pub in peers/" in (folder / "node.toml").read_text()
        assert (folder / f"peers/{other}.pub").exists()
        assert (tmp_path / f"fl/server/node-keys/{name}.pub").exists()


def test_insecure_has_no_keys_and_warns(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "fl"), "--insecure"])
    assert shown.exit_code == 0
    assert "anyone who can reach the port" in shown.stderr
    names = {path.name for path in (tmp_path / "fl").rglob("*")}
    assert not names & {"ca.crt", "ca.key", "server.crt", "server.key", "node.key", "node-keys"}
    assert "INSECURE" in (tmp_path / "fl/README.md").read_text()
    assert "--insecure" in (tmp_path / "fl/nodes/node-3/start.sh").read_text()
    assert load_config(str(tmp_path / "fl/server/federation.toml")).clients.rejoin == "name"  # ids do not last


def test_nothing_is_overwritten(made: Deployment) -> None:
    before = (made.server / "server.key").read_bytes()
    with pytest.raises(ConfigError, match="is not an empty folder"):
        initialise(made)
    assert (made.server / "server.key").read_bytes() == before


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        initialise(deployment(tmp_path / "fl"))
    assert not list(tmp_path.iterdir())


def test_every_machine_has_files_for_containers_without_root_and_with_a_read_only_root(made: Deployment) -> None:
    import yaml

    for folder, names in ((made.server, {"superlink", "superexec", "proxy", "run"}), (made.node("node-1"), {"node-1"})):
        compose = yaml.safe_load((folder / "compose.yaml").read_text())
        assert set(compose["services"]) == names
        for service in compose["services"].values():
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert not str(service["user"]).startswith("0")
            script = folder / Path(service["command"][0]).relative_to("/fl")
            assert script.stat().st_mode & stat.S_IXUSR
        assert "\nUSER fl\n" in (folder / "Containerfile").read_text()
        assert (folder / ".dockerignore").read_text().splitlines()[1:] == ["*", "!Containerfile"], (
            "no keys in the image"
        )
    assert yaml.safe_load((made.server / "compose.yaml").read_text())["services"]["superlink"]["ports"] == ["9443:9443"]
    test = yaml.safe_load((made.server / "compose.yaml").read_text())["services"]["run"]["healthcheck"]["test"]
    assert test == ["CMD", "hetero-ssfl", "status", "run", "--check"]
