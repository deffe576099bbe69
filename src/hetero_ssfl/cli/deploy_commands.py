"""`hetero-ssfl deploy ...`: parse, call, print. Heavy imports wait until a command needs them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from .terminal import Json, Quiet, err, print_json, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..runs.environment import Finding

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
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no keys; for tests in closed networks.")
    ] = False,
) -> None:
    """Write the files of the server and of each participant: keys, certificates, settings, scripts, instructions.

    Examples:
      hetero-ssfl deploy init fl --nodes 5 --host fl.example.org
      hetero-ssfl deploy init fl --names seaside,mountain,city
      hetero-ssfl deploy init try --demo
    """
    from ..deploy.layout import Deployment, node_names
    from ..deploy.write import initialise

    initialise(Deployment(folder.absolute(), node_names(nodes, names), host, port, not insecure), days, demo)
    if insecure:
        warning = "without TLS and keys, anyone who can reach the port can take part and read messages."
        err.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)
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
    from ..deploy.certificates import renew_node, renew_server
    from ..deploy.layout import Deployment

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
    from ..deploy.certificates import revoke_node
    from ..deploy.layout import Deployment

    new = revoke_node(Deployment.load(folder), node)
    say(f"{node}: {_count(new, 'certificate')} revoked" if new else f"{node} was revoked before")
    say("Copy ca/client.crl to the server's machine as server/client.crl and run server/reload-proxy.sh there.")
    say("To remove its key as well: server/flwr.sh supernode list shows its id, supernode unregister ID removes it.")


@app.command()
def check(
    folder: Annotated[
        Path, typer.Argument(help="The folder of the deployment, of its server or of one node.", show_default=False)
    ],
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
    stops = _stops(findings)
    if as_json:
        content = [{"who": it.who, "what": it.what, "level": it.level, "text": it.text} for it in findings]
        print_json({"stops": stops, "findings": content})
    else:
        for line in _lines(findings):
            say(line)
        left_out = sum(not finding.checked for finding in findings)
        verdict = f"{_count(stops, 'finding')} would stop a run" if stops else "nothing was found that would stop a run"
        say(f"{verdict}; {_count(left_out, 'part')} not checked" if left_out else verdict)
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
    from ..deploy import add_node as adding
    from ..deploy.layout import Deployment
    from ..deploy.write import date_after

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
    from ..config import load_config
    from ..deploy.layout import Deployment
    from ..deploy.local import LocalDeployment
    from ..deploy.watch import RunWatch
    from ..report.progress import RunView
    from ..runs.folder import RunFolder

    deployment = Deployment.load(folder)
    test = LocalDeployment(deployment, port)
    finished = (test.run_dir / "results.json").exists() and not fresh
    if not finished:
        _check_first(folder, port)
        if deployment.secure and not test.proxied:
            err.print(f"The proxy is left out of this test: {test.without_proxy()}.", soft_wrap=True)
        name = load_config(str(deployment.server / "federation.toml")).name
        try:
            with RunView(err, name, quiet) as view, test:
                if fresh:
                    test.forget()
                test.start_all()
                test.run(RunWatch(test.run_dir, view))
        except KeyboardInterrupt:
            err.print(
                "Interrupted. All programs are stopped; finished rounds are kept. Use the same command to continue."
            )
            sys.exit(130)
    results = RunFolder(test.run_dir).read_json("results.json")
    if as_json:
        print_json({"run": str(test.run_dir), **results})
        return
    means = "  ".join(f"{key} {value:.1f}" for key, value in results.get("mean", {}).items())
    say(f"finished: mean over nodes {means or 'unknown: the data has no labels'}")
    say(f"run folder: {escape(str(test.run_dir))} (use --fresh to test again)")


# --- what checks say ---

COLOURS = {"ok": "green", "warning": "yellow", "stops": "red"}


def _lines(findings: "Iterable[Finding]") -> "Iterator[str]":
    """Yield findings as lines that begin with the machine they are about. A warning of several machines is one line."""
    from ..deploy.check import merge_warnings

    for it in merge_warnings(findings):
        text = f"{escape(it.who)}  {it.what}: {escape(' '.join(it.text.split()))}"
        yield f"[{COLOURS[it.level]}]{it.level:<7}[/]  {text}"


def _stops(findings: "list[Finding]") -> int:
    return sum(finding.level == "stops" for finding in findings)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _check_first(folder: Path, port: int | None) -> None:
    """Print warnings, and raise ConfigError if a test cannot succeed."""
    from ..deploy.check import check_folder
    from ..errors import ConfigError

    findings = check_folder(folder, port)
    for line in _lines(finding for finding in findings if not finding.ok):
        err.print(line, highlight=False, soft_wrap=True)
    if stops := _stops(findings):
        raise ConfigError(f"{_count(stops, 'finding')} would stop this run, see above. Nothing was started.")
