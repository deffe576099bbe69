"""`deploy check`: each mistake that would stop a run is found before anything starts, and names the machine."""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from hetero_ssfl.cli import app
from hetero_ssfl.deploy import nginx, pki
from hetero_ssfl.deploy.certificates import revoke_node
from hetero_ssfl.deploy.check import check_folder, merge_warnings
from hetero_ssfl.deploy.check_nodes import ImageSample
from hetero_ssfl.deploy.layout import Deployment
from hetero_ssfl.deploy.local import free_port
from hetero_ssfl.deploy.write import initialise
from hetero_ssfl.errors import ConfigError, DataError
from hetero_ssfl.runs.environment import Finding


def photos(folder: Path, count: int, mode: str = "RGB", side: int = 20) -> Path:
    """Write random square pictures."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        shape = (side, side, 3) if mode == "RGB" else (side, side)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A deployment with its images in place."""
    folder = tmp_path_factory.mktemp("sound") / "fl"
    port = 20_000 + os.getpid() % 10_000  # not one that the system gives to a connection of another test meanwhile
    it = Deployment(folder, ("node-1", "node-2"), port=port)
    initialise(it)
    photos(it.server / "rad", 12)
    for name in it.nodes:
        photos(it.node(name) / "images", 9)
    change(it.server / "federation.toml", "side = 32", "side = 16")
    return it


@pytest.fixture
def it(sound: Deployment, tmp_path: Path) -> Deployment:
    shutil.copytree(sound.folder, tmp_path / "fl", symlinks=True)
    return Deployment.load(tmp_path / "fl")


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def stops(folder: Path, port: int | None = None) -> list[Finding]:
    return [finding for finding in check_folder(folder, port) if finding.level == "stops"]


@contextmanager
def busy(port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


def test_a_sound_deployment_passes_and_nothing_is_written(it: Deployment) -> None:
    before = {path: path.stat().st_mtime_ns for path in it.folder.rglob("*")}
    found = check_folder(it.folder)
    assert not [finding for finding in found if finding.level == "stops"]
    checked = {(finding.who, finding.what) for finding in found if finding.level == "ok"}
    for name in it.nodes:
        assert {(name, what) for what in ("images", "encoder", "limits", "certificates")} <= checked
    assert {("server", what) for what in ("settings", "RAD", "certificates", "ports")} <= checked
    assert any("9 colour images of 20 pixels (all decoded)" in finding.text for finding in found)
    assert any(f"{64} features of 3x16x16 images" in finding.text for finding in found)
    assert {path: path.stat().st_mtime_ns for path in it.folder.rglob("*")} == before


def other_key(it: Deployment) -> None:
    (it.server / "node-keys/node-2.pub").write_bytes(pki.node_key()[1])


def expired_client(it: Deployment) -> None:
    authority = pki.load(*((it.folder / "ca" / f"client-ca.{end}").read_bytes() for end in ("crt", "key")))
    old = pki.client_certificate(authority, "node-2", 1, datetime.now(UTC) - timedelta(days=2))
    (it.node("node-2") / "client.crt").write_bytes(old.certificate_pem())
    (it.node("node-2") / "client.key").write_bytes(old.key_pem())


def expired_server(it: Deployment) -> None:
    authority = pki.load(*((it.folder / "ca" / f"ca.{end}").read_bytes() for end in ("crt", "key")))
    old = pki.server_certificate(authority, it.host, 1, datetime.now(UTC) - timedelta(days=2))
    (it.server / "server.crt").write_bytes(old.certificate_pem())
    (it.server / "server.key").write_bytes(old.key_pem())


def swapped_key(it: Deployment) -> None:
    shutil.copy(it.node("node-1") / "client.key", it.node("node-2") / "client.key")


def foreign_client(it: Deployment) -> None:
    other = pki.client_certificate(pki.new_authority(), "node-2")
    (it.node("node-2") / "client.crt").write_bytes(other.certificate_pem())
    (it.node("node-2") / "client.key").write_bytes(other.key_pem())


def foreign_ca(it: Deployment) -> None:
    (it.node("node-2") / "ca.crt").write_bytes(pki.new_authority().certificate_pem())


def broken_image(it: Deployment) -> None:
    path = it.node("node-2") / "images/004.png"
    path.write_bytes(path.read_bytes()[:90])


def one_image(it: Deployment) -> None:
    shutil.rmtree(it.node("node-2") / "images")
    photos(it.node("node-2") / "images", 1)


def in_node(old: str, new: str) -> Callable[[Deployment], None]:
    return lambda it: change(it.node("node-2") / "node.toml", old, new)


def in_config(old: str, new: str) -> Callable[[Deployment], None]:
    return lambda it: change(it.server / "federation.toml", old, new)


@pytest.mark.parametrize(
    ("who", "what", "text", "mistake"),
    [
        ("node-2", "images", "no data at 'imgaes'", in_node('"images"', '"imgaes"')),
        ("node-2", "images", "004.png. of .* cannot be decoded", broken_image),
        ("node-2", "images", "fewer than 2 are left", one_image),
        ("node-2", "encoder", "unknown encoder 'moblienet'", in_node("mobilenet", "moblienet")),
        ("node-2", "encoder", "has no option 'widht'", in_node("width", "widht")),
        ("node-2", "settings", "unknown key 'encodr'", in_node("encoder =", "encodr =")),
        ("node-2", "settings", "device = 'cuda:93' cannot be used", in_node('"cpu"', '"cuda:93"')),
        ("node-2", "limits", "local_epochs = 2, its limit is 1", in_node("local_epochs = 100", "local_epochs = 1")),
        ("node-2", "limits", "the limit of node-2 is 8", in_node("image_side = 512", "image_side = 8")),
        ("node-2", "limits", "does not send weights", in_config('"hetero-ssfl"', '"fedavg"')),
        ("node-2", "certificates", "expired on .* deploy renew .* --node node-2", expired_client),
        ("node-2", "certificates", "does not belong to the certificate", swapped_key),
        ("node-2", "certificates", "was not signed by 'client-ca.crt'", foreign_client),
        ("node-2", "certificates", "is not the CA of the server", foreign_ca),
        ("node-2", "certificates", "is not the public key of its node.key", other_key),
        ("node-2", "certificates", "is revoked", lambda it: revoke_node(it, "node-2")),
        ("server", "names", "node-1 and node-2 are both named 'node-1'", in_node('"node-2"', '"node-1"')),
        ("server", "names", "'node-2', which is not in", in_config("per_round", "seats=[{name='node-1'}]\nper_round")),
        ("server", "names", "clients.count = 3 nodes, but", in_config("count = 2", "count = 3")),
        ("server", "RAD", "no data at 'rda'", in_config('"rad"', '"rda"')),
        ("server", "RAD", "rad.size = 13 exceeds the 12", in_config("# size = 200", "size = 13")),
        ("server", "settings", "unknown key 'ruonds'", in_config("rounds", "ruonds")),
        ("server", "certificates", "expired on .* deploy renew", expired_server),
        ("server", "certificates", "is not the certificate", lambda it: (it.server / "server.crt").write_text("no")),
        ("server", "certificates", "is not a revocation list", lambda it: (it.server / "client.crl").write_text("no")),
    ],
)  # fmt: skip
def test_one_mistake_is_one_line_that_names_the_machine(
    who: str,
    what: str,
    text: str,
    mistake: Callable[[Deployment], object],
    it: Deployment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nginx, "program", lambda: None)  # it would find some of them, too
    mistake(it)
    found = stops(it.folder)
    if text != "does not send weights":  # concerns all nodes
        assert len(found) == 1, found
    wanted = next(finding for finding in found if finding.who == who)
    assert wanted.what == what
    assert re.search(text, wanted.text), wanted.text


def test_a_port_of_another_program_stops_the_run(it: Deployment) -> None:
    port = free_port()
    with busy(port):
        assert [finding.text.split(" is")[0] for finding in stops(it.folder, port)] == [f"port {port}"]
    assert not stops(it.folder, port)


def test_a_secure_sum_needs_the_keys_of_all_nodes(it: Deployment) -> None:
    change(it.server / "federation.toml", "# [alignment]\n# form", "[alignment]\nform")
    change(it.server / "federation.toml", "# [privacy]\n# secure", "[privacy]\nsecure")
    change(it.server / "federation.toml", "count = 2", "count = 3")  # the fewest that it is possible with
    (it.node("node-2") / "peers/node-1.pub").unlink()
    found = {(finding.who, finding.what): finding.text for finding in stops(it.folder)}
    assert found.keys() == {("server", "names"), ("node-2", "keys")}
    assert "has no public key of node-1, so this node refuses" in found["node-2", "keys"]


def test_images_that_change_their_kind_are_a_warning(it: Deployment) -> None:
    shutil.rmtree(it.node("node-1") / "images")
    photos(it.node("node-1") / "images", 5, "L", side=12)
    found = [finding for finding in check_folder(it.folder) if (finding.who, finding.what) == ("node-1", "images")]
    assert [finding.level for finding in found] == ["ok", "warning"]
    assert "are grey, those of the RAD are colour" in found[1].text


def test_code_of_a_folder_is_not_imported_without_trust(
    it: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_by_check.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    change(it.node("node-2") / "node.toml", "mobilenet(width=16)", "imported_by_check:Encoder")
    found = [finding for finding in check_folder(it.folder) if finding.who == "node-2" and finding.what == "encoder"]
    assert [finding.level for finding in found] == ["warning"]
    assert "HETERO_SSFL_TRUST=imported_by_check" in found[0].text
    (tmp_path / "imported_by_check.py").write_text("def Encoder(): return 3")
    monkeypatch.setenv("HETERO_SSFL_TRUST", "imported_by_check")
    assert "returned int, expected a torch.nn.Module" in stops(it.folder)[0].text


def test_an_encoder_may_be_in_a_module_next_to_the_node_settings(
    it: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(it.nodes, 3):  # two modules of one name
        code = "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, in_channels):\n"
        code += (
            f"        super().__init__(nn.Conv2d(in_channels, {number}, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        )
        (it.node(name) / "office_net.py").write_text(code)
        settings = it.node(name) / "node.toml"
        settings.write_text(re.sub(r"(?m)^encoder = .*", 'encoder = "office_net:Net"', settings.read_text()))
    shown = CliRunner().invoke(app, ["deploy", "check", str(it.folder)])
    assert shown.output.splitlines()[-1] == "findings that would stop a run: 0; parts that were not checked: 2"
    monkeypatch.setenv("HETERO_SSFL_TRUST", "office_net")
    shown = CliRunner().invoke(app, ["deploy", "check", str(it.folder)])
    assert shown.output.splitlines()[-1] == "findings that would stop a run: 0; parts that were not checked: 0"
    assert "office_net:Net: 3 features" in shown.output
    assert "office_net:Net: 4 features" in shown.output
    assert not list(it.folder.rglob("__pycache__"))
    assert "office_net" not in sys.modules


def test_a_warning_of_several_machines_is_shown_once() -> None:
    twice = [Finding("nginx", False, "missing", who=who) for who in ("server", "node-1")]
    other = [Finding("images", True, "9", who=who) for who in ("node-1", "node-2")]
    assert merge_warnings([*twice, *other]) == [Finding("nginx", False, "missing", who="server, node-1"), *other]


def test_a_machine_checks_what_it_has(it: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nginx, "program", lambda: None)
    node, server = tmp_path / "at a hospital", tmp_path / "on the server"
    it.node("node-2").rename(node)
    it.server.rename(server)
    change(node / "forwarder.conf", "127.0.0.1:9095", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("NODE_PORT", str(free_port()))
    assert [finding.what for finding in stops(node)] == ["nginx"], "its scripts need nginx"
    with busy(port := free_port()):
        monkeypatch.setenv("NODE_PORT", str(port))
        assert [finding.what for finding in stops(node)] == ["nginx", "ports"]
    assert {finding.who for finding in check_folder(node)} == {"at a hospital"}
    (server / "node-keys/node-2.pub").unlink()
    assert "but there are 1" in next(finding.text for finding in stops(server) if finding.what == "names")
    assert {finding.who for finding in check_folder(it.folder) if not finding.checked} == {"server", "node-2"}
    with pytest.raises(ConfigError, match="is not part of a deployment"):
        check_folder(tmp_path)


@pytest.mark.skipif(nginx.program() is None, reason="nginx is not installed: make proxy")
def test_nginx_checks_its_configurations(it: Deployment) -> None:
    change(it.server / "proxy.conf", "ssl_verify_client on;", "ssl_verify_cleint on;")
    change(it.node("node-1") / "forwarder.conf", "127.0.0.1:9095", "127.0.0.1:99999")
    found = {finding.who: finding.text for finding in stops(it.folder)}
    assert "ssl_verify_cleint" in found["server"]
    assert "99999" in found["node-1"]
    assert "node-2" not in found


def test_the_remedy_for_a_torn_image_works_in_node_toml(it: Deployment) -> None:
    folder = it.node("node-1")
    next((folder / "images").rglob("*.png")).write_bytes(b"torn")
    (finding,) = stops(it.folder)
    assert "on_bad_image = 'skip' in [data] of node.toml" in finding.text
    change(folder / "node.toml", 'on_bad_image = "error"', 'on_bad_image = "skip"')
    assert not stops(it.folder)


def test_large_sources_are_decoded_for_some_seconds_only(tmp_path: Path) -> None:
    from hetero_ssfl.config import DataConfig

    data = DataConfig(source=str(photos(tmp_path / "images", 5)))
    assert ImageSample(data, tmp_path, seconds=-1).text() == "5 colour images of 20 pixels (the first 1 decoded)"
    (tmp_path / "images/002.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"002\.png"):
        ImageSample(data, tmp_path)
    skipping = ImageSample(data.model_copy(update={"on_bad_image": "skip"}), tmp_path)
    assert skipping.text() == "5 colour images of 20 pixels (all decoded, 1 bad ones skipped)"


def test_the_commands_end_with_2_and_start_nothing(it: Deployment) -> None:
    call = CliRunner().invoke
    assert call(app, ["deploy", "check", str(it.folder)]).exit_code == 0
    change(it.node("node-2") / "node.toml", '"images"', '"imgaes"')
    shown = call(app, ["deploy", "check", str(it.folder)])
    assert shown.exit_code == 2
    assert [line.split()[:3] for line in shown.stdout.splitlines() if "imgaes" in line] == [
        ["stops", "node-2", "images:"]
    ]
    answer = call(app, ["deploy", "check", str(it.folder), "--json"])
    assert (answer.exit_code, json.loads(answer.stdout)["stops"]) == (2, 1)
    tested = call(app, ["deploy", "local", str(it.folder)])
    assert isinstance(tested.exception, ConfigError)
    assert "node-2" in tested.stderr
    assert not (it.folder / "local").exists()
