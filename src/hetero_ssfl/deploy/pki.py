"""Identities in a deployment.

- The CA signs the server's certificate and nothing else. A node recognises the server by it.
- The client CA signs one client certificate per node. The proxy admits only these, except those in the revocation list.
- Each node has a key for Flower, whose public part the operator registers. The SuperLink recognises a node by it.
- Each node has a self-signed certificate for its loopback interface, where its SuperNode meets its forwarder.
"""

import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ConfigError

CURVE = ec.SECP384R1()
CA_DAYS = 3650
CLOCK_SKEW = timedelta(hours=1)  # a new certificate must also be valid on a machine whose clock is behind
ALWAYS = ("localhost", "127.0.0.1", "::1")  # programs on the server's machine connect without its public name
Extension = tuple[x509.ExtensionType, bool]
"""An extension of a certificate, and whether it is critical."""
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
    constraints, usage = x509.BasicConstraints(ca=True, path_length=0), _usage(key_cert_sign=True, crl_sign=True)
    return _sign(name, days, ((constraints, True), (usage, True)))


def server_certificate(authority: Certified, host: str, days: int = 825, start: datetime | None = None) -> Certified:
    """Create a certificate for `host` and for the loopback names of the same machine."""
    return _sign(host, days, (*MEMBER, *_server_names(host, *ALWAYS)), authority, start)


def loopback_certificate(days: int = CA_DAYS) -> Certified:
    """Create a self-signed certificate for the loopback names, which only programs of the same machine trust."""
    return _sign("hetero-ssfl forwarder", days, (*MEMBER, *_server_names(*ALWAYS)))


def client_certificate(authority: Certified, name: str, days: int = 825, start: datetime | None = None) -> Certified:
    """Create the certificate that a node shows to the proxy. It cannot be used by a server."""
    client = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    return _sign(name, days, (*MEMBER, (client, False)), authority, start)


def revocation_list(authority: Certified, certificates: Iterable[x509.Certificate], previous: bytes = b"") -> bytes:
    """Return a revocation list (CRL) of these certificates and those of the previous list.

    It expires with the CA: a proxy refuses every client once its list has expired.
    """
    now = datetime.now(UTC)
    revoked = {entry.serial_number: entry for entry in (x509.load_pem_x509_crl(previous) if previous else ())}
    for number in (certificate.serial_number for certificate in certificates):
        revoked[number] = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now).build()
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject)
    builder = builder.last_update(now - CLOCK_SKEW).next_update(authority.certificate.not_valid_after_utc)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    for extension in (identifier, x509.CRLNumber(int(now.timestamp()))):
        builder = builder.add_extension(extension, critical=False)
    for entry in revoked.values():
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, hashes.SHA384()).public_bytes(Encoding.PEM)


def load(certificate: bytes, key: bytes) -> Certified:
    """Read a certificate and its key from PEM. Raise ValueError if they are invalid or do not match."""
    public, private = x509.load_pem_x509_certificate(certificate), serialization.load_pem_private_key(key, None)
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != public.public_key():
        raise ValueError("the key does not belong to the certificate")
    return Certified(public, private)


def node_key() -> tuple[bytes, bytes]:
    """Create a private and a public key in the OpenSSH format that Flower expects."""
    key = ec.generate_private_key(CURVE)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def general_name(host: str) -> x509.GeneralName:
    """Convert an IP address or a DNS name for a certificate. Raise ConfigError for anything else."""
    with suppress(ValueError):
        if "%" not in host:  # Python accepts any text as the zone of an address: fe80::1%$(command)
            return x509.IPAddress(ipaddress.ip_address(host))
    labels = host.split(".")
    # A last label of digits only is a mistyped address, never a name.
    if len(host) > 253 or not all(LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise ConfigError(f"'{host}' is neither an IP address nor a DNS name, such as 192.0.2.7 or fl.example.org.")
    return x509.DNSName(host)


def _server_names(*names: str) -> tuple[Extension, ...]:
    alternatives = x509.SubjectAlternativeName([general_name(name) for name in dict.fromkeys(names)])
    return (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False), (alternatives, False)


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


MEMBER: tuple[Extension, ...] = (  # of servers and clients, which cannot sign others
    (x509.BasicConstraints(ca=False, path_length=None), True),
    (_usage(digital_signature=True), True),
)


def _sign(
    name: str, days: int, extensions: Iterable[Extension], by: Certified | None = None, start: datetime | None = None
) -> Certified:
    """Create a key and its certificate, signed by an authority or by itself."""
    key, start = ec.generate_private_key(CURVE), start or datetime.now(UTC)
    issuer = by.key if by else key
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # 64 is the standard's limit
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return Certified(builder.sign(issuer, hashes.SHA384()), key)
