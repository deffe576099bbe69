"""Write a deployment folder (`deploy init`). It is built under a temporary name and then renamed."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..errors import ConfigError
from . import flower, nginx, pki
from .layout import NODE_PORT, Deployment
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

RENAMING = "# To change the name later, also rename NAME.pub in peers/ of every node and in server/node-keys/.\n"

OWN_MODULES = """\
# An encoder "my_module:MyEncoder" can be in my_module.py, next to node.toml.
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$here"
"""


def initialise(deployment: Deployment, days: int = 825, demo: bool = False) -> None:
    """Write the deployment folder completely or not at all."""
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
            for part in scratch.rglob("*/"):
                part.chmod(0o700)  # also where it is copied to: databases, logs and states will be in it
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write '{folder}': {error.strerror}. No files were left behind.") from None


class Writer:
    """Writes one deployment into a folder, which may be a temporary one."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.deployment, self.folder = deployment, folder

    def write_keys(self, days: int) -> None:
        authority = pki.new_authority(max(days, pki.CA_DAYS))
        server = pki.server_certificate(authority, self.deployment.host, days)
        clients = pki.new_authority(max(days, pki.CA_DAYS), "hetero-ssfl client CA")
        self.put("ca/ca.key", authority.key_pem(), 0o600)
        self.put("ca/client-ca.key", clients.key_pem(), 0o600)
        self.put("server/server.key", server.key_pem(), 0o600)
        self.put("server/server.crt", server.certificate_pem())
        for folder in ("ca", "server"):
            self.put(f"{folder}/ca.crt", authority.certificate_pem())
            self.put(f"{folder}/client-ca.crt", clients.certificate_pem())
            self.put(f"{folder}/client.crl", pki.revocation_list(clients, ()))
        for name in self.deployment.nodes:
            self.write_node_keys(name, authority.certificate_pem(), clients, days)

    def write_node_keys(self, name: str, authority: bytes, clients: pki.Certified, days: int) -> None:
        """Write the keys and certificates of one node, and what server and CA keep of them."""
        private, public = pki.node_key()
        self.put(f"nodes/{name}/ca.crt", authority)
        self.put(f"nodes/{name}/node.key", private, 0o600)
        self.put(f"nodes/{name}/node.pub", public)
        self.put(f"server/node-keys/{name}.pub", public)
        for peer in self.deployment.nodes:  # by these keys the nodes recognise each other in secure sums
            self.put(f"nodes/{peer}/peers/{name}.pub", public)
        client, local = pki.client_certificate(clients, name, days), pki.loopback_certificate()
        self.put(f"ca/clients/{name}.crt", client.certificate_pem())
        for kind, certified in (("client", client), ("local", local)):
            self.put(f"nodes/{name}/{kind}.key", certified.key_pem(), 0o600)
            self.put(f"nodes/{name}/{kind}.crt", certified.certificate_pem())

    def write_server(self, settings: Mapping[str, object]) -> None:
        it, count = self.deployment, len(self.deployment.nodes)
        self.put("server/superexec.secret", secrets.token_hex(32), 0o600)
        self.put("server/app/pyproject.toml", flower.APP)
        seats = {"count": count, "enough": max(1, count - 1), "rejoin": "key" if it.secure else "name"}
        self.put("server/federation.toml", fill("federation.toml", **settings, **seats))
        self.write_loop("server")
        bind = it.loopback if it.secure else "${BIND:-" + it.bind + "}"
        superlink = flower.superlink("$here", bind, str(it.superlink_port), "$here/superlink.db", it.secure)
        self.script("server/start-superlink.sh", "Run the SuperLink, which carries all messages.", _forever(superlink))
        superexec = flower.superexec("$here", it.superlink, it.secure)
        self.script(
            "server/start-superexec.sh",
            "Run the SuperExec, which starts the server app of each run.",
            _forever(superexec),
        )
        if it.secure:
            self.write_proxy()
        self.write_calls()

    def write_proxy(self) -> None:
        self.put("server/proxy.conf", nginx.proxy(self.deployment))
        run = flower.shell(nginx.command("$here", "$here/proxy.conf"))
        about = "Run the proxy, which all nodes connect to. It admits nodes only, and only to the routes they need."
        self.script("server/start-proxy.sh", about, f"need_nginx\nkeep_running {run}")
        about = "Let the running proxy read proxy.conf, client.crl and its certificate again."
        self.script("server/reload-proxy.sh", about, f"need_nginx\n{run} -t -q\nexec {run} -s reload")

    def write_calls(self) -> None:
        """Write the scripts that call the SuperLink through Flower's command `flwr` and then end."""
        connection = flower.connection(self.deployment.superlink, "$here/ca.crt", self.deployment.secure)
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
        keys = KEYS if it.secure else ""
        own = {"name": name, "encoder": encoder, "keys": keys}
        own["renaming"] = RENAMING.replace("NAME", name) if it.secure else ""
        self.put(f"{folder}/node.toml", fill("node.toml", **settings, **own))
        self.write_loop(folder)
        if it.secure:
            self.put(f"{folder}/forwarder.conf", nginx.forwarder(it))
            run = flower.shell(nginx.command("$here", "$here/forwarder.conf"))
            start = flower.supernode("$here", "$superlink", f"${{NODE_PORT:-{NODE_PORT}}}", "local.crt")
            body = fill("start.sh", forwarder=run, supernode=flower.shell(start))
        else:
            superlink = "${SUPERLINK:-" + it.entrance + "}"
            body = _forever(flower.supernode("$here", superlink, f"${{NODE_PORT:-{NODE_PORT}}}", None))
        about = "Take part in the federation until stopped. NODE_PORT names another port for the node's own processes."
        self.script(f"{folder}/start.sh", about, OWN_MODULES + body)

    def write_about(self, days: int) -> None:
        it = self.deployment
        facts = {"entrance": it.entrance, "port": it.port, "first": it.nodes[0], "count": len(it.nodes)}
        facts |= {"until": date_after(days), "install": nginx.INSTALL, "routes": len(nginx.ROUTES)}
        self.put("README.md", fill("README.md" if it.secure else "README-insecure.md", **facts))
        self.put("deployment.toml", it.to_toml())

    def write_loop(self, folder: str) -> None:
        exports = [f"export {key}={value}" for key, value in flower.ENVIRONMENT.items()]
        found = {"system_folders": ":".join(nginx.SYSTEM_FOLDERS), "install": nginx.INSTALL}
        self.put(f"{folder}/keep-running.sh", fill("keep-running.sh", environment="\n".join(exports), **found))

    def script(self, name: str, about: str, body: str) -> None:
        opening = f'#!/bin/sh\n# {about}\nset -eu\nhere=$(cd "$(dirname "$0")" && pwd)\n. "$here/keep-running.sh"\n'
        self.put(name, f"{opening}{body.rstrip()}\n", 0o755)

    def put(self, name: str, content: str | bytes, mode: int = 0o644) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Set the mode at creation, so that a key is never readable by others, not even briefly.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())

    def replace(self, files: Mapping[str, bytes]) -> None:
        """Write or replace files: first all under temporary names. Keys are readable by the owner only."""
        try:
            for name, content in files.items():
                (self.folder / f"{name}.new").unlink(missing_ok=True)
                self.put(f"{name}.new", content, 0o600 if name.endswith(".key") else 0o644)
            for name in files:
                (self.folder / f"{name}.new").replace(self.folder / name)
        finally:
            for name in files:
                (self.folder / f"{name}.new").unlink(missing_ok=True)


def _forever(command: list[str]) -> str:
    return f"keep_running {flower.shell(command)}"


def date_after(days: int) -> str:
    return f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}"
