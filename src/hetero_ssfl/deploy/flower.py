"""The command lines of Flower's programs in a deployment.

The scripts written by `init` and the rehearsal use the same command lines. Folders are passed as text, so that a script
can use "$here" where the rehearsal uses a path.
"""

from collections.abc import Sequence

CONNECTION = "hetero-ssfl"  # the name of our SuperLink in Flower's own config file

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # nodes run the code they installed themselves
}

APP = f"""\
# What `flwr run` sends to every node: two names. The code itself is installed on each machine.
[project]
name = "{CONNECTION}"
version = "1.0.0"
description = "Names the parts of the installed hetero-ssfl package."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "{CONNECTION}"

[tool.flwr.app.components]
serverapp = "hetero_ssfl.federation.superlink:server_app"
clientapp = "hetero_ssfl.federation.client.app:app"

[tool.flwr.app.config]  # `run.sh` sets both
config = "federation.toml"
run-dir = "run"
"""


def superlink(server: str, bind: str, port: str, database: str, secure: bool) -> list[str]:
    """Return the command of the SuperLink, which carries all messages. Its database lets it continue after a crash."""
    trust = [
        *("--ssl-ca-certfile", f"{server}/ca.crt"),
        *("--ssl-certfile", f"{server}/server.crt", "--ssl-keyfile", f"{server}/server.key"),
        "--enable-supernode-auth",
    ]
    return [
        *("flower-superlink", "--host", bind, "--port", port, "--database", database),
        # The server app runs in a separate process, not as a child of the SuperLink, so that it survives the SuperLink.
        *("--isolation", "process", "--superexec-auth-secret-file", f"{server}/superexec.secret"),
        "--disable-runtime-dependency-installation",
        *(trust if secure else ["--insecure"]),
    ]


def superexec(server: str, superlink: str, secure: bool) -> list[str]:
    """Return the command of the SuperExec, which starts the server app of a run on the server's machine."""
    return [
        *("flower-superexec", "--runtime-api-address", superlink),
        *("--superexec-auth-secret-file", f"{server}/superexec.secret"),
        *(("--root-certificates", f"{server}/ca.crt") if secure else ("--insecure",)),
    ]


def supernode(node: str, superlink: str, port: str, authority: str | None) -> list[str]:
    """Return the command of one participant.

    `port` is for its own client processes, on the loopback interface only. `authority` is the file in its folder that
    verifies the certificate at `superlink`; None connects without TLS and without a key.
    """
    trust = ["--root-certificates", f"{node}/{authority}", "--auth-supernode-private-key", f"{node}/node.key"]
    return [
        *("flower-supernode", "--superlink", superlink, "--host", "127.0.0.1", "--port", port),
        *("--node-config", f'settings="{node}/node.toml"'),
        *(trust if authority else ["--insecure"]),
    ]


# --- arguments of `flwr` ---


def register(public_key: str, name: str) -> list[str]:
    return ["supernode", "register", public_key, CONNECTION, "--name", name, "--format", "json"]


def run(app: str, config: str, run_dir: str) -> list[str]:
    return ["run", app, CONNECTION, "--run-config", f'config="{config}" run-dir="{run_dir}"']


def connection(superlink: str, ca_file: str, secure: bool) -> str:
    """Return Flower's config file, which tells `flwr` the address of the SuperLink."""
    trust = f'root-certificates = "{ca_file}"' if secure else "insecure = true"
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{superlink}"\n{trust}\n'


def shell(command: Sequence[str]) -> str:
    """Return a command as one line of a shell script. Variables such as "$here" are still expanded."""
    return " ".join(_quoted(word) for word in command)


def _quoted(word: str) -> str:
    if word.replace("-", "").isalnum():
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'
