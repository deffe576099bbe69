"""Identities in a deployment: a certificate authority (CA), the server's certificate, and one key for each node.

A node recognises the server by the CA that signed its certificate. The server recognises a node by its public key,
which the operator registers. The CA therefore signs only servers, and its key is needed again only to renew a
certificate.
"""

import ipaddress
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ConfigError

CURVE = ec.SECP384R1()
CA_DAYS = 3650
CLOCK_SKEW = timedelta(hours=1)  # a new certificate must also be valid on a machine whose clock is behind
ALWAYS = ("localhost", "127.0.0.1", "::1")  # programs on the server's machine connect without its public name
LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)


@dataclass(frozen=True)
class Certified:
    """A certificate and the private key that belongs to it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_authority(days: int = CA_DAYS) -> Certified:
    """Create a CA that can sign server certificates but no other CAs."""
    key, name = ec.generate_private_key(CURVE), _name("hetero-ssfl deployment CA")
    now = datetime.now(UTC)
    builder = _certificate(name, name, key, now - CLOCK_SKEW, now + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return Certified(builder.sign(key, hashes.SHA384()), key)


def server_certificate(
    authority: Certified, host: str, days: int = 825, start: datetime | None = None, names: tuple[str, ...] = ALWAYS
) -> Certified:
    """Create a certificate for `host` and for the loopback names of the same machine."""
    key = ec.generate_private_key(CURVE)
    start = start or datetime.now(UTC)
    issuer = authority.certificate.subject
    builder = _certificate(_name(host), issuer, key, start - CLOCK_SKEW, start + timedelta(days=days))
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([general_name(n) for n in dict.fromkeys((host, *names))]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    return Certified(builder.sign(authority.key, hashes.SHA384()), key)


def load(certificate: bytes, key: bytes) -> Certified:
    """Read a certificate and its key from PEM. Raise ValueError if they are invalid or do not match."""
    found, private = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, None)
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != found.public_key():
        raise ValueError("the key does not belong to the certificate")
    return Certified(found, private)


def valid_until(certificate: bytes) -> datetime:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def node_key() -> tuple[bytes, bytes]:
    """Create a private and a public key in the OpenSSH format that Flower expects."""
    key = ec.generate_private_key(CURVE)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def general_name(host: str) -> x509.GeneralName:
    """Convert an IP address or a DNS name for a certificate. Raise ConfigError for anything else."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    # A last label of digits only is a mistyped address, never a name.
    if len(host) > 253 or not all(LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise ConfigError(
            f"'{host}' is neither an IP address nor a DNS name. Pass only the server's name, "
            "without https:// and without a port, such as fl.example.org or 192.0.2.7."
        )
    return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # 64 is the standard's limit


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})
