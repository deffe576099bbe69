"""Write a deployment folder (`deploy init`). It is built under a temporary name and then renamed."""

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

ENCODERS = (  # different for each participant
    "resnet8(width=16)",
    "mobilenet(width=16)",
    "vit(width=64, depth=3, heads=2)",
    "resnet10(width=12)",
    "resnet14(width=12)",
)

# Initial values of a federation's config: to be edited, or (demo) small enough to run within minutes.
START = {"rounds": 10, "local_epochs": 2, "side": 32, "channels": 3, "rad": "rad", "rad_size": 500, "data": "images"}
DEMO = {"rounds": 3, "local_epochs": 1, "side": 16, "channels": 1, "rad": "digits", "rad_size": 64, "data": "digits"}


def initialise(deployment: Deployment, days: int = 825, demo: bool = False) -> None:
    """Write the deployment folder completely or not at all."""
    pki.general_name(deployment.host)  # raises for an invalid host before anything is written
    folder = deployment.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"'{folder}' exists and is not an empty folder. Choose another folder: keys are never overwritten."
        )
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
        raise ConfigError(f"cannot write '{folder}': {error.strerror}. No files were left behind.") from None


def renew_certificate(deployment: Deployment, days: int) -> str:
    """Create a new server certificate with the same CA. Return the date on which it expires."""
    ca = deployment.folder / "ca"
    try:
        authority = pki.load((ca / "ca.crt").read_bytes(), (ca / "ca.key").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{ca}' cannot sign ({error}). Restore ca.crt and ca.key there.") from None
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
    """Writes one deployment into a folder, which may be a temporary one."""

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
        seats = {"count": count, "enough": max(1, count - 1), "rejoin": "key" if it.secure else "name"}
        self.put("server/federation.toml", fill("federation.toml", **settings, **seats))
        self.write_loop("server")
        superlink = flower.superlink("$here", "${BIND:-" + it.bind + "}", str(it.port), "$here/superlink.db", it.secure)
        self.script("server/start-superlink.sh", "Run the SuperLink, which all nodes connect to.", _forever(superlink))
        superexec = flower.superexec("$here", local, it.secure)
        self.script(
            "server/start-superexec.sh",
            "Run the SuperExec, which starts the server app of each run.",
            _forever(superexec),
        )
        self.write_calls(local)

    def write_calls(self, superlink: str) -> None:
        """Write the scripts that call the SuperLink through Flower's command `flwr` and then end."""
        connection = flower.connection(superlink, "$here/ca.crt", self.deployment.secure)
        about = "Flower's command `flwr` for this deployment: `./flwr.sh list`, `./flwr.sh supernode list`."
        self.script("server/flwr.sh", about, fill("flwr.sh", connection=connection.rstrip()))
        register = flower.shell(["$here/flwr.sh", *flower.register("$key", "$name")])
        about = "Register the nodes whose public keys are in node-keys/. Running it twice is safe."
        self.script("server/register-nodes.sh", about, fill("register-nodes.sh", register=register))
        run = flower.run("$here/app", "$here/federation.toml", "${RUN_DIR:-$here/run}")
        about = "Start or continue the run, and show the server's log. RUN_DIR=/PATH names another run folder."
        self.script("server/run.sh", about, "exec " + flower.shell(["$here/flwr.sh", *run, "--stream"]))

    def write_node(self, name: str, encoder: str, settings: Mapping[str, object]) -> None:
        it, folder = self.deployment, f"nodes/{name}"
        self.put(f"{folder}/node.toml", fill("node.toml", **settings, name=name, encoder=encoder))
        self.write_loop(folder)
        start = flower.supernode("$here", "${SUPERLINK:-" + it.superlink + "}", "${NODE_PORT:-9094}", it.secure)
        about = "Take part in the federation until stopped. SUPERLINK names another host:port, NODE_PORT a free port."
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
        # Set the mode at creation, so that a key is never readable by others, not even briefly.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())


def fill(template: str, **values: object) -> str:
    return resources.files(f"{__package__}.templates").joinpath(template).read_text().format(**values)


def _forever(command: list[str]) -> str:
    return f"keep_running {flower.shell(command)}"


def _until(days: int) -> str:
    return f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}"
