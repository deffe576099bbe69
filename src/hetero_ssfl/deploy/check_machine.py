"""Checks of the files and ports of one machine: certificates, keys, ports. Nothing is written or started."""

import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from ..errors import ConfigError
from . import pki

Level = Literal["ok", "warning", "unchecked", "stops"]
"""`stops`: a run cannot start, or this machine cannot take part in it. `unchecked`: a part was left out."""
Part = tuple[Level, str]
Contents = TypeVar("Contents")

SOON = timedelta(days=30)
ANSWER_SECONDS = 1.0  # for a program on this machine to show its certificate
LISTEN = re.compile(r"^\s*listen\s+(\S+)\s+ssl;", re.MULTILINE)  # as start.sh finds it
SUPERLINK = re.compile(r'--host "?([^" ]+)"? --port "?(\d+)')


# --- certificates and keys ---


def server_certificates(server: Path, host: str | None, remedy: str) -> Iterator[Part]:
    """Check what the server shows to nodes, and how it recognises them."""
    shown = _pair(server, "server")
    yield _dates(shown.certificate, "the server's certificate", remedy)
    _check_issuer(server / "server.crt", server / "ca.crt")
    if host is not None:
        names = shown.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if pki.general_name(host) not in list(names):
            yield "stops", f"the server's certificate is not for '{host}', so nodes refuse it. {remedy}"
    yield from _revocations(server / "client.crl", _certificate(server / "client-ca.crt"))
    yield from _registered_keys(server / "node-keys")


def node_certificates(node: Path, remedy: str) -> Iterator[Part]:
    """Check what a node shows to the server, and what its SuperNode and its forwarder show to each other."""
    client, local = _pair(node, "client"), _pair(node, "local")
    yield _dates(client.certificate, "its client certificate", remedy)
    yield _dates(local.certificate, "its loopback certificate", "Create the node's folder anew.")
    _certificate(node / "ca.crt")
    _node_key(node / "node.key")
    for key in ("client.key", "local.key", "node.key"):
        if (node / key).stat().st_mode & 0o077:
            yield "warning", f"'{node / key}' can be read by other accounts. Use: chmod 600 {key}"


def agreement(node: Path, server: Path, public_key: Path, remedy: str) -> Iterator[Part]:
    """Check that a node and the server, if both folders are here, accept each other."""
    if (node / "ca.crt").read_bytes() != (server / "ca.crt").read_bytes():
        yield "stops", f"'{node / 'ca.crt'}' is not the CA of the server, so the node refuses the server. Copy ca.crt."
    _check_issuer(node / "client.crt", server / "client-ca.crt")
    number = _certificate(node / "client.crt").serial_number
    revoked = x509.load_pem_x509_crl((server / "client.crl").read_bytes())
    if revoked.get_revoked_certificate_by_serial_number(number) is not None:
        yield "stops", f"its client certificate is revoked. {remedy}"
    if not public_key.exists():
        yield "stops", f"the server does not have its public key. Copy node.pub to '{public_key}'."
    elif load_ssh_public_key(public_key.read_bytes()) != _node_key(node / "node.key").public_key():
        yield "stops", f"'{public_key}' is not the public key of its node.key. Copy the node's public key there."


def _read(path: Path, load: Callable[[bytes], Contents], what: str) -> Contents:
    try:
        return load(path.read_bytes())
    except (ValueError, TypeError) as error:
        raise ConfigError(f"'{path}' is not {what}: {error}. Copy it again.") from None


def _certificate(path: Path) -> x509.Certificate:
    return _read(path, x509.load_pem_x509_certificate, "a certificate")


def _pair(folder: Path, kind: str) -> pki.Certified:
    key = (folder / f"{kind}.key").read_bytes()
    return _read(folder / f"{kind}.crt", lambda content: pki.load(content, key), f"the certificate of {kind}.key")


def _dates(certificate: x509.Certificate, what: str, remedy: str) -> Part:
    now, start, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        return "stops", f"{what} expired on {end:%Y-%m-%d}. {remedy}"
    if now < start:
        return "stops", f"{what} is valid from {start:%Y-%m-%d %H:%M} UTC only. Check the clock of this machine."
    return "warning" if end - now < SOON else "ok", f"{what} is valid until {end:%Y-%m-%d}"


def _check_issuer(path: Path, authority: Path) -> None:
    try:
        _certificate(path).verify_directly_issued_by(_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        error = f"'{path}' was not signed by '{authority.name}' of the server"
        raise ConfigError(f"{error}. Copy both from one deployment.") from None


def _revocations(path: Path, authority: x509.Certificate) -> Iterator[Part]:
    revoked = _read(path, x509.load_pem_x509_crl, "a revocation list")
    if not revoked.is_signature_valid(authority.public_key()):  # type: ignore[arg-type]
        yield "stops", f"'{path}' was not signed by client-ca.crt, so all nodes are refused. Copy ca/client.crl again."
    elif revoked.next_update_utc is not None and revoked.next_update_utc < datetime.now(UTC):
        yield "stops", f"'{path}' expired on {revoked.next_update_utc:%Y-%m-%d}, so all nodes are refused."


def _registered_keys(folder: Path) -> Iterator[Part]:
    owners: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            load_ssh_public_key(path.read_bytes())
        except ValueError:
            yield "stops", f"'{path}' is not a public key in the format of OpenSSH. Ask {path.stem} for it again."
            continue
        key = b" ".join(path.read_bytes().split()[:2])
        if key in owners:
            yield "stops", f"{path.stem} and {owners[key]} have the same key in '{folder}'. Each node needs its own."
        owners[key] = path.stem


def _node_key(path: Path) -> EllipticCurvePrivateKey:
    key = _read(path, lambda content: load_ssh_private_key(content, None), "a key")
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ConfigError(f"'{path}' is not an ECDSA key. Create one: ssh-keygen -t ecdsa -b 384 -N '' -f node.key")
    return key


# --- ports ---


def listeners(*paths: Path) -> Iterator[tuple[str, int]]:
    """Yield the addresses that configurations of nginx and start-superlink.sh name."""
    for path in paths:
        text = path.read_text() if path.exists() else ""
        for listen in LISTEN.findall(text):
            host, _, port = listen.rpartition(":")
            yield host.strip("[]"), int(port)
        for host, port in SUPERLINK.findall(text):
            yield host, int(port)


def free_ports(addresses: Iterable[tuple[str, int]], certificate: Path | None) -> Iterator[Part]:
    """Check that ports are free, or in use by a program of this deployment, which shows its own certificate."""
    for host, port in addresses:
        if is_free(host, port):
            yield "ok", f"port {port} is free"
        elif certificate is not None and shows_certificate(host, port, certificate):
            yield "ok", f"port {port} is in use by this deployment, which is running"
        else:
            yield "stops", f"port {port} is in use by another program. Stop it, or choose another port."


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that a program has just released is free
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def shows_certificate(host: str, port: int, certificate: Path) -> bool:
    """Return whether the program at this address shows this certificate."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        shown = ssl.get_server_certificate((host, port), timeout=ANSWER_SECONDS)
        return x509.load_pem_x509_certificate(shown.encode()) == _certificate(certificate)
    except (OSError, ValueError, ConfigError):
        return False
