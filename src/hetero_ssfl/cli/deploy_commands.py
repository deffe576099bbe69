"""The commands `hetero-ssfl deploy ...`."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..config import load_config
from ..deploy import add_node as adding
from ..deploy.certificates import renew_node, renew_server, revoke_node
from ..deploy.layout import Deployment, node_names
from ..deploy.write import date_after, initialise
from ..errors import ConfigError
from ..runs.environment import Finding
from .options import Json, Quiet
from .terminal import err, remark, resumable, say, show

app = typer.Typer(help="Deploy a federation on several machines, or test it on this one.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The folder of the deployment.", show_default=False)]
NodeName = Annotated[str, typer.Argument(help="The name of the node.", show_default=False)]
Days = Annotated[int, typer.Option(min=1, max=7300, help="Days that certificates are valid.")]


@app.command()
def init(
    folder: Folder,
    nodes: Annotated[int | None, typer.Option(min=1, max=999, help="The number of participants; by default 3.")] = None,
    names: Annotated[str | None, typer.Option(metavar="A,B,...", help="Their names; by default node-1, ...")] = None,
    host: Annotated[str, typer.Option(help="The server's name or address, as the nodes see it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of the server; no other is opened.")] = 9092,
    days: Days = 825,
    demo: Annotated[bool, typer.Option("--demo", help="Embedded digits, to try `deploy local` at once.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys; only for closed networks.")] = False,
) -> None:
    """Write the files of the server and of each participant: keys, certificates, settings, scripts, instructions.

    Examples:
      hetero-ssfl deploy init fl --nodes 5 --host fl.example.org
      hetero-ssfl deploy init fl --names seaside,mountain,city
      hetero-ssfl deploy init try --demo
    """
    initialise(Deployment(folder.absolute(), node_names(nodes, names), host, port, not insecure), days, demo)
    if insecure:
        remark("[yellow]warning:[/] without TLS and keys, anyone who can reach the port can join and read messages.")
    say(f"{escape(str(folder))}/README.md explains what to do on each machine.")


@app.command()
def renew(
    folder: Folder,
    node: Annotated[str | None, typer.Option(help="Renew the client certificate of this node instead.")] = None,
    days: Days = 825,
) -> None:
    """Create a new server certificate, signed by ca/ca.key, or a new client certificate for one node.

    Examples:
      hetero-ssfl deploy renew fl --days 365
      hetero-ssfl deploy renew fl --node node-2
    """
    deployment = Deployment.load(folder)
    if node is None:
        until = renew_server(deployment, days)
        say(f"valid until {until}. Copy server/server.crt and server/server.key to the server's machine.")
        say("There, run server/reload-proxy.sh and restart server/start-superlink.sh. Nodes need no changes.")
        return
    until = renew_node(deployment, node, days)
    say(f"valid until {until}. Copy client.crt and client.key from nodes/{node}/ to that node and restart start.sh.")


@app.command()
def revoke(folder: Folder, node: NodeName) -> None:
    """Refuse a node from now on: add its certificates to the revocation list of the proxy.

    `deploy renew --node` makes a new certificate if the node may come back, for instance after its key was stolen.

    Example:
      hetero-ssfl deploy revoke fl node-2
    """
    new = revoke_node(Deployment.load(folder), node)
    say(f"{node}: revoked certificates: {new}" if new else f"{node} was revoked before")
    say("Copy ca/client.crl to the server's machine as server/client.crl and run server/reload-proxy.sh there.")
    say("To remove its key as well: server/flwr.sh supernode list shows its id, supernode unregister ID removes it.")


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A deployment, or its part on one machine.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Find what would stop a run before anything starts: images, encoders, RAD, names, certificates, ports, limits.

    On the machine of the server or of one node, name its own folder. The exit code is 2 if something would stop a run.

    Examples:
      hetero-ssfl deploy check fl
      hetero-ssfl deploy check nodes/node-1
    """
    from ..deploy.check import check_folder

    findings = check_folder(folder)
    stops = sum(finding.level == "stops" for finding in findings)
    content = [{"who": it.who, "what": it.what, "level": it.level, "text": it.text} for it in findings]
    left_out = sum(not finding.checked for finding in findings)
    verdict = f"findings that would stop a run: {stops}; parts that were not checked: {left_out}"
    show(as_json, {"stops": stops, "findings": content}, *_lines(findings), verdict)
    if stops:
        sys.exit(2)


@app.command("add-node")
def add_node(folder: Folder, name: NodeName, days: Days = 825) -> None:
    """Add a node to a deployment, also while its federation is running: keys, certificate, settings, seat.

    Its key is registered at once if the SuperLink runs on this machine. What is left to do is printed, with the files
    that each person needs. ca/ must be in the folder.

    Example:
      hetero-ssfl deploy add-node fl hospital-d
    """
    deployment = adding.add_node(Deployment.load(folder), name, days)
    until = f"; its client certificate is valid until {date_after(days)}" if deployment.secure else ""
    say(f"{name} was added{until}. Left to do:")
    for step in adding.remaining_steps(deployment, name):
        say(f"- {escape(step)}")


@app.command()
def local(
    folder: Folder,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Use another port for the server.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard an earlier test instead of continuing it.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Test the deployment on this machine: run all its programs, with its keys, until the run is finished.

    `deploy check` comes first, so that a mistake in the settings shows within seconds. Ctrl-C stops everything; run the
    same command again to continue.

    Examples:
      hetero-ssfl deploy local fl
      hetero-ssfl deploy local fl --fresh
    """
    from ..deploy.check import check_folder
    from ..deploy.local import LocalDeployment, RunWatch
    from ..report.progress import RunView
    from ..runs.folder import RunFolder

    deployment = Deployment.load(folder)
    test = LocalDeployment(deployment, port)
    if fresh or not (test.run_dir / "results.json").exists():
        findings = [finding for finding in check_folder(folder, port) if not finding.ok]
        for line in _lines(findings):
            remark(line)
        if any(finding.required for finding in findings):
            raise ConfigError("these settings would stop the run, so nothing was started. Fix what is listed above.")
        if deployment.secure and not test.proxied:
            remark(f"The proxy is left out of this test: {test.without_proxy()}.")
        name = load_config(str(deployment.server / "federation.toml")).name
        with resumable(), RunView(err, name, quiet) as view, test:
            if fresh:
                test.forget()
            test.start_all()
            test.run(RunWatch(test.run_dir, view))
    results = RunFolder(test.run_dir).read_json("results.json")
    means = "  ".join(f"{key} {value:.1f}" for key, value in results.get("mean", {}).items())
    finished = f"finished: mean over nodes {means or 'unknown: the data has no labels'}"
    place = f"run folder: {escape(str(test.run_dir))} (use --fresh to test again)"
    show(as_json, {"run": str(test.run_dir), **results}, finished, place)


COLOURS = {"ok": "green", "warning": "yellow", "stops": "red"}


def _lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield findings as lines that begin with the machine they are about. A warning of several machines is one line."""
    from ..deploy.check import merge_warnings

    for it in merge_warnings(findings):
        text = f"{escape(it.who)}  {it.what}: {escape(' '.join(it.text.split()))}"
        yield f"[{COLOURS[it.level]}]{it.level:<7}[/]  {text}"
