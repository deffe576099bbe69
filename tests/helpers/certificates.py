"""Verify certificates as a client or a server would, without a connection."""

import ipaddress
from datetime import UTC, datetime

from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError


def accepts(certificate: bytes, authority: bytes, host: str, when: datetime | None = None) -> bool:
    """Return whether a client that trusts `authority` accepts this certificate for `host`."""
    try:
        name: x509.DNSName | x509.IPAddress = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        name = x509.DNSName(host)
    builder = PolicyBuilder().store(Store([x509.load_pem_x509_certificate(authority)]))
    verifier = builder.time(when or datetime.now(UTC)).build_server_verifier(name)
    try:
        verifier.verify(x509.load_pem_x509_certificate(certificate), [])
    except VerificationError:
        return False
    return True
