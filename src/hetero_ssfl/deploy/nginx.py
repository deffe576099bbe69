"""nginx on both sides of a connection: Flower 1.41 has neither client certificates nor accounts for its control routes.

SuperNode -> forwarder (same machine) -> proxy (the server's machine) -> SuperLink (loopback interface only)

- The forwarder adds the node's client certificate. It is needed because a SuperNode cannot present one.
- The proxy refuses everyone without a valid client certificate, and every route that a node does not need.

A configuration names files relative to itself, since its folder is copied to another machine. The rehearsal uses the
same configurations with other ports, in another folder.
"""

import os
import shutil

from . import pki
from .layout import FORWARDER_PORT, Deployment, address
from .templates import fill

ROUTES = (  # of Flower's Fleet API, without self-registration, which is off when nodes have registered keys
    *("activate-node", "deactivate-node", "send-node-heartbeat"),
    *("pull-messages", "push-messages", "confirm-message-received", "pull-object", "push-object"),
    *("get-run", "get-fab"),
)
BODY_MB = 64  # the largest request; Flower sends arrays in pieces of 5 MB
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin")  # often not on the PATH of ordinary users
INSTALL = "apt-get install nginx"


def program() -> str | None:
    """Return the path of nginx, or None if it is not installed."""
    return shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS]))


def command(folder: str, config: str) -> list[str]:
    """Return the command that runs nginx in the foreground. Its temporary files are in `folder`."""
    return ["nginx", "-e", "stderr", "-p", f"{folder}/", "-c", config]


def proxy(deployment: Deployment, listen: str | None = None, superlink: str | None = None, files: str = "") -> str:
    """Return the configuration of the proxy. `files` is the path from it to the folder server/."""
    return fill(
        "proxy.conf",
        listen=listen or address(deployment.bind, deployment.port),
        superlink=superlink or deployment.superlink,
        routes="|".join(ROUTES),
        body_mb=BODY_MB,
        files=files,
    )


def forwarder(deployment: Deployment, listen: str | None = None, server: str | None = None, files: str = "") -> str:
    """Return the configuration of a node's forwarder. `files` is the path from it to the node's folder."""
    # nginx compares the certificate with a DNS name, never with an address. The certificate also holds "localhost", and
    # this CA signs no other server.
    name = deployment.host if pki.is_dns_name(deployment.host) else "localhost"
    return fill(
        "forwarder.conf",
        listen=listen or address("127.0.0.1", FORWARDER_PORT),
        server=server or deployment.entrance,
        name=name,
        files=files,
    )
