"""The layout of a deployment folder.

README.md            what to do on each machine
deployment.toml      host, port and nodes, for the other `deploy` commands
ca/                  ca.key and client-ca.key, which sign the certificates of server and nodes: keep it offline
server/              for the server's machine: certificate, config, scripts, the proxy's configuration
nodes/NAME/          for that participant's machine: its keys, its node settings, its forwarder, one script
local/               written by `deploy local`: scripts with other ports, logs, databases, the run folder
"""

import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli_w
from cryptography import x509

from ..errors import ConfigError
from . import pki

NOTE = "# Written by `hetero-ssfl deploy init`, read by the other `hetero-ssfl deploy` commands.\n"
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SUPERLINK_PORT = 9093  # on the loopback interface of the server's machine, behind the proxy
NODE_PORT = 9094  # of the SuperNode, on the loopback interface of a node's machine
FORWARDER_PORT = 9095  # on the loopback interface of a node's machine


@dataclass(frozen=True)
class Deployment:
    folder: Path
    nodes: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 9092
    secure: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError for values that do not belong into a path, a script or the configuration of a proxy."""
        pki.general_name(self.host)
        if not isinstance(self.port, int) or not 0 < self.port < 65536:
            raise ConfigError(f"'{self.port}' is not a port. Use a number from 1 to 65535.")
        for name in self.nodes:
            if not NODE_NAME.fullmatch(name):
                remedy = "Use up to 63 letters, digits, dots, dashes and underscores, with a letter or digit first."
                raise ConfigError(f"'{name}' is not the name of a node. {remedy}")

    @classmethod
    def load(cls, folder: Path) -> "Deployment":
        path = folder / "deployment.toml"
        try:
            values = tomllib.loads(path.read_text())
            return cls(folder.resolve(), tuple(values.pop("nodes")), **values)
        except FileNotFoundError:
            remedy = f"Check the path, or create one with: hetero-ssfl deploy init {folder}"
            raise ConfigError(f"'{folder}' has no deployment.toml, so it is not a deployment. {remedy}") from None
        except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"'{path}' cannot be read ({error}). Restore it from a copy.") from None

    def to_toml(self) -> str:
        return NOTE + tomli_w.dumps({key: value for key, value in asdict(self).items() if key != "folder"})

    @property
    def server(self) -> Path:
        return self.folder / "server"

    def node(self, name: str) -> Path:
        return self.folder / "nodes" / name

    @property
    def entrance(self) -> str:
        """The address at which nodes reach the server: that of the proxy, or of an insecure SuperLink."""
        return address(self.host, self.port)

    @property
    def superlink_port(self) -> int:
        if not self.secure:
            return self.port
        return SUPERLINK_PORT if self.port != SUPERLINK_PORT else SUPERLINK_PORT - 1

    @property
    def loopback(self) -> str:
        """The loopback address of the server's machine."""
        return "::1" if ":" in self.host else "127.0.0.1"

    @property
    def bind(self) -> str:
        """The address that the entrance listens on: all interfaces, except in a federation on one machine."""
        name = pki.general_name(self.host)
        if self.host == "localhost" or (isinstance(name, x509.IPAddress) and name.value.is_loopback):
            return self.loopback
        return "::" if ":" in self.host else "0.0.0.0"


def node_names(count: int | None, listed: str | None) -> tuple[str, ...]:
    """Return the names of a list such as "seaside,city", or so many numbered ones."""
    if listed is None:
        return tuple(f"node-{number}" for number in range(1, (count or 3) + 1))
    names = tuple(name.strip() for name in listed.split(","))
    if len(set(names)) < len(names):
        raise ConfigError(f"--names '{listed}' has a name twice. Give each node its own name.")
    if count not in (None, len(names)):
        raise ConfigError(f"--names has {len(names)} names, but --nodes is {count}. Leave --nodes out.")
    return names


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
