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
import tomllib
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from .certificates import read_authority
from .check_machine import shows_certificate
from .layout import Deployment
from .write import DEMO, START, File, Writer, create_folder, replace_files

REGISTER_SECONDS = 60.0
HEADER = (r"\[clients\][^\n]*", "\\g<0>\n{line}")  # where a line without a place of its own is inserted


# --- files ---


def add_node(deployment: Deployment, name: str, days: int = 825) -> Deployment:
    """Write the files of a new node, completely or not at all. Return the deployment with it."""
    if name in deployment.nodes or deployment.node(name).exists():
        raise ConfigError(f"this deployment already has a node '{name}'. Choose another name.")
    wider = replace(deployment, nodes=(*deployment.nodes, name))  # checks the name
    folder, own = deployment.folder, f"nodes/{name}/"
    writer = Writer(wider)
    writer.add_node(name, _settings(deployment))
    if deployment.secure:
        clients = read_authority(deployment, "client-ca")
        writer.add_node_keys(name, (folder / "ca/ca.crt").read_bytes(), clients, days)
        for other in deployment.server.glob("node-keys/*.pub"):
            writer.put(f"{own}peers/{other.name}", other.read_bytes())
    create_folder(wider.node(name), {p.removeprefix(own): it for p, it in writer.files.items() if p.startswith(own)})
    # The folders of the server and of other nodes may be on their machines only. deployment.toml names the node last.
    writer.put("deployment.toml", wider.to_toml())
    others = {p: it for p, it in writer.files.items() if not p.startswith(own) and (folder / p).parent.is_dir()}
    try:
        replace_files(folder, others)
    except ConfigError:
        shutil.rmtree(wider.node(name))
        raise
    return wider


def _settings(deployment: Deployment) -> dict[str, Any]:
    """Return the initial settings of a new node: those of `deploy init`, which also wrote the config."""
    try:
        rad = tomllib.loads((deployment.server / "federation.toml").read_text()).get("rad", {})
    except (OSError, tomllib.TOMLDecodeError):
        return START
    return DEMO if rad.get("source") == DEMO["rad"] else START


# --- registration ---


def register_node(deployment: Deployment, name: str) -> int | str | None:
    """Register the key of a node with the SuperLink of this machine, if it is running.

    Return Flower's id of the node, or why its key was not registered. None means that no SuperLink is running here.
    """
    server, port = deployment.server, deployment.superlink_port
    if not deployment.secure or not shows_certificate(deployment.loopback, port, server / "server.crt"):
        return None
    register = [server / "flwr.sh", "supernode", "register", server / "node-keys" / f"{name}.pub", "hetero-ssfl"]
    command = [*map(str, register), "--name", name, "--format", "json"]
    environment = {"FLOWER_BIN": os.path.dirname(sys.executable), **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=REGISTER_SECONDS)
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    except ValueError:
        return " ".join((done.stderr or done.stdout).split())[-300:]
    return int(answer["node-id"]) if answer.get("success") else " ".join(str(answer.get("error-message")).split())


# --- the federation's config ---


def seat_node(deployment: Deployment, name: str, node: int | None) -> str | None:
    """Give a node a seat in server/federation.toml, whose comments stay. Return what changed, or None.

    A config without `clients.seats` admits every registered node as long as there are seats: `clients.newcomers` is
    raised if there are fewer than nodes.
    """
    path = deployment.server / "federation.toml"
    try:
        text = path.read_text()
        config = tomllib.loads(text)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}. Fix it; the node may need a seat in it.") from None
    clients, changes = config.setdefault("clients", {}), []
    missing = len(deployment.nodes) - clients.get("count", 5)
    if missing > clients.get("newcomers", 0):
        line = f"newcomers = {missing}"
        pattern, new = (r"newcomers[ \t]*=[ \t]*\d+", line) if "newcomers" in clients else HEADER
        text = re.sub(f"^{pattern}", new.format(line=line), text, count=1, flags=re.MULTILINE)
        clients["newcomers"] = missing
        changes.append(f"clients.{line}")
    if clients.get("seats") and name not in [seat.get("name") for seat in clients["seats"]]:
        seat = {"name": name} if node is None else {"name": name, "node": node}
        lines = [f"{key} = {json.dumps(value)}" for key, value in seat.items()]
        inline, table = f"\\g<0>{{{', '.join(lines)}}}, ", "\n".join(["[[clients.seats]]", *lines, "", "\\g<0>"])
        text = re.sub(r"^seats[ \t]*=[ \t]*\[", inline, text, count=1, flags=re.MULTILINE)
        text = re.sub(r"^\[\[clients\.seats\]\]", table, text, count=1, flags=re.MULTILINE)
        clients["seats"] = [seat, *clients["seats"]]
        changes.append(f"a seat for '{name}' in clients.seats")
    if not changes:
        return None
    with suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(text) == config:
            replace_files(deployment.folder, {"server/federation.toml": File(text.encode())})
            return " and ".join(changes)
    raise ConfigError(f"'{path}' cannot be edited by a program. Add {' and '.join(changes)} there.")


# --- what is left to do ---


def remaining_steps(deployment: Deployment, name: str) -> list[str]:
    """Register a new node and give it a seat, as far as that is possible here. Return what is left to do."""
    registered = register_node(deployment, name)
    node, here = registered if isinstance(registered, int) else None, deployment.server.is_dir()
    secret = " over a confidential channel (it holds private keys), and delete it here" if deployment.secure else ""
    steps = [
        f"Send the folder nodes/{name}/ to {name}{secret}.",
        f"{name}: edit node.toml, look for mistakes with `hetero-ssfl deploy check .`, and start ./start.sh.",
    ]
    if deployment.secure:
        steps.append(f"Send nodes/{name}/node.pub to all other nodes, as peers/{name}.pub: secure sums need it.")
    if node is not None:
        steps.append(f"(done) The SuperLink on this machine has registered its key as node {node}.")
    elif deployment.secure:
        steps += [f"The SuperLink on this machine did not register its key: {registered}"] if registered else []
        steps += [] if here else [f"Send nodes/{name}/node.pub to the server, as server/node-keys/{name}.pub."]
        steps.append("On the server, while its SuperLink runs: server/register-nodes.sh")
    changed = seat_node(deployment, name, node) if here else None
    if here and changed is None:
        return steps
    seat = "On the server: add it to clients.seats in federation.toml, or raise clients.newcomers by 1."
    if changed:
        seat = f"(done) server/federation.toml has {changed}. Copy it to the server if that is another machine."
    restart = "stop it (server/flwr.sh list, server/flwr.sh stop RUN_ID) and continue it with server/run.sh"
    return [*steps, seat, f"On the server, if a run has begun: {restart}. Finished rounds are kept."]
