"""The certificates of an existing deployment: renew and revoke. Both need the keys in ca/."""

from cryptography import x509

from ..errors import ConfigError
from . import pki
from .layout import Deployment
from .write import Writer, date_after


def renew_server(deployment: Deployment, days: int) -> str:
    """Create a new server certificate with the same CA. Return the date on which it expires."""
    server = pki.server_certificate(authority_of(deployment, "ca"), deployment.host, days)
    files = {"server/server.key": server.key_pem(), "server/server.crt": server.certificate_pem()}
    _replace(deployment, files)
    return date_after(days)


def renew_node(deployment: Deployment, name: str, days: int) -> str:
    """Create a new client certificate for a node, which may be revoked. Return the date on which it expires.

    Its earlier certificates stay valid until they expire or the node is revoked, so that it can change in its own time.
    """
    _check_name(deployment, name)
    client = pki.client_certificate(authority_of(deployment, "client-ca"), name, days)
    files = {  # the first file makes it revocable
        f"ca/clients/{name}.crt": _issued_pem(deployment, name) + client.certificate_pem(),
        f"nodes/{name}/client.key": client.key_pem(),
        f"nodes/{name}/client.crt": client.certificate_pem(),
    }
    _replace(deployment, files)
    return date_after(days)


def revoke_node(deployment: Deployment, name: str) -> int:
    """Add all certificates of a node to the revocation list. Return how many were not in it before."""
    _check_name(deployment, name)
    authority = authority_of(deployment, "client-ca")
    certificates = x509.load_pem_x509_certificates(_issued_pem(deployment, name))
    previous = (deployment.folder / "ca/client.crl").read_bytes()
    known = x509.load_pem_x509_crl(previous)
    new = [it for it in certificates if known.get_revoked_certificate_by_serial_number(it.serial_number) is None]
    revoked = pki.revocation_list(authority, new, previous)
    places = [
        "ca",
        *(["server"] if deployment.server.is_dir() else []),
    ]  # the server's files may be on its machine only
    _replace(deployment, {f"{place}/client.crl": revoked for place in places})
    return len(new)


def authority_of(deployment: Deployment, name: str) -> pki.Certified:
    ca = deployment.folder / "ca"
    try:
        return pki.load((ca / f"{name}.crt").read_bytes(), (ca / f"{name}.key").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{ca}' cannot sign ({error}). Restore {name}.crt and {name}.key there.") from None


def _issued_pem(deployment: Deployment, name: str) -> bytes:
    """Return all certificates that were issued to a node."""
    path = deployment.folder / "ca/clients" / f"{name}.crt"
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read ({error.strerror}). Restore it from a copy of ca/.") from None


def _check_name(deployment: Deployment, name: str) -> None:
    if not deployment.secure:
        raise ConfigError(f"'{deployment.folder}' was made with --insecure: its nodes have no certificates.")
    if name not in deployment.nodes:
        raise ConfigError(f"'{name}' is not a node of this deployment. Its nodes are {', '.join(deployment.nodes)}.")


def _replace(deployment: Deployment, files: dict[str, bytes]) -> None:
    try:
        Writer(deployment, deployment.folder).replace(files)
    except OSError as error:
        raise ConfigError(f"cannot write to '{deployment.folder}': {error.strerror}. Nothing was changed.") from None
