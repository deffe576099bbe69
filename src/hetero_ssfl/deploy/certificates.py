"""Renew and revoke the certificates of an existing deployment. Both need the keys in ca/."""

from cryptography import x509

from ..errors import ConfigError
from . import pki
from .layout import Deployment
from .write import File, Writer, date_after, replace_files


def renew_server(deployment: Deployment, days: int) -> str:
    """Create a new server certificate with the same CA. Return the date on which it expires."""
    writer = Writer(deployment)
    writer.put_pair("server/server", pki.server_certificate(read_authority(deployment, "ca"), deployment.host, days))
    replace_files(deployment.folder, writer.files)
    return date_after(days)


def renew_node(deployment: Deployment, name: str, days: int) -> str:
    """Create a new client certificate for a node, which may be revoked. Return the date on which it expires.

    Its earlier certificates stay valid until they expire or the node is revoked, so that it can change in its own time.
    """
    issued = _issued_certificates(deployment, name)
    client = pki.client_certificate(read_authority(deployment, "client-ca"), name, days)
    writer = Writer(deployment)
    writer.put(f"ca/clients/{name}.crt", issued + client.certificate_pem())  # first, because it makes it revocable
    writer.put_pair(f"nodes/{name}/client", client)
    replace_files(deployment.folder, writer.files)
    return date_after(days)


def revoke_node(deployment: Deployment, name: str) -> int:
    """Add all certificates of a node to the revocation list. Return how many were not in it before."""
    certificates = x509.load_pem_x509_certificates(_issued_certificates(deployment, name))
    authority = read_authority(deployment, "client-ca")
    previous = (deployment.folder / "ca/client.crl").read_bytes()
    known = x509.load_pem_x509_crl(previous)
    new = [it for it in certificates if known.get_revoked_certificate_by_serial_number(it.serial_number) is None]
    revoked = File(pki.revocation_list(authority, new, previous))
    places = ("ca", "server") if deployment.server.is_dir() else ("ca",)  # server/ may be on its machine only
    replace_files(deployment.folder, {f"{place}/client.crl": revoked for place in places})
    return len(new)


def read_authority(deployment: Deployment, name: str) -> pki.Certified:
    ca = deployment.folder / "ca"
    try:
        return pki.load((ca / f"{name}.crt").read_bytes(), (ca / f"{name}.key").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{ca}' cannot sign ({error}). Restore {name}.crt and {name}.key there.") from None


def _issued_certificates(deployment: Deployment, name: str) -> bytes:
    """Return all certificates that were issued to a node, in PEM."""
    if not deployment.secure:
        raise ConfigError(f"'{deployment.folder}' was made with --insecure: its nodes have no certificates.")
    if name not in deployment.nodes:
        raise ConfigError(f"'{name}' is not a node of this deployment. Its nodes are {', '.join(deployment.nodes)}.")
    path = deployment.folder / "ca/clients" / f"{name}.crt"
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read ({error.strerror}). Restore it from a copy of ca/.") from None
