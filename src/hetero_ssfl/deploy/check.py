"""`deploy check`: find what would stop a run before any program starts. Each check takes seconds at most.

The folder is a whole deployment, as `deploy init` wrote it, or the folder of one machine. A whole deployment is checked
for a rehearsal here (`deploy local`), one machine for its own part. What is on other machines is not checked.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..config import Config, load_config
from ..errors import ConfigError, HeteroSSFLError
from ..federation.participants.node_settings import NodeSettings, read_node
from ..plugins import modules_beside
from . import check_files, check_nodes
from .findings import UNCHECKED, Finding, collect
from .layout import NODE_PORT, Deployment


@dataclass
class Place:
    """The parts of a deployment that are in a folder."""

    server: Path | None = None
    nodes: dict[str, Path] = field(default_factory=dict)
    deployment: Deployment | None = None
    """None on the machine of one participant or of the server, which has only its own folder."""
    port: int | None = None
    """Another port for the server of a rehearsal."""

    @classmethod
    def find(cls, folder: Path, port: int | None = None) -> "Place":
        if (folder / "deployment.toml").exists():
            it = Deployment.load(folder)
            nodes = {name: it.node(name) for name in it.nodes if it.node(name).is_dir()}
            return cls(it.server if it.server.is_dir() else None, nodes, it, port)
        if (folder / "federation.toml").exists():
            return cls(server=folder)
        if (folder / "node.toml").exists():
            return cls(nodes={folder.resolve().name: folder})
        raise ConfigError(
            f"'{folder}' is neither a deployment (it has no deployment.toml), nor the folder of a server "
            "(federation.toml) or of a node (node.toml). Check the path."
        )

    def secure(self, folder: Path) -> bool:
        if self.deployment is not None:
            return self.deployment.secure
        return any((folder / name).exists() for name in ("proxy.conf", "forwarder.conf"))

    def renewal(self, name: str | None = None) -> str:
        folder = self.deployment.folder if self.deployment else "FOLDER"
        where = "" if self.deployment else ", where ca/ is kept"
        return f"Create a new one{where}: hetero-ssfl deploy renew {folder}{f' --node {name}' if name else ''}"


def check_folder(folder: Path, port: int | None = None) -> list[Finding]:
    """Return what was found, the server's part first."""
    place = Place.find(folder, port)
    found: list[Finding] = []
    config, shape = None, None
    if place.server is not None:
        config, shape = _server(place, place.server, found)
    elif place.deployment is not None:
        found.append(Finding("server", "settings", "warning", f"its folder is not here and {UNCHECKED}"))
    settings, trusted = {}, not any(it.what == "certificates" and it.level == "stops" for it in found)
    for name, path in place.nodes.items():
        node = _settings(name, path, found)
        if node is not None:
            settings[name] = node
            found += _node(name, path, node, config, shape)
        found += _files_of_node(place, name, path, trusted)
    absent = [name for name in place.deployment.nodes if name not in place.nodes] if place.deployment else []
    found += [Finding(name, "settings", "warning", f"its folder is not here and {UNCHECKED}") for name in absent]
    if config is not None and config.privacy.secure:
        for name, node in settings.items():
            names = [other.name for other in settings.values()]
            found += collect(name, "keys", check_nodes.check_peers(node, names))
    if config is not None:
        found += collect("server", "names", check_nodes.check_names(config, _node_names(place), settings))
    return found


def _node_names(place: Place) -> list[str]:
    """Return the nodes of the deployment; on the server's machine, those whose keys can be registered."""
    if place.deployment is not None:
        return list(place.deployment.nodes)
    return sorted(path.stem for path in place.server.glob("node-keys/*.pub")) if place.server else []


# --- the server ---


def _server(place: Place, server: Path, found: list[Finding]) -> tuple[Config | None, check_nodes.Shape | None]:
    """Check the server's folder. Return its config and the shape of the RAD, as far as they are usable."""
    config, shape = None, None
    try:
        config = load_config(str(server / "federation.toml"))
    except HeteroSSFLError as error:
        found.append(Finding("server", "settings", "stops", f"federation.toml: {error}"))
    if config is not None:
        text = f"{config.method}, {config.rounds} rounds, {config.clients.count} nodes"
        found.append(Finding("server", "settings", "ok", text))
        found += collect("server", "settings", check_nodes.check_code(config))
        pictures = None
        try:
            data, pictures = check_nodes.rad_pictures(config, server)
            found += collect("server", "RAD", check_nodes.check_rad(config, data, pictures))
        except HeteroSSFLError as error:
            found.append(Finding("server", "RAD", "stops", str(error)))
        shape = check_nodes.rad_shape(config, pictures)
    found += _files_of_server(place, server)
    return config, shape


def _files_of_server(place: Place, server: Path) -> Iterator[Finding]:
    whole = place.deployment
    if place.secure(server):
        certificates = check_files.server_certificates(server, whole.host if whole else None, place.renewal())
        yield from collect("server", "certificates", certificates)
        yield from collect("server", "nginx", check_files.nginx_configuration(server / "proxy.conf", whole is None))
    certificate = server / "server.crt" if place.secure(server) else None
    if whole is not None:  # a rehearsal: all other ports are chosen when it starts
        addresses = iter([(whole.loopback, place.port or whole.port)])
    else:
        addresses = check_files.listeners(server / "proxy.conf", server / "start-superlink.sh")
    yield from collect("server", "ports", check_files.free_ports(addresses, certificate))


# --- a node ---


def _settings(name: str, path: Path, found: list[Finding]) -> NodeSettings | None:
    try:
        return read_node(path / "node.toml")
    except HeteroSSFLError as error:
        found.append(Finding(name, "settings", "stops", f"node.toml: {error}"))
        return None


def _node(
    name: str, path: Path, node: NodeSettings, config: Config | None, shape: check_nodes.Shape | None
) -> Iterator[Finding]:
    yield from collect(name, "settings", check_nodes.check_settings(node))
    pictures = None
    try:
        pictures = check_nodes.Pictures(node.data, path)
        yield from collect(name, "images", check_nodes.check_images(node, pictures, shape))
    except HeteroSSFLError as error:
        yield Finding(name, "images", "stops", str(error))
    size = check_nodes.encoder_shape(node, shape, pictures)
    with modules_beside(path):  # as start.sh does
        found = list(collect(name, "encoder", check_nodes.check_encoder(node, size)))
        usable = pictures is not None and not any(it.level == "stops" for it in found)
        if usable and config is not None and shape is not None:
            found += collect(name, "limits", check_nodes.check_limits(node, config, shape))
    yield from found


def _files_of_node(place: Place, name: str, path: Path, server_trusted: bool) -> Iterator[Finding]:
    if place.secure(path):
        alone = place.deployment is None
        renewal = place.renewal(name)
        own = list(collect(name, "certificates", check_files.node_certificates(path, renewal)))
        yield from own
        if place.server is not None and server_trusted and not any(it.level == "stops" for it in own):
            key = place.server / "node-keys" / f"{name}.pub"
            parts = check_files.agreement(path, place.server, key, renewal)
            yield from collect(name, "certificates", parts)
        yield from collect(name, "nginx", check_files.nginx_configuration(path / "forwarder.conf", alone))
    if place.deployment is None:
        addresses = list(check_files.listeners(path / "forwarder.conf"))
        if not any(check_files.shows(*forwarder, path / "local.crt") for forwarder in addresses):
            addresses.append(("127.0.0.1", int(os.environ.get("NODE_PORT", NODE_PORT))))  # free unless the node runs
        yield from collect(name, "ports", check_files.free_ports(iter(addresses), path / "local.crt"))
