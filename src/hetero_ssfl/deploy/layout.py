"""The layout of a deployment folder.

README.md            what to do on each machine
deployment.toml      host, port and nodes, for `deploy local`
ca/                  ca.key, which signs the server's certificate: keep it offline
server/              for the server's machine: certificate, config, scripts
nodes/NAME/          for that participant's machine: its key, its node settings, one script
logs/, rehearsal/    written by `deploy local`
"""

import ipaddress
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli_w

from ..errors import ConfigError

NOTE = "# Written by `hetero-ssfl deploy init`, read by `hetero-ssfl deploy local`.\n"


@dataclass(frozen=True)
class Deployment:
    folder: Path
    nodes: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 9092
    secure: bool = True

    @classmethod
    def load(cls, folder: Path) -> "Deployment":
        path = folder / "deployment.toml"
        try:
            values = tomllib.loads(path.read_text())
            return cls(folder.resolve(), tuple(values.pop("nodes")), **values)
        except FileNotFoundError:
            raise ConfigError(
                f"'{folder}' is not a deployment folder (it has no deployment.toml). "
                f"Check the path, or create one with: hetero-ssfl deploy init {folder}"
            ) from None
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
    def superlink(self) -> str:
        """The address at which nodes reach the server."""
        return address(self.host, self.port)

    @property
    def loopback(self) -> str:
        """The loopback address of the server's machine."""
        return "::1" if ":" in self.host else "127.0.0.1"

    @property
    def bind(self) -> str:
        """The address that the server listens on: all interfaces, except in a federation on one machine."""
        if self.host == "localhost" or _is_loopback(self.host):
            return self.loopback
        return "::" if ":" in self.host else "0.0.0.0"


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
