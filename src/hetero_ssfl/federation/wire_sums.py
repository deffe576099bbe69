"""The messages of a secure sum as Flower records. The header, and an attempt, are in the fields of each.

phase    server to client                              client to server
keys                                                   names, sealing, masking, signatures (one of each)
shares   the same lists of all participants            commitments (one), names, sealed
masked   senders, beside the broadcast                 the arrays "figures" and "body"
unmask   survivors, dropped, names, sealed             names, shares
"""

import re
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import RecordDict

from ..errors import ProtocolError
from ..privacy.sums import SIGNED, UNSIGNED, Layout, PublicKeys, Session, Vector
from .wire import Header, Scalar, arrays_of, blobs_of, pack, texts_of, with_lists

ATTEMPT = re.compile(r"[0-9a-f]{32}")


def new_session(header: Header) -> Session:
    """Return a new attempt at a round's sum."""
    return Session(header.federation, header.round, secrets.token_hex(16))


def session_of(header: Header, fields: Mapping[str, Scalar]) -> Session:
    attempt = fields.get("attempt")
    if not isinstance(attempt, str) or not ATTEMPT.fullmatch(attempt):
        raise ProtocolError(f"the message names attempt {str(attempt)[:40]!r}, expected 32 hexadecimal digits.")
    return Session(header.federation, header.round, attempt)


def with_roster(content: RecordDict, roster: Sequence[PublicKeys]) -> RecordDict:
    signatures = [keys.signature for keys in roster]
    lists: dict[str, list[str] | list[bytes]] = {
        "names": [keys.name for keys in roster],
        "sealing": [keys.sealing for keys in roster],
        "masking": [keys.masking for keys in roster],
        "signatures": signatures if any(signatures) else [],
    }
    return with_lists(content, lists)


def roster_of(content: RecordDict) -> list[PublicKeys]:
    names, sealing, masking = texts_of(content, "names"), blobs_of(content, "sealing"), blobs_of(content, "masking")
    signatures = blobs_of(content, "signatures") or [b""] * len(names)
    if not len(names) == len(sealing) == len(masking) == len(signatures):
        raise ProtocolError(f"the message has {len(names)} names but {len(masking)} keys, expected as many.")
    return [PublicKeys(*each) for each in zip(names, sealing, masking, signatures, strict=True)]


def with_named(content: RecordDict, blobs: Mapping[str, bytes], **lists: list[str] | list[bytes]) -> RecordDict:
    """Add something for each of some participants, and other lists."""
    return with_lists(content, {"names": list(blobs), "blobs": list(blobs.values()), **lists})


def named_of(content: RecordDict) -> dict[str, bytes]:
    names, blobs = texts_of(content, "names"), blobs_of(content, "blobs")
    if len(names) != len(blobs) or len(set(names)) < len(names):
        raise ProtocolError(f"the message has {len(blobs)} shares for {len(set(names))} names, expected one for each.")
    return dict(zip(names, blobs, strict=True))


def pack_vector(fields: Mapping[str, Scalar], vector: Vector) -> RecordDict:
    body = vector.body.view(SIGNED[vector.layout.word])  # torch has hardly any functions for unsigned integers
    arrays = {"figures": torch.from_numpy(vector.figures.view(np.int64)), "body": torch.from_numpy(body)}
    return pack(arrays, fields)


def vector_of(content: RecordDict, layout: Layout, sender: str) -> Vector:
    arrays = {name: array.numpy() for name, array in arrays_of(content).items()}
    expected = {"figures": (SIGNED[64], layout.figures), "body": (SIGNED[layout.word], layout.body)}
    sent = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    if sent != {name: (np.dtype(kind), (size,)) for name, (kind, size) in expected.items()}:
        raise ProtocolError(
            f"{sender} sent {str(sent)[:200]}, expected {layout.body} integers of {layout.word} bits and "
            f"{layout.figures} of 64. It may have a different RAD."
        )
    return Vector(arrays["figures"].view(np.uint64), arrays["body"].view(UNSIGNED[layout.word]))
