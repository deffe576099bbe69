"""Who may do what at the entrance of a deployment: real nginx, a real SuperLink, and Flower's own clients.

Whoever reaches a SuperLink's port can start code on every machine, since Flower's control routes have no accounts.
"""

import http.client
import json
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, node_pb2
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from typer.testing import CliRunner

from helpers.deployments import flwr
from helpers.waiting import until
from hetero_ssfl.cli import app
from hetero_ssfl.deploy import nginx, pki
from hetero_ssfl.deploy.check_machine import listeners
from hetero_ssfl.deploy.layout import Deployment, address
from hetero_ssfl.deploy.local import LocalDeployment, free_port
from hetero_ssfl.deploy.write import initialise

needs_nginx = pytest.mark.skipif(nginx.program() is None, reason="nginx is not installed: run `make proxy` as root")

CONNECTION = """\
[superlink]
default = "hetero-ssfl"
[superlink.hetero-ssfl]
address = "{address}"
root-certificates = "{trusted}"
"""

CONTROL: dict[str, Callable[[ControlHttpClient], object]] = {
    "register a node": lambda it: register(it, generate_key_pairs()[0]),
    "start a run": lambda it: it.StartRun(control_pb2.StartRunRequest(federation="@none/default")),
    "list runs": lambda it: it.ListRuns(control_pb2.ListRunsRequest()),
    "stop a run": lambda it: it.StopRun(control_pb2.StopRunRequest(run_id=1)),
    "list nodes": lambda it: it.ListNodes(control_pb2.ListNodesRequest()),
    "remove a node": lambda it: it.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=1)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """A SuperLink behind its proxy, with registered nodes. One of them is revoked while it is connected."""
    it = Deployment(tmp_path_factory.mktemp("door") / "fl", ("good", "revoked", "mistrusting"), port=free_port())
    initialise(it)
    (it.node("mistrusting") / "ca.crt").write_bytes(pki.new_authority().certificate_pem())
    with LocalDeployment(it) as running:
        assert running.proxied
        running.start_superlink()
        running.start("proxy", "server/start-proxy.sh", running.deployment.port)
        with control(running, with_ca_file(it), superlink(running)) as operator:
            for name in it.nodes:
                register(operator, node_key(it, name))
        with fleet(running, with_certificate(it, "revoked"), node_key(it, "revoked")) as node:
            take_part(node, node_key(it, "revoked"))
            assert CliRunner().invoke(app, ["deploy", "revoke", str(it.folder), "revoked"]).exit_code == 0
            reload(running)
            until(lambda: status(lambda: take_part(node, node_key(it, "revoked"))) == 400)
        yield running


def register(it: ControlHttpClient, key: ec.EllipticCurvePrivateKey) -> None:
    it.RegisterNode(control_pb2.RegisterNodeRequest(public_key=public_key_to_bytes(key.public_key())))


def superlink(running: LocalDeployment) -> str:
    return f"127.0.0.1:{running.superlink_port}"


def start_forwarder(running: LocalDeployment, name: str) -> str:
    """Start what start.sh does without its SuperNode. Return the address of the forwarder."""
    folder = running.deployment.node(name)
    (listen,) = listeners(folder / "forwarder.conf")
    script = folder / "start-forwarder.sh"
    script.write_text((folder / "start.sh").read_text().partition("keep_running flower-supernode")[0] + "wait\n")
    script.chmod(0o755)
    running.start(f"{name}.forwarder", str(script.relative_to(running.deployment.folder)), listen[1])
    return address(*listen)


def reload(running: LocalDeployment) -> None:
    script = running.deployment.server / "reload-proxy.sh"
    subprocess.run([script], env=running.environment(), check=True, capture_output=True, timeout=60)


# --- visitors: what each has in hand ---


def with_nothing(it: Deployment) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def with_ca_file(it: Deployment) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(it.node("good") / "ca.crt")
    return context


def with_certificate(it: Deployment, name: str) -> ssl.SSLContext:
    context = with_ca_file(it)
    context.load_cert_chain(it.node(name) / "client.crt", it.node(name) / "client.key")
    return context


def with_made_certificate(it: Deployment, certified: pki.Certified) -> ssl.SSLContext:
    place = it.folder / "made.pem"
    place.write_bytes(certified.key_pem() + certified.certificate_pem())
    context = with_ca_file(it)
    context.load_cert_chain(place)
    return context


def client_ca(it: Deployment) -> pki.Certified:
    return pki.load((it.folder / "ca/client-ca.crt").read_bytes(), (it.folder / "ca/client-ca.key").read_bytes())


def with_expired_certificate(it: Deployment) -> ssl.SSLContext:
    long_ago = datetime.now(UTC) - timedelta(days=9)
    return with_made_certificate(it, pki.client_certificate(client_ca(it), "good", 1, long_ago))


def with_foreign_certificate(it: Deployment) -> ssl.SSLContext:
    return with_made_certificate(it, pki.client_certificate(pki.new_authority(name="hetero-ssfl client CA"), "good"))


STRANGERS: dict[str, Callable[[Deployment], ssl.SSLContext]] = {
    "a stranger without a file": with_nothing,
    "a stranger with ca.crt": with_ca_file,
    "a revoked node": lambda it: with_certificate(it, "revoked"),
    "a node with an expired certificate": with_expired_certificate,
    "a node of another deployment": with_foreign_certificate,
}
VISITORS = {**STRANGERS, "a registered node": lambda it: with_certificate(it, "good")}


def control(server: LocalDeployment, context: ssl.SSLContext, address: str | None = None) -> ControlHttpClient:
    return ControlHttpClient(f"https://{address or server.deployment.entrance}", verify=context)


def fleet(server: LocalDeployment, context: ssl.SSLContext, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    interceptor = NodeAuthHttpInterceptor(key, key.public_key())
    return FleetHttpClient(f"https://{server.deployment.entrance}", verify=context, interceptors=[interceptor])


def node_key(it: Deployment, name: str) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key((it.node(name) / "node.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def take_part(it: FleetHttpClient, key: ec.EllipticCurvePrivateKey) -> None:
    """Do what a node does while it waits for work."""
    public = public_key_to_bytes(key.public_key())
    number = it.ActivateNode(fleet_pb2.ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id
    node = node_pb2.Node(node_id=number)
    assert it.SendNodeHeartbeat(heartbeat_pb2.SendNodeHeartbeatRequest(node=node, heartbeat_interval=30)).success
    assert not it.PullMessages(fleet_pb2.PullMessagesRequest(node=node)).messages_list
    it.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=number))


def status(request: Callable[[], object]) -> int:
    try:
        request()
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return 200


def served(server: LocalDeployment) -> int:
    """Return how many control requests have reached the SuperLink."""
    return (server.logs / "superlink.log").read_text().count("/v1/control/")


# --- what they try ---


@needs_nginx
@pytest.mark.parametrize("attempt", CONTROL)
@pytest.mark.parametrize("visitor", VISITORS)
def test_nobody_controls_the_federation_from_outside(server: LocalDeployment, visitor: str, attempt: str) -> None:
    before = served(server)
    with control(server, VISITORS[visitor](server.source)) as it:
        assert status(lambda: CONTROL[attempt](it)) == (403 if visitor == "a registered node" else 400)
    assert served(server) == before


@needs_nginx
def test_the_operator_controls_it_on_the_servers_machine(server: LocalDeployment) -> None:
    before = served(server)
    with control(server, with_ca_file(server.deployment), superlink(server)) as it:
        assert status(lambda: CONTROL["register a node"](it)) == 200
        assert status(lambda: CONTROL["list runs"](it)) == 200
    assert served(server) == before + 2


@needs_nginx
@pytest.mark.parametrize("visitor", VISITORS)
def test_only_a_registered_node_takes_part(server: LocalDeployment, visitor: str) -> None:
    key = node_key(server.deployment, "good")  # the strangers have stolen it
    with fleet(server, VISITORS[visitor](server.source), key) as it:
        assert status(lambda: take_part(it, key)) == (200 if visitor == "a registered node" else 400)


@needs_nginx
def test_a_certificate_alone_admits_no_node(server: LocalDeployment) -> None:
    key, _ = generate_key_pairs()
    public = public_key_to_bytes(key.public_key())
    with fleet(server, with_certificate(server.deployment, "good"), key) as it:
        assert status(lambda: take_part(it, key)) in range(400, 500)
        assert status(lambda: it.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=public))) == 403


@needs_nginx
def test_a_forwarder_talks_to_no_other_server(server: LocalDeployment) -> None:
    """For the node "mistrusting", whose ca.crt is of another CA, this server is a false one."""
    address = start_forwarder(server, "mistrusting")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(server.deployment.node("mistrusting") / "local.crt")
    with httpx.Client(verify=context) as it:
        assert it.post(f"https://{address}/v1/fleet/get-run").status_code == 502
    assert "upstream SSL certificate verify error" in (server.logs / "mistrusting.forwarder.log").read_text()


@needs_nginx
def test_flwr_run_starts_no_foreign_code(server: LocalDeployment, tmp_path: Path) -> None:
    """The attack itself with Flower's command, by a stranger with ca.crt and by a node through its own forwarder.

    It takes 6 seconds. A cheaper test would not show that the command is refused in the way that its requests are.
    """
    it = server.deployment
    forwarder = start_forwarder(server, "good")
    tries = {it.entrance: it.node("good") / "ca.crt", forwarder: it.node("good") / "local.crt"}
    command = ("run", str(it.server / "app"), "hetero-ssfl", "--run-config", f'config="x" run-dir="{tmp_path}"')
    environment = {**server.environment(), "FLWR_HOME": str(tmp_path)}
    program = [str(Path(sys.executable).with_name("flwr")), *command, "--format", "json"]
    before = served(server)
    for target, trusted in tries.items():
        (tmp_path / "config.toml").write_text(CONNECTION.format(address=target, trusted=trusted))
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
        assert not json.loads(done.stdout)["success"]
    assert served(server) == before
    assert flwr(server, *command)["success"], "the operator's own run starts"
    refused = (it.server / "refused.log").read_text()
    assert 'CN=good 127.0.0.1 "POST /v1/control/' in refused


# --- the routes ---


def test_the_proxy_knows_all_routes_of_a_node() -> None:
    """Fails when a new version of Flower adds a route: decide whether a node needs it."""
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/fleet/")}
    assert {path.removeprefix("/v1/fleet/") for path in paths} == {*nginx.ROUTES, "register-node", "unregister-node"}


@needs_nginx
def test_a_node_reaches_no_other_route(server: LocalDeployment) -> None:
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES} - {f"/v1/fleet/{name}" for name in nginx.ROUTES}
    assert {"/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/register-node"} <= paths
    paths |= {"/", "/docs", "/openapi.json", "/health", "/v1/responses", "/v1/fleet/"}
    with httpx.Client(verify=with_certificate(server.deployment, "good")) as it:
        found = {path: it.post(f"https://{server.deployment.entrance}{path}").status_code for path in sorted(paths)}
        assert set(found.values()) == {403}, found
        assert it.get(f"https://{server.deployment.entrance}/v1/fleet/get-run").status_code == 403


@needs_nginx
@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/get-run/../../control/list-runs",
        "/v1/control/list-runs/../../fleet/get-run",
        "/v1/control/list-runs%3f/../../fleet/get-run",
        "/v1/control/list-runs%00/../../fleet/get-run",
        "/v1/control/list-runs#/../../fleet/get-run",
        "//v1/control/list-runs",
        "/v1/fleet/get-run%2f..%2f..%2fcontrol/list-runs",
        "/v1/fleet/..;/control/list-runs",
        "https://localhost/v1/control/list-runs",
    ],
)
def test_a_path_written_differently_leads_nowhere_else(server: LocalDeployment, path: str) -> None:
    before = served(server)
    answer, _ = raw_request(server, path, 0)
    assert answer in range(400, 500)
    assert served(server) == before


@needs_nginx
def test_a_request_beyond_the_limit_is_refused_before_it_is_read(server: LocalDeployment) -> None:
    answer, _ = raw_request(server, "/v1/fleet/push-object", (nginx.BODY_MB << 20) + 1)
    assert answer == 413


@needs_nginx
def test_a_visitor_cannot_choose_the_address_in_the_servers_log(server: LocalDeployment) -> None:
    raw_request(server, "/v1/fleet/get-run", 0, {"X-Forwarded-For": "192.0.2.99"})
    assert "192.0.2.99" not in (server.logs / "superlink.log").read_text()


def raw_request(
    server: LocalDeployment, path: str, length: int, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Send a path exactly as it is written, and a Content-Length without its body."""
    context = with_certificate(server.deployment, "good")
    connection = http.client.HTTPSConnection("127.0.0.1", server.deployment.port, context=context, timeout=60)
    connection.putrequest("POST", path)
    sent = {"Content-Type": "application/protobuf", "Content-Length": str(length), **(headers or {})}
    for name, value in sent.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, text


# --- the configurations ---


@needs_nginx
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_nginx_accepts_the_written_configurations(host: str, tmp_path: Path) -> None:
    it = Deployment(tmp_path / "a $place with 'quotes'", ("node-1",), host, 9443)
    initialise(it)
    for folder, name in ((it.server, "proxy.conf"), (it.node("node-1"), "forwarder.conf")):
        command = [nginx.program() or "", "-e", "stderr", "-p", f"{folder}/", "-c", f"{folder}/{name}", "-t"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "[warn]" not in done.stderr


def test_a_local_test_without_nginx_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Deployment(tmp_path / "fl", ("node-1", "node-2"), port=free_port())
    initialise(it, demo=True)
    monkeypatch.setattr(nginx, "program", lambda: None)
    monkeypatch.setattr(LocalDeployment, "start_all", lambda _: sys.exit(3))  # no program starts
    shown = CliRunner().invoke(app, ["deploy", "local", str(it.folder), "--quiet"])
    assert f"left out of this test: nginx is not installed ({nginx.INSTALL})" in shown.stderr
