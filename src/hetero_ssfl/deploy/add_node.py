"""Add a node to an existing deployment, also while its federation is running (`deploy add-node`).

1. write the node's folder, its client certificate and its public key for the server; needs the keys in ca/;
2. register the key if the SuperLink is running on this machine;
3. give the node a seat in the federation's config, if the config lists seats or all of them are taken.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import flower
from .certificates import authority_of
from .check_files import shows
from .layout import Deployment
from .write import DEMO, ENCODERS, START, Writer

REGISTER_SECONDS = 60.0
HEADER = (r"\[clients\][^\n]*", "\\g<0>\n{line}")  # where a line without a place of its own is inserted


@dataclass(frozen=True)
class Registration:
    """The answer of a running SuperLink: Flower's id of the node, or why its key was not registered."""

    node: int | None = None
    problem: str = ""


# --- files ---


def add_node(deployment: Deployment, name: str, days: int = 825) -> Deployment:
    """Write the files of a new node, completely or not at all. Return the deployment with it."""
    if name in deployment.nodes or deployment.node(name).exists():
        raise ConfigError(f"this deployment already has a node '{name}'. Choose another name.")
    wider = replace(deployment, nodes=(*deployment.nodes, name))  # checks the name
    folder = deployment.folder
    clients = authority_of(deployment, "client-ca") if deployment.secure else None
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".new-node.", dir=folder))
        try:
            writer = Writer(wider, scratch)
            writer.write_node(name, ENCODERS[len(deployment.nodes) % len(ENCODERS)], _settings(deployment))
            if clients is not None:
                writer.write_node_keys(name, (folder / "ca/ca.crt").read_bytes(), clients, days)
                for other in deployment.server.glob("node-keys/*.pub"):
                    writer.put(f"nodes/{name}/peers/{other.name}", other.read_bytes())
            _move(wider, name, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write to '{folder}': {error.strerror}. Nothing was changed.") from None
    return wider


def _move(wider: Deployment, name: str, scratch: Path) -> None:
    """Move a new node's files to their places. deployment.toml names the node last."""
    new = scratch / "nodes" / name
    for part in (new, *new.rglob("*/")):
        part.chmod(0o700)
    kept = [f"ca/clients/{name}.crt"] if wider.secure else []
    kept += [f"server/node-keys/{name}.pub"] if wider.secure and wider.server.is_dir() else []
    others = [other for other in wider.nodes if other != name and (wider.node(other) / "peers").is_dir()]
    kept += [f"nodes/{other}/peers/{name}.pub" for other in others] if wider.secure else []
    files = {path: (scratch / path).read_bytes() for path in kept}
    wider.node(name).parent.mkdir(mode=0o700, exist_ok=True)
    new.rename(wider.node(name))
    try:
        Writer(wider, wider.folder).replace({**files, "deployment.toml": wider.to_toml().encode()})
    except OSError:
        shutil.rmtree(wider.node(name))
        raise


def _settings(deployment: Deployment) -> dict[str, Any]:
    """Return the initial settings of a new node: those of `deploy init`, which also wrote the config."""
    try:
        rad = tomllib.loads((deployment.server / "federation.toml").read_text()).get("rad", {})
    except (OSError, tomllib.TOMLDecodeError):
        return START
    return DEMO if rad.get("source") == DEMO["rad"] else START


# --- registration ---


def register_node(deployment: Deployment, name: str) -> Registration | None:
    """Register the key of a node with the SuperLink of this machine. Return None if it is not running here."""
    server = deployment.server
    if not deployment.secure or not shows(deployment.loopback, deployment.superlink_port, server / "server.crt"):
        return None
    command = [str(server / "flwr.sh"), *flower.register(str(server / "node-keys" / f"{name}.pub"), name)]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    try:
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=REGISTER_SECONDS
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Registration(problem=str(error))
    except ValueError:
        return Registration(problem=" ".join((done.stderr or done.stdout).split())[-300:])
    if not answer.get("success"):
        return Registration(problem=" ".join(str(answer.get("error-message")).split()))
    return Registration(int(answer["node-id"]))


# --- the federation's config ---


def seat_node(deployment: Deployment, name: str, node: int | None) -> str | None:
    """Give a node a seat in server/federation.toml, whose comments stay. Return what changed, or None.

    A config without `clients.seats` admits every registered node as long as there are seats: `clients.newcomers` is
    raised if there are fewer than nodes.
    """
    path = deployment.server / "federation.toml"
    try:
        text = path.read_text()
        before = tomllib.loads(text)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}. Fix it; the node may need a seat in it.") from None
    clients = before.get("clients", {})
    wanted: dict[str, Any] = dict(clients)
    if clients.get("seats") and name not in [seat.get("name") for seat in clients["seats"]]:
        wanted["seats"] = [{"name": name} if node is None else {"name": name, "node": node}, *clients["seats"]]
    missing = len(deployment.nodes) - clients.get("count", 5)
    if missing > clients.get("newcomers", 0):
        wanted["newcomers"] = missing
    if wanted == clients:
        return None
    said = [f"clients.newcomers = {missing}"] if wanted.get("newcomers") != clients.get("newcomers") else []
    said += [f"a seat for '{name}' in clients.seats"] if wanted.get("seats") != clients.get("seats") else []
    changed = _edited(text, clients, wanted)
    if changed is None:
        raise ConfigError(f"'{path}' cannot be edited by a program. Add {' and '.join(said)} there.")
    Writer(deployment, deployment.folder).replace({"server/federation.toml": changed.encode()})
    return " and ".join(said)


def _edited(text: str, clients: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Return the text of a config with other seats and newcomers; None if the result is not exactly that."""
    expected = {**tomllib.loads(text), "clients": wanted}
    if wanted.get("newcomers") != clients.get("newcomers"):
        line = f"newcomers = {wanted['newcomers']}"
        pattern, new = (r"newcomers[ \t]*=[ \t]*\d+", line) if "newcomers" in clients else HEADER
        text = re.sub(f"^{pattern}", new.format(line=line), text, count=1, flags=re.MULTILINE)
    if wanted.get("seats") != clients.get("seats"):  # the new seat comes first
        seat = [f"{key} = {json.dumps(value)}" for key, value in wanted["seats"][0].items()]
        inline, table = f"\\g<0>{{{', '.join(seat)}}}, ", "\n".join(["[[clients.seats]]", *seat, "", "\\g<0>"])
        text = re.sub(r"^seats[ \t]*=[ \t]*\[", inline, text, count=1, flags=re.MULTILINE)
        text = re.sub(r"^\[\[clients\.seats\]\]", table, text, count=1, flags=re.MULTILINE)
    try:
        return text if tomllib.loads(text) == expected else None
    except tomllib.TOMLDecodeError:
        return None


# --- what is left to do ---


def steps(deployment: Deployment, name: str, registered: Registration | None) -> list[str]:
    """Return what to send to whom, and how the node is registered."""
    secret = " over a confidential channel (it holds private keys), and delete it here" if deployment.secure else ""
    found = [
        f"Send the folder nodes/{name}/ to {name}{secret}.",
        f"{name}: edit node.toml, look for mistakes with `hetero-ssfl deploy check .`, and start ./start.sh.",
    ]
    if not deployment.secure:
        return found
    found.append(f"Send nodes/{name}/node.pub to all other nodes, as peers/{name}.pub: secure sums need it.")
    if registered is not None and registered.node is not None:
        return [*found, f"(done) The SuperLink on this machine has registered its key as node {registered.node}."]
    if registered is not None:
        found.append(f"The SuperLink on this machine did not register its key: {registered.problem}")
    if not deployment.server.is_dir():
        found.append(f"Send nodes/{name}/node.pub to the server, as server/node-keys/{name}.pub.")
    return [*found, "On the server, while its SuperLink runs: server/register-nodes.sh"]


def seat_steps(deployment: Deployment, name: str, node: int | None) -> list[str]:
    """Give the node a seat if it needs one. Return what is left to do for it."""
    if deployment.server.is_dir():
        changed = seat_node(deployment, name, node)
        if changed is None:
            return []
        found = [f"(done) server/federation.toml has {changed}. Copy it to the server if that is another machine."]
    else:
        found = ["On the server: add it to clients.seats in federation.toml, or raise clients.newcomers by 1."]
    return [
        *found,
        "On the server, if a run has begun: stop it (server/flwr.sh list, server/flwr.sh stop RUN_ID) and continue it "
        "with server/run.sh. Finished rounds are kept.",
    ]
