"""Identities in a deployment.

- The CA signs the server's certificate and nothing else. A node recognises the server by it.
- The client CA signs one client certificate per node. The proxy admits only these, except those in the revocation list.
- Each node has a key for Flower, whose public part the operator registers. The SuperLink recognises a node by it.
- Each node has a self-signed certificate for its loopback interface, where its SuperNode meets its forwarder.
"""

import ipaddress
import re
from collections.abc import Iterable
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


def new_authority(days: int = CA_DAYS, name: str = "hetero-ssfl deployment CA") -> Certified:
    """Create a CA that can sign certificates but no other CAs."""
    key, subject = ec.generate_private_key(CURVE), _name(name)
    now = datetime.now(UTC)
    builder = _certificate(subject, subject, key, now - CLOCK_SKEW, now + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return Certified(builder.sign(key, hashes.SHA384()), key)


def server_certificate(
    authority: Certified, host: str, days: int = 825, start: datetime | None = None, names: tuple[str, ...] = ALWAYS
) -> Certified:
    """Create a certificate for `host` and for the loopback names of the same machine."""
    key, start = ec.generate_private_key(CURVE), start or datetime.now(UTC)
    issuer = authority.certificate.subject
    builder = _certificate(_name(host), issuer, key, start - CLOCK_SKEW, start + timedelta(days=days))
    return _sign(_for_server(builder, (host, *names)), key, authority.key)


def loopback_certificate(days: int = CA_DAYS) -> Certified:
    """Create a self-signed certificate for the loopback names, which only programs of the same machine trust."""
    key, name, now = ec.generate_private_key(CURVE), _name("hetero-ssfl forwarder"), datetime.now(UTC)
    builder = _certificate(name, name, key, now - CLOCK_SKEW, now + timedelta(days=days))
    return _sign(_for_server(builder, ALWAYS), key, key)


def client_certificate(authority: Certified, name: str, days: int = 825, start: datetime | None = None) -> Certified:
    """Create the certificate that a node shows to the proxy. It cannot be used by a server."""
    key, start = ec.generate_private_key(CURVE), start or datetime.now(UTC)
    issuer = authority.certificate.subject
    builder = _certificate(_name(name), issuer, key, start - CLOCK_SKEW, start + timedelta(days=days))
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    return _sign(builder, key, authority.key)


def revocation_list(authority: Certified, certificates: Iterable[x509.Certificate], previous: bytes = b"") -> bytes:
    """Return a revocation list (CRL) of these certificates and those of the previous list.

    It expires with the CA: a proxy refuses every client once its list has expired.
    """
    now = datetime.now(UTC)
    revoked = {entry.serial_number: entry for entry in (x509.load_pem_x509_crl(previous) if previous else ())}
    for certificate in certificates:
        number = certificate.serial_number
        revoked[number] = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now).build()
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject)
    builder = builder.last_update(now - CLOCK_SKEW).next_update(authority.certificate.not_valid_after_utc)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    builder = builder.add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
    for entry in revoked.values():
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, hashes.SHA384()).public_bytes(Encoding.PEM)


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
        if "%" not in host:  # Python accepts any text as the zone of an address: fe80::1%$(command)
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


def is_dns_name(host: str) -> bool:
    return isinstance(general_name(host), x509.DNSName)


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


def _for_server(builder: x509.CertificateBuilder, names: Iterable[str]) -> x509.CertificateBuilder:
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    alternatives = [general_name(name) for name in dict.fromkeys(names)]
    return builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)


def _sign(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer: ec.EllipticCurvePrivateKey
) -> Certified:
    """Sign the certificate of a server or a client, which cannot sign others."""
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (identifier, False),
    ):
        builder = builder.add_extension(extension, critical)
    return Certified(builder.sign(issuer, hashes.SHA384()), key)


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})
