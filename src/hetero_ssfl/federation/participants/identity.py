"""A participant's long-term key, and the public keys by which it recognises the others in a secure sum."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from ...errors import ConfigError
from ...privacy.sums.keys import Sign, Verify

ALGORITHM = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Identity:
    """How a participant takes part in secure sums."""

    fewest: int = 3  # the smallest number of participants that it accepts
    sign: Sign | None = None
    verify: Verify | None = None


def open_identity(key: Path | None, peers: Path | None, fewest: int) -> Identity:
    """Read the keys that node settings name: an OpenSSH key of this node, and a folder with NAME.pub of everyone."""
    return Identity(fewest, _signer(key) if key else None, _verifier(peers) if peers else None)


def _signer(path: Path) -> Sign:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("it is not an ECDSA key")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"key = '{path}' cannot be used ({error}), expected the key of this SuperNode. Change the node settings."
        ) from None
    return lambda text: key.sign(text, ALGORITHM)


def _verifier(folder: Path) -> Verify:
    if not folder.is_dir():
        raise ConfigError(f"peers = '{folder}' is not a folder, expected one with NAME.pub of every participant.")

    def verify(name: str, text: bytes, signature: bytes) -> bool:
        with suppress(OSError, ValueError, UnsupportedAlgorithm, InvalidSignature):
            key = load_ssh_public_key((folder / f"{name}.pub").read_bytes())
            if isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signature, text, ALGORITHM)
                return True
        return False

    return verify
