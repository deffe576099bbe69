"""Write a deployment folder (`deploy init`). It is built under a temporary name and then renamed."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..errors import ConfigError
from . import nginx, pki
from .layout import FORWARDER_PORT, NODE_PORT, Deployment, address
from .templates import fill

ENCODERS = (  # different for each participant
    "resnet8(width=16)",
    "mobilenet(width=16)",
    "vit(width=64, depth=3, heads=2)",
    "resnet10(width=12)",
    "resnet14(width=12)",
)

# Initial values of a federation's config: to be edited, or (demo) small enough to run within minutes.
ALL = "# size = 200  # by default all images of `source`, but at most 300"
START = {"rounds": 10, "local_epochs": 2, "side": 32, "channels": 3, "rad": "rad", "rad_size": ALL, "data": "images"}
SMALL = "size = 64"
DEMO = {"rounds": 3, "local_epochs": 1, "side": 16, "channels": 1, "rad": "digits", "rad_size": SMALL, "data": "digits"}

KEYS = """\
key = "node.key"     # signs this node's part in secure sums
peers = "peers"      # public keys of all nodes: check with their owners that these are theirs
"""

RENAMING = "# To change the name later, also rename {name}.pub in peers/ of every node and in server/node-keys/.\n"

SCRIPT = '#!/bin/sh\nset -eu\nhere=$(cd "$(dirname "$0")" && pwd)\n. "$here/keep-running.sh"\n\n'
UNFINISHED = 'ExecCondition=test ! -e "@here@/run/results.json"\n'


@dataclass(frozen=True)
class File:
    content: bytes
    mode: int = 0o644


def initialise(deployment: Deployment, days: int = 825, demo: bool = False) -> None:
    """Write the deployment folder completely or not at all."""
    folder = deployment.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"'{folder}' exists and is not an empty folder. Choose another folder: keys are never overwritten."
        )
    writer = Writer(deployment)
    writer.add_server(DEMO if demo else START)
    for number, name in enumerate(deployment.nodes):
        writer.add_node(name, ENCODERS[number % len(ENCODERS)], DEMO if demo else START)
    if deployment.secure:
        writer.add_keys(days)
    writer.add_about(days)
    create_folder(folder, writer.files)


def create_folder(folder: Path, files: Mapping[str, File]) -> None:
    """Write a new folder completely or not at all: first under a temporary name."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            write_files(scratch, files)
            for part in scratch.rglob("*/"):
                part.chmod(0o700)  # also where it is copied to: databases, logs and states will be in it
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write '{folder}': {error.strerror}. No files were left behind.") from None


def write_files(folder: Path, files: Mapping[str, File]) -> None:
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Set the mode at creation, so that a key is never readable by others, not even briefly.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode), "wb") as stream:
            stream.write(file.content)


def replace_files(folder: Path, files: Mapping[str, File]) -> None:
    """Write or replace files: first all under temporary names."""
    new = {f"{name}.new": file for name, file in files.items()}
    try:
        for name in new:
            (folder / name).unlink(missing_ok=True)
        write_files(folder, new)
        for name in files:
            (folder / f"{name}.new").replace(folder / name)
    except OSError as error:
        raise ConfigError(f"cannot write to '{folder}': {error.strerror}. Nothing was changed.") from None
    finally:
        for name in new:
            (folder / name).unlink(missing_ok=True)


class Writer:
    """Collects the files of a deployment, or a part of them."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.files: dict[str, File] = {}
        self.trust = '--root-certificates "$here/ca.crt"' if deployment.secure else "--insecure"

    # --- settings and keys, which are written once ---

    def add_server(self, settings: Mapping[str, object]) -> None:
        it, count = self.deployment, len(self.deployment.nodes)
        self.put("server/superexec.secret", secrets.token_hex(32), 0o600)
        self.put("server/app/pyproject.toml", fill("app.toml"))
        seats = {"count": count, "enough": max(1, count - 1), "rejoin": "key" if it.secure else "name"}
        self.put("server/federation.toml", fill("federation.toml", **settings, **seats))
        self.add_server_scripts(it.superlink_port, it.secure)

    def add_node(self, name: str, encoder: str, settings: Mapping[str, object]) -> None:
        own = {"name": name, "encoder": encoder, "keys": "", "renaming": ""}
        if self.deployment.secure:
            own |= {"keys": KEYS, "renaming": RENAMING.format(name=name)}
        self.put(f"nodes/{name}/node.toml", fill("node.toml", **settings, **own))
        self.add_node_scripts(name, FORWARDER_PORT, self.deployment.secure)

    def add_keys(self, days: int) -> None:
        authority = pki.new_authority(max(days, pki.CA_DAYS))
        server = pki.server_certificate(authority, self.deployment.host, days)
        clients = pki.new_authority(max(days, pki.CA_DAYS), "hetero-ssfl client CA")
        self.put("ca/ca.key", authority.key_pem(), 0o600)
        self.put("ca/client-ca.key", clients.key_pem(), 0o600)
        self.put_pair("server/server", server)
        for folder in ("ca", "server"):
            self.put(f"{folder}/ca.crt", authority.certificate_pem())
            self.put(f"{folder}/client-ca.crt", clients.certificate_pem())
            self.put(f"{folder}/client.crl", pki.revocation_list(clients, ()))
        for name in self.deployment.nodes:
            self.add_node_keys(name, authority.certificate_pem(), clients, days)

    def add_node_keys(self, name: str, authority: bytes, clients: pki.Certified, days: int) -> None:
        """Write the keys and certificates of one node, and what server and CA keep of them."""
        private, public = pki.node_key()
        self.put(f"nodes/{name}/ca.crt", authority)
        self.put(f"nodes/{name}/node.key", private, 0o600)
        self.put(f"nodes/{name}/node.pub", public)
        self.put(f"server/node-keys/{name}.pub", public)
        for peer in self.deployment.nodes:  # by these keys the nodes recognise each other in secure sums
            self.put(f"nodes/{peer}/peers/{name}.pub", public)
        client = pki.client_certificate(clients, name, days)
        self.put(f"ca/clients/{name}.crt", client.certificate_pem())
        self.put_pair(f"nodes/{name}/client", client)
        self.put_pair(f"nodes/{name}/local", pki.loopback_certificate())

    def add_about(self, days: int) -> None:
        it = self.deployment
        facts = {"entrance": it.entrance, "port": it.port, "first": it.nodes[0], "count": len(it.nodes)}
        facts |= {"until": date_after(days), "install": nginx.INSTALL, "routes": len(nginx.ROUTES)}
        self.put("README.md", fill("README.md" if it.secure else "README-insecure.md", **facts))
        self.put("deployment.toml", it.to_toml())

    # --- scripts and the configurations of nginx: `deploy local` writes them again, with other ports ---

    def add_server_scripts(self, superlink_port: int, proxied: bool) -> None:
        it, superlink = self.deployment, address(self.deployment.loopback, superlink_port)
        bind = it.loopback if it.secure else "${BIND:-" + it.bind + "}"
        keys = '--ssl-ca-certfile "$here/ca.crt" --ssl-certfile "$here/server.crt" --ssl-keyfile "$here/server.key"'
        trust = f"{keys} --enable-supernode-auth" if it.secure else "--insecure"
        self.add_script("server/start-superlink.sh", bind=bind, port=superlink_port, trust=trust)
        self.add_script("server/start-superexec.sh", superlink=superlink, trust=self.trust)
        trust = 'root-certificates = "$here/ca.crt"' if it.secure else "insecure = true"
        self.add_script("server/flwr.sh", superlink=superlink, trust=trust)
        self.add_script("server/register-nodes.sh")
        self.add_script("server/run.sh")
        services = {"superlink": "start-superlink.sh", "superexec": "start-superexec.sh"}
        if proxied:
            listen, routes = address(it.bind, it.port), "|".join(nginx.ROUTES)
            values = {"listen": listen, "superlink": superlink, "routes": routes, "body_mb": nginx.BODY_MB}
            self.put("server/proxy.conf", fill("proxy.conf", **values))
            self.add_script("server/start-proxy.sh")
            self.add_script("server/reload-proxy.sh")
            services["proxy"] = "start-proxy.sh"
        self.add_services("server", services)
        self.add_unit("server", "hetero-ssfl-run", "run.sh", condition=UNFINISHED, pause=60)

    def add_node_scripts(self, name: str, forwarder_port: int, proxied: bool) -> None:
        it, folder = self.deployment, f"nodes/{name}"
        if proxied:
            # nginx compares the certificate with a DNS name, never with an address. The certificate also holds
            # "localhost", and this CA signs no other server.
            server_name = it.host if pki.is_dns_name(it.host) else "localhost"
            values = {"listen": address("127.0.0.1", forwarder_port), "server": it.entrance, "name": server_name}
            self.put(f"{folder}/forwarder.conf", fill("forwarder.conf", **values))
            self.add_script(f"{folder}/start.sh", node_port=NODE_PORT)
        else:
            key = ' --auth-supernode-private-key "$here/node.key"' if it.secure else ""
            values = {"superlink": it.entrance, "node_port": str(NODE_PORT), "trust": self.trust + key}
            self.add_script(f"{folder}/start.sh", "start-direct.sh", **values)
        self.add_services(folder, {name: "start.sh"})

    def add_script(self, name: str, template: str | None = None, **values: object) -> None:
        self.put(name, SCRIPT + fill(template or Path(name).name, **values), 0o755)

    def add_services(self, folder: str, scripts: Mapping[str, str]) -> None:
        """Write what all scripts of a folder source, and its scripts as services of systemd."""
        where = {"system_folders": ":".join(nginx.SYSTEM_FOLDERS), "install": nginx.INSTALL}
        self.put(f"{folder}/keep-running.sh", fill("keep-running.sh", **where))
        for service, script in scripts.items():
            self.add_unit(folder, f"hetero-ssfl-{service}", script)
        services = " ".join(f"hetero-ssfl-{service}" for service in scripts)
        self.add_script(f"{folder}/install-services.sh", services=services)

    def add_unit(self, folder: str, name: str, script: str, condition: str = "", pause: int = 10) -> None:
        unit = fill("systemd.service", about=name, script=script, condition=condition, pause=pause)
        self.put(f"{folder}/systemd/{name}.service", unit)

    def put(self, name: str, content: str | bytes, mode: int = 0o644) -> None:
        self.files[name] = File(content if isinstance(content, bytes) else content.encode(), mode)

    def put_pair(self, name: str, certified: pki.Certified) -> None:
        self.put(f"{name}.key", certified.key_pem(), 0o600)
        self.put(f"{name}.crt", certified.certificate_pem())


def date_after(days: int) -> str:
    return f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}"
