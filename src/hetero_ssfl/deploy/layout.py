"""Where everything stands in the folder of a deployment.

README.md            who does what on which machine
deployment.toml      host, port and nodes, for `deploy local`
ca/                  ca.key, which signs the server's certificate: keep it offline
server/              for the server's machine: certificate, settings, scripts
nodes/NAME/          for that participant's machine: its key, its settings, one script
logs/, rehearsal/    what `deploy local` leaves behind
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
                f"'{folder}' holds no deployment (it has no deployment.toml). "
                f"Check the path, or make one with: hetero-ssfl deploy init {folder}"
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
        """Where nodes find the server."""
        return address(self.host, self.port)

    @property
    def loopback(self) -> str:
        """The server's machine, seen from itself."""
        return "::1" if ":" in self.host else "127.0.0.1"

    @property
    def bind(self) -> str:
        """Which of its addresses the server opens: all, except in a federation on one machine."""
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
