"""Write a deployment folder (`deploy init`). It is built under a temporary name and then renamed."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import __version__
from ..errors import ConfigError
from . import nginx, pki
from .layout import FORWARDER_PORT, NODE_PORT, Deployment, address

ENCODERS = (  # different for each participant
    *("resnet8(width=16)", "mobilenet(width=16)", "vit(width=64, depth=3, heads=2)"),
    *("resnet10(width=12)", "resnet14(width=12)"),
)

# Initial values of a federation's config: to be edited, or (demo) small enough to run within minutes.
ALL = "# size = 200  # by default all images of `source`, but at most 300"
START = {"rounds": 10, "local_epochs": 2, "side": 32, "channels": 3, "rad": "rad", "rad_size": ALL, "data": "images"}
SMALL = "size = 64"
DEMO = {"rounds": 3, "local_epochs": 1, "side": 16, "channels": 1, "rad": "digits", "rad_size": SMALL, "data": "digits"}

LOADER = FileSystemLoader(Path(__file__).parent / "templates")
TEMPLATES = Environment(loader=LOADER, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)


@dataclass(frozen=True)
class File:
    content: bytes
    mode: int = 0o644


def initialise(deployment: Deployment, days: int = 825, demo: bool = False) -> None:
    """Write the deployment folder completely or not at all."""
    folder = deployment.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"'{folder}' is not an empty folder. Choose another one: keys are never overwritten.")
    writer = Writer(deployment)
    writer.add_server(DEMO if demo else START)
    for name in deployment.nodes:
        writer.add_node(name, DEMO if demo else START)
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
    """Collects the files of a deployment, or a part of them. `deploy local` has another port, and may have no proxy."""

    def __init__(self, deployment: Deployment, superlink_port: int | None = None, proxied: bool | None = None) -> None:
        self.deployment = deployment
        self.files: dict[str, File] = {}
        self.proxied = deployment.secure if proxied is None else proxied
        self.superlink_port = superlink_port or deployment.superlink_port
        self.superlink = address(deployment.loopback, self.superlink_port)
        self.trust = '--root-certificates "$here/ca.crt"' if deployment.secure else "--insecure"

    # --- settings and keys, which are written once ---

    def add_server(self, settings: Mapping[str, object]) -> None:
        self.put("server/superexec.secret", secrets.token_hex(32), 0o600)
        self.fill("server/app/pyproject.toml", "app.toml")
        self.fill("server/federation.toml", settings=settings)
        self.add_server_scripts()

    def add_node(self, name: str, settings: Mapping[str, object]) -> None:
        encoder = ENCODERS[self.deployment.nodes.index(name) % len(ENCODERS)]
        self.fill(f"nodes/{name}/node.toml", node=name, encoder=encoder, settings=settings)
        self.add_node_scripts(name, FORWARDER_PORT)

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
        self.fill("README.md", None if self.deployment.secure else "README-insecure.md", until=date_after(days))
        self.put("deployment.toml", self.deployment.to_toml())

    # --- scripts and the configurations of nginx: `deploy local` writes them again, with other ports ---

    def add_server_scripts(self) -> None:
        services = {"superlink": "start-superlink.sh", "superexec": "start-superexec.sh"}
        if self.proxied:
            services["proxy"] = "start-proxy.sh"
            self.fill("server/proxy.conf", listen=address(self.deployment.bind, self.deployment.port))
            self.fill("server/reload-proxy.sh")
        for script in (*services.values(), "flwr.sh", "register-nodes.sh", "run.sh"):
            self.fill(f"server/{script}")
        self.add_services("server", services)
        self.add_unit("server", "run", "run.sh")
        port = self.deployment.port if self.proxied else self.superlink_port
        self.add_containers("server", {**services, "run": "run.sh"}, port)

    def add_node_scripts(self, name: str, forwarder_port: int) -> None:
        folder = f"nodes/{name}"
        if self.proxied:
            # nginx compares the certificate with a DNS name, never with an address. The certificate also holds
            # "localhost", and this CA signs no other server.
            is_name = isinstance(pki.general_name(self.deployment.host), x509.DNSName)
            server_name = self.deployment.host if is_name else "localhost"
            listen = address("127.0.0.1", forwarder_port)
            self.fill(f"{folder}/forwarder.conf", listen=listen, server_name=server_name)
        self.fill(f"{folder}/start.sh", node_port=NODE_PORT)
        self.add_services(folder, {name: "start.sh"})
        self.add_containers(folder, {name: "start.sh"})

    def add_services(self, folder: str, scripts: Mapping[str, str]) -> None:
        """Write what all scripts of a folder source, and its scripts as services of systemd."""
        self.fill(f"{folder}/keep-running.sh")
        for service, script in scripts.items():
            self.add_unit(folder, service, script)
        self.fill(f"{folder}/install-services.sh", services=" ".join(f"hetero-ssfl-{service}" for service in scripts))

    def add_containers(self, folder: str, services: Mapping[str, str], port: int | None = None) -> None:
        """Write the files that run the same scripts in containers."""
        self.fill(f"{folder}/Containerfile", version=__version__)
        self.fill(f"{folder}/.dockerignore", "containerignore")
        self.fill(f"{folder}/compose.yaml", version=__version__, services=services, ports=port)

    def add_unit(self, folder: str, service: str, script: str) -> None:
        name = f"hetero-ssfl-{service}"
        self.fill(f"{folder}/systemd/{name}.service", "systemd.service", about=name, script=script)

    def fill(self, name: str, template: str | None = None, **values: object) -> None:
        """Write a file from a template, by default the one of its name. Scripts are executable."""
        values |= {"it": self.deployment, "writer": self, "nginx": nginx}
        text = TEMPLATES.get_template(template or Path(name).name).render(values)
        self.put(name, text, 0o755 if text.startswith("#!") else 0o644)

    def put(self, name: str, content: str | bytes, mode: int = 0o644) -> None:
        self.files[name] = File(content if isinstance(content, bytes) else content.encode(), mode)

    def put_pair(self, name: str, certified: pki.Certified) -> None:
        self.put(f"{name}.key", certified.key_pem(), 0o600)
        self.put(f"{name}.crt", certified.certificate_pem())


def date_after(days: int) -> str:
    return f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}"
