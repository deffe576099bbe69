"""What `deploy init` writes. Nothing is half-written: all of it is built beside its place and renamed into it."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path

from ..errors import ConfigError
from . import flower, pki
from .layout import Deployment, address

ENCODERS = (  # participants differ, which is the point
    "resnet8(width=16)",
    "mobilenet(width=16)",
    "vit(width=64, depth=3, heads=2)",
    "resnet10(width=12)",
    "resnet14(width=12)",
)

# What a federation's settings begin with: to be edited, or small enough to see everything work within minutes.
START = {"rounds": 10, "local_epochs": 2, "side": 32, "channels": 3, "rad": "rad", "rad_size": 500, "data": "images"}
DEMO = {"rounds": 3, "local_epochs": 1, "side": 16, "channels": 1, "rad": "digits", "rad_size": 64, "data": "digits"}


def initialise(deployment: Deployment, days: int = 825, demo: bool = False) -> None:
    """Write the folder, all of it or nothing."""
    pki.general_name(deployment.host)  # a host that cannot work is refused before anything is written
    folder = deployment.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"'{folder}' exists and is not an empty folder. Choose another: keys are never overwritten.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            writer = Writer(deployment, scratch)
            writer.write_server(DEMO if demo else START)
            for number, name in enumerate(deployment.nodes):
                writer.write_node(name, ENCODERS[number % len(ENCODERS)], DEMO if demo else START)
            if deployment.secure:
                writer.write_keys(days)
            writer.write_about(days)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write '{folder}': {error.strerror}. Nothing was left behind.") from None


def renew_certificate(deployment: Deployment, days: int) -> str:
    """A new certificate for the server, by the same CA; returns the day it ends."""
    ca = deployment.folder / "ca"
    try:
        authority = pki.load((ca / "ca.crt").read_bytes(), (ca / "ca.key").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{ca}' cannot sign ({error}). Put ca.crt and ca.key back in their place.") from None
    server = pki.server_certificate(authority, deployment.host, days)
    writer = Writer(deployment, deployment.folder)
    for name, content, mode in (
        ("server.key", server.key_pem(), 0o600),
        ("server.crt", server.certificate_pem(), 0o644),
    ):
        (deployment.server / f"{name}.new").unlink(missing_ok=True)
        writer.put(f"server/{name}.new", content, mode)
    for name in ("server.key", "server.crt"):
        (deployment.server / f"{name}.new").replace(deployment.server / name)
    return _until(days)


class Writer:
    """Writes one deployment into a folder that need not be its final place."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.deployment, self.folder = deployment, folder

    def write_keys(self, days: int) -> None:
        authority = pki.new_authority(max(days, pki.CA_DAYS))
        server = pki.server_certificate(authority, self.deployment.host, days)
        self.put("ca/ca.key", authority.key_pem(), 0o600)
        self.put("server/server.key", server.key_pem(), 0o600)
        self.put("server/server.crt", server.certificate_pem())
        for folder in ("ca", "server", *(f"nodes/{name}" for name in self.deployment.nodes)):
            self.put(f"{folder}/ca.crt", authority.certificate_pem())
        for name in self.deployment.nodes:
            private, public = pki.node_key()
            self.put(f"nodes/{name}/node.key", private, 0o600)
            self.put(f"nodes/{name}/node.pub", public)
            self.put(f"server/node-keys/{name}.pub", public)

    def write_server(self, settings: Mapping[str, object]) -> None:
        it, count = self.deployment, len(self.deployment.nodes)
        local = address(it.loopback, it.port)
        self.put("server/superexec.secret", secrets.token_hex(32), 0o600)
        self.put("server/app/pyproject.toml", flower.APP)
        self.put("server/federation.toml", fill("federation.toml", **settings, count=count, enough=max(1, count - 1)))
        self.write_loop("server")
        superlink = flower.superlink("$here", "${BIND:-" + it.bind + "}", str(it.port), "$here/superlink.db", it.secure)
        self.script("server/start-superlink.sh", "The meeting point of all nodes.", _forever(superlink))
        superexec = flower.superexec("$here", local, it.secure)
        self.script("server/start-superexec.sh", "Starts the server's part of each run.", _forever(superexec))
        self.write_calls(local)

    def write_calls(self, superlink: str) -> None:
        """Scripts that end: they tell the SuperLink something through Flower's own command, `flwr`."""
        connection = flower.connection(superlink, "$here/ca.crt", self.deployment.secure)
        about = "Flower's own command, for this deployment: `./flwr.sh list`, `./flwr.sh supernode list`."
        self.script("server/flwr.sh", about, fill("flwr.sh", connection=connection.rstrip()))
        register = flower.shell(["$here/flwr.sh", *flower.register("$key", "$name")])
        about = "Let in the nodes whose public keys are in node-keys/. To do it twice does no harm."
        self.script("server/register-nodes.sh", about, fill("register-nodes.sh", register=register))
        run = flower.run("$here/app", "$here/federation.toml", "${RUN_DIR:-$here/run}")
        about = "Start the run, or go on with it, and show the server's log. RUN_DIR=/PATH names another run folder."
        self.script("server/run.sh", about, "exec " + flower.shell(["$here/flwr.sh", *run, "--stream"]))

    def write_node(self, name: str, encoder: str, settings: Mapping[str, object]) -> None:
        it, folder = self.deployment, f"nodes/{name}"
        self.put(f"{folder}/node.toml", fill("node.toml", **settings, name=name, encoder=encoder))
        self.write_loop(folder)
        start = flower.supernode("$here", "${SUPERLINK:-" + it.superlink + "}", "${NODE_PORT:-9094}", it.secure)
        about = "Take part in the federation, until stopped. SUPERLINK names another host:port, NODE_PORT a free port."
        self.script(f"{folder}/start.sh", about, _forever(start))

    def write_about(self, days: int) -> None:
        it = self.deployment
        facts = {"superlink": it.superlink, "port": it.port, "first": it.nodes[0], "count": len(it.nodes)}
        self.put("README.md", fill("README.md" if it.secure else "README-insecure.md", until=_until(days), **facts))
        self.put("deployment.toml", it.to_toml())

    def write_loop(self, folder: str) -> None:
        exports = [f"export {key}={value}" for key, value in flower.ENVIRONMENT.items()]
        self.put(f"{folder}/keep-running.sh", fill("keep-running.sh", environment="\n".join(exports)))

    def script(self, name: str, about: str, body: str) -> None:
        opening = f'#!/bin/sh\n# {about}\nset -eu\nhere=$(cd "$(dirname "$0")" && pwd)\n. "$here/keep-running.sh"\n'
        self.put(name, f"{opening}{body.rstrip()}\n", 0o755)

    def put(self, name: str, content: str | bytes, mode: int = 0o644) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # The mode from the first moment: a key that could be read for an instant was read.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())


def fill(template: str, **values: object) -> str:
    return resources.files(f"{__package__}.templates").joinpath(template).read_text().format(**values)


def _forever(command: list[str]) -> str:
    return f"keep_running {flower.shell(command)}"


def _until(days: int) -> str:
    return f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}"
