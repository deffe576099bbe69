"""Key agreement, encryption of shares, and signatures."""

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import ProtocolError
from .rules import Session

KEY, TAG = 32, 16  # bytes
ONE_USE = bytes(12)  # every key encrypts one message, so its nonce may be constant

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
"""Takes a participant's name, what it signed, and the signature."""


@dataclass(frozen=True)
class PublicKeys:
    """What a participant advertises in the first phase."""

    name: str
    sealing: bytes
    """For the encryption of shares."""
    masking: bytes
    """For the pairwise masks. Its secret is reconstructed if the participant drops out."""
    signature: bytes = b""

    def signed_part(self, session: Session) -> bytes:
        head = b"\0".join([b"hetero-ssfl secure sum 1", session.to_bytes(), self.name.encode()])
        return head + self.sealing + self.masking


def public_key(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def digest_of(session: Session, roster: Iterable[PublicKeys]) -> bytes:
    """Return a hash of the attempt and of all its participants and keys. All derived keys depend on it."""
    sha = sha256(session.to_bytes())
    for keys in sorted(roster, key=lambda keys: keys.name):
        sha.update(b"\0" + keys.name.encode() + b"\0" + keys.sealing + keys.masking)
    return sha.digest()


def fingerprint(keys: PublicKeys) -> str:
    """Return a short hash by which a client recognises keys that it has seen before."""
    return sha256(keys.sealing + keys.masking).hexdigest()[:16]


def agree(secret: bytes, public: bytes, peer: str) -> bytes:
    """Return the secret that two participants have in common."""
    try:
        return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolError(f"the key of {peer} is not a valid public key (a point of small order).") from None


def derive(agreed: bytes, digest: bytes, purpose: str, *names: str) -> bytes:
    """Return a key for one purpose from what two participants agreed on."""
    info = "\0".join([purpose, *names]).encode()
    return HKDF(hashes.SHA256(), KEY, salt=digest, info=info).derive(agreed)


def mask_seed(agreed: bytes, digest: bytes, one: str, other: str) -> bytes:
    return derive(agreed, digest, "mask", *sorted([one, other]))


def seal_key(agreed: bytes, digest: bytes, sender: str, receiver: str) -> bytes:
    return derive(agreed, digest, "seal", sender, receiver)


def confirm_key(agreed: bytes, digest: bytes, one: str, other: str) -> bytes:
    return derive(agreed, digest, "confirm", *sorted([one, other]))


def tag_of(key: bytes, sender: str, senders: Iterable[str], survivors: Iterable[str]) -> bytes:
    """Return what tells the other owner of `key` that `sender` was told these lists, in sorted order."""
    lists = "\n".join([sender, *senders, "", *survivors])
    return hmac.digest(key, lists.encode(), "sha256")[:TAG]


def seal(key: bytes, content: bytes) -> bytes:
    return ChaCha20Poly1305(key).encrypt(ONE_USE, content, None)


def unseal(key: bytes, sealed: bytes, sender: str) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(ONE_USE, sealed, None)
    except InvalidTag:
        raise ProtocolError(f"the share from {sender} cannot be decrypted: it was changed or is not for us.") from None


def commitment(seed: bytes) -> bytes:
    """Return a hash by which the server recognises a wrongly reconstructed self mask."""
    return sha256(b"self mask\0" + seed).digest()
