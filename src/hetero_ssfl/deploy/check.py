"""`deploy check`: find what would stop a run before any program starts. Each check takes seconds at most.

The folder is a whole deployment, as `deploy init` wrote it, or the folder of one machine. A whole deployment is checked
for a test here (`deploy local`), one machine for its own part. What is on other machines is not checked.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..config import Config, load_config
from ..data import skip_with
from ..errors import ConfigError, HeteroSSFLError
from ..federation.participants.node_settings import NodeSettings, read_node
from ..plugins import modules_beside
from ..runs.environment import Finding
from . import check_machine, check_nodes, nginx
from .check_machine import Part
from .check_nodes import ImageSample, Shape
from .layout import NODE_PORT, Deployment

ELSEWHERE: Part = ("unchecked", "its folder is not here and was not checked")


def check_folder(folder: Path, port: int | None = None) -> list[Finding]:
    """Return what was found, the server's part first. `port` replaces that of the deployment in a test here."""
    if (folder / "deployment.toml").exists():
        it = Deployment.load(folder)
        here = {name: it.node(name) for name in it.nodes if it.node(name).is_dir()}
        check = _Check(it.server if it.server.is_dir() else None, here, it)
    elif (folder / "federation.toml").exists():
        check = _Check(folder, {}, None)
    elif (folder / "node.toml").exists():
        check = _Check(None, {folder.resolve().name: folder}, None)
    else:
        files = "deployment.toml, federation.toml (of a server) or node.toml"
        raise ConfigError(f"'{folder}' is not part of a deployment: it has no {files}. Check the path.")
    check.run(port)
    return check.findings


def merge_warnings(findings: Iterable[Finding]) -> list[Finding]:
    """Combine warnings that are the same on several machines into one, which names all of them."""
    groups: dict[tuple[str, str, int], list[Finding]] = {}
    for number, it in enumerate(findings):
        alone = number if it.ok or it.required else -1
        groups.setdefault((it.what, it.text, alone), []).append(it)
    return [replace(same[0], who=", ".join(dict.fromkeys(it.who for it in same))) for same in groups.values()]


SKIP = "on_bad_image = 'skip' in [data]"


class _Check:
    """The parts of a deployment that are in a folder, and the findings about them.

    `deployment` is None on the machine of one participant or of the server, which has only its own folder.
    """

    def __init__(self, server: Path | None, nodes: dict[str, Path], deployment: Deployment | None) -> None:
        self.server, self.nodes, self.deployment = server, nodes, deployment
        self.findings: list[Finding] = []
        self.config: Config | None = None
        self.shape: Shape = (0, 0)  # of the RAD's images
        self.settings: dict[str, NodeSettings] = {}
        self.samples: dict[str, ImageSample] = {}
        self.server_trusted = True

    def run(self, port: int | None) -> None:
        everyone = self.deployment.nodes if self.deployment else ()
        if self.server is not None:
            self.check_server(self.server, port)
        elif self.deployment is not None:
            self.add("server", "settings", [ELSEWHERE])
        for name, path in self.nodes.items():
            self.check_node(name, path)
            self.check_node_files(name, path)
        for name in (name for name in everyone if name not in self.nodes):
            self.add(name, "settings", [ELSEWHERE])
        if self.config is None:
            return
        for name, node in self.settings.items() if self.config.privacy.secure else ():
            names = [other.name for other in self.settings.values()]
            self.add(name, "keys", check_nodes.check_peers(node, names))
        if self.server is not None and not self.deployment:  # those whose keys can be registered
            everyone = tuple(sorted(path.stem for path in self.server.glob("node-keys/*.pub")))
        self.add("server", "names", check_nodes.check_names(self.config, everyone, self.settings))

    def add(self, who: str, what: str, parts: Iterable[Part]) -> bool:
        """Add the findings of one check. Return whether nothing stops a run."""
        before = len(self.findings)
        try:
            for level, text in parts:
                self.findings.append(Finding(what, level == "ok", text, level == "stops", who, level != "unchecked"))
        except HeteroSSFLError as error:  # ends that check, and is a finding itself
            self.findings.append(Finding(what, False, str(error), True, who))
        except OSError as error:
            text = f"'{error.filename}' cannot be read: {error.strerror}."
            self.findings.append(Finding(what, False, text, True, who))
        return not any(it.level == "stops" for it in self.findings[before:])

    def is_secure(self, folder: Path) -> bool:
        if self.deployment is not None:
            return self.deployment.secure
        return any((folder / name).exists() for name in ("proxy.conf", "forwarder.conf"))

    def renewal(self, option: str = "") -> str:
        folder, where = (self.deployment.folder, "") if self.deployment else ("FOLDER", ", where ca/ is kept")
        return f"Create a new one{where}: hetero-ssfl deploy renew {folder}{option}"

    def check_server(self, server: Path, port: int | None) -> None:
        if self.add("server", "settings", self._check_config(server)):
            self.add("server", "RAD", self._check_rad(server))
        it, certificate = self.deployment, None
        if self.is_secure(server):
            certificate = server / "server.crt"
            parts = check_machine.server_certificates(server, it.host if it else None, self.renewal())
            self.server_trusted = self.add("server", "certificates", parts)
            self.add("server", "nginx", nginx.check_configuration(server / "proxy.conf", it is None))
        if it is not None:  # a test here: all other ports are chosen when it starts
            addresses = [(it.loopback, port or it.port)]
        else:
            addresses = list(check_machine.listeners(server / "proxy.conf", server / "start-superlink.sh"))
        self.add("server", "ports", check_machine.free_ports(addresses, certificate))

    def _check_config(self, server: Path) -> Iterator[Part]:
        config = self.config = load_config(str(server / "federation.toml"))
        yield "ok", f"{config.method}, {config.rounds} rounds, {config.clients.count} nodes"
        yield from check_nodes.check_code("method", config.method)

    def _check_rad(self, server: Path) -> Iterator[Part]:
        assert self.config is not None
        data = check_nodes.rad_data(self.config, server)
        self.shape = check_nodes.image_shape(data, None)  # if the images cannot be read
        with skip_with(f"{SKIP} of federation.toml"):
            sample = ImageSample(data, server)
        self.shape = check_nodes.image_shape(data, sample)
        yield from check_nodes.check_rad(self.config, data, sample)

    def check_node(self, name: str, path: Path) -> None:
        self.add(name, "settings", self._check_settings(name, path))
        node = self.settings.get(name)
        if node is None:
            return
        self.add(name, "images", self._check_images(name, path, node))
        sample = self.samples.get(name)
        with modules_beside(path):  # as start.sh does
            usable = self.add(name, "encoder", check_nodes.check_encoder(node, self.shape, sample))
            if usable and sample and self.config and all(self.shape):
                self.add(name, "limits", check_nodes.check_limits(node, self.config, self.shape))

    def _check_settings(self, name: str, path: Path) -> Iterator[Part]:
        self.settings[name] = read_node(path / "node.toml")
        yield from check_nodes.check_settings(self.settings[name])

    def _check_images(self, name: str, path: Path, node: NodeSettings) -> Iterator[Part]:
        with skip_with(f"{SKIP} of node.toml"):
            self.samples[name] = ImageSample(node.data, path)
        yield from check_nodes.check_images(node, self.samples[name], self.shape)

    def check_node_files(self, name: str, path: Path) -> None:
        alone = self.deployment is None
        if self.is_secure(path):
            renewal = self.renewal(f" --node {name}")
            trusted = self.add(name, "certificates", check_machine.node_certificates(path, renewal))
            if self.server is not None and self.server_trusted and trusted:
                key = self.server / "node-keys" / f"{name}.pub"
                self.add(name, "certificates", check_machine.agreement(path, self.server, key, renewal))
            self.add(name, "nginx", nginx.check_configuration(path / "forwarder.conf", alone))
        if alone:
            certificate = path / "local.crt"
            addresses = list(check_machine.listeners(path / "forwarder.conf"))
            if not any(check_machine.shows_certificate(*forwarder, certificate) for forwarder in addresses):
                addresses.append(("127.0.0.1", int(os.environ.get("NODE_PORT", NODE_PORT))))  # free unless it runs
            self.add(name, "ports", check_machine.free_ports(addresses, certificate))
