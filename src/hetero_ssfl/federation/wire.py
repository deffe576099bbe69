"""Messages as Flower records: arrays, scalar fields, and metrics.

Every message names its federation, round and RAD, and every reply repeats them, so that a reply to an old message or
for another RAD is recognised. All received content is checked here before it is used.

The messages of a secure sum also name an attempt, and have these lists:

phase    server to client                              client to server
keys                                                   names, sealing, masking, signatures (one of each)
shares   the same lists of all participants            commitments (one), names, sealed
masked   senders, beside the broadcast                 the arrays "figures" and "body"
confirm  survivors, dropped                            names, tags
unmask   names, sealed, confirmed, tags                names, shares
"""

import io
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_from_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from torch import Tensor

from .. import __version__
from ..errors import ProtocolError
from ..methods import Update
from ..privacy.sums.keys import PublicKeys
from ..privacy.sums.rules import Session
from ..privacy.sums.vectors import SIGNED, UNSIGNED, Layout, Vector
from ..runs.events import RESERVED

Scalar = int | float | str | bool

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
METRIC = re.compile(r"[a-z][a-z0-9_-]{0,39}(%)?")
MAX_METRICS = 100
MAX_METRIC = 1e30  # sums over clients must stay finite
MAX_HEADER = 1000  # bytes of an array's header, which is parsed as Python literals
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
MAX_EXAMPLES = 10**9
MAX_LIST = 100_000
DIVERGED, LOST_STATE = 100, 101  # error codes of clients, beyond Flower's own: the loss is not finite, a damaged state


@dataclass(frozen=True)
class Header:
    """The federation, round and RAD that a message belongs to."""

    federation: str
    round: int
    rad: str  # the RAD's digest


def check_version(fields: Mapping[str, Scalar], who: str) -> None:
    """Raise ProtocolError unless the other side has the same minor version, as far as it says so."""
    theirs, own = fields.get("version"), __version__.rpartition(".")[0]
    if theirs is not None and str(theirs).rpartition(".")[0] != own:
        remedy = "Install the same version on the server and on all nodes: docs/deployment.md, upgrades."
        raise ProtocolError(f"{who} has hetero-ssfl {str(theirs)[:20]!r}, expected {own}.x. {remedy}")


# --- packing ---


def pack(
    arrays: Mapping[str, Tensor] | None = None,
    fields: Mapping[str, Scalar] | None = None,
    metrics: Mapping[str, float] | None = None,
    header: Header | None = None,
) -> RecordDict:
    """Build the content of one message. A reply has the header of the message that it answers."""
    content = RecordDict()
    content["arrays"] = ArrayRecord(OrderedDict((k, Array(v.cpu().numpy())) for k, v in (arrays or {}).items()))
    content["settings"] = ConfigRecord({**(asdict(header) if header else {}), **(fields or {})})
    content["metrics"] = MetricRecord(dict(metrics or {}))
    return content


def with_lists(content: RecordDict, lists: Mapping[str, list[str] | list[bytes]]) -> RecordDict:
    """Add lists of texts or of bytes. Empty ones are left out, because their type would be lost."""
    return RecordDict({**content, "lists": ConfigRecord({name: entries for name, entries in lists.items() if entries})})


# --- reading: invalid content raises ProtocolError ---


def arrays_of(content: RecordDict, key: str = "arrays") -> dict[str, Tensor]:
    record: Mapping[str, Array] = content.array_records.get(key, {})
    return {str(name): tensor_of(array, f"array '{str(name)[:40]}'") for name, array in record.items()}


def rad_of(content: RecordDict) -> Tensor | None:
    record: Mapping[str, Array] = content.array_records.get("rad", {})
    return tensor_of(record["pixels"], "RAD") if "pixels" in record else None


def tensor_of(array: Array, what: str) -> Tensor:
    """Decode an array in numpy's format. Header, shape and size are checked before anything is allocated."""
    try:
        stream = io.BytesIO(array.data)
        read_header = HEADERS[np.lib.format.read_magic(stream)]
        shape, fortran, dtype = read_header(stream, max_header_size=MAX_HEADER)
        size, left = math.prod(shape) * dtype.itemsize, len(array.data) - stream.tell()
        if dtype.hasobject or min(shape, default=0) < 0 or size != left:
            raise ValueError(f"it claims {size} bytes and has {left}")
        flat = np.frombuffer(array.data, dtype, offset=stream.tell())
        return torch.from_numpy(flat.reshape(shape, order="F" if fortran else "C").copy())
    except Exception as error:  # numpy's reader raises many kinds of errors for bytes that are not an array
        raise ProtocolError(f"the {what} cannot be read: {str(error)[:80]}.") from None


def fields_of(content: RecordDict) -> dict[str, Scalar]:
    """Return the scalar fields of a message. Their record has the key "settings"."""
    record: Mapping[str, object] = content.config_records.get("settings", {})
    return {str(k): v for k, v in record.items() if isinstance(v, (int, float, str, bool))}


def texts_of(content: RecordDict, name: str) -> list[str]:
    return _list_of(content, name, "names of participants", lambda text: isinstance(text, str) and NAME.fullmatch(text))


def blobs_of(content: RecordDict, name: str) -> list[bytes]:
    return _list_of(content, name, "bytes", lambda blob: isinstance(blob, bytes))


def _list_of(content: RecordDict, name: str, kind: str, fits: Callable[[object], object]) -> list[Any]:
    record: Mapping[str, object] = content.config_records.get("lists", {})
    entries = record.get(name, [])
    if not isinstance(entries, list) or len(entries) > MAX_LIST:
        raise ProtocolError(f"the message has no list '{name}' of at most {MAX_LIST:,} entries.")
    if not all(map(fits, entries)):
        raise ProtocolError(f"the list '{name}' must contain only {kind}.")
    return entries


def metrics_of(content: RecordDict) -> dict[str, float]:
    """Return the metrics of a message, checked for use in an event: plain names and finite numbers."""
    record: Mapping[str, object] = content.metric_records.get("metrics", {})
    if len(record) > MAX_METRICS:
        raise ProtocolError(f"the message has {len(record)} metrics, expected at most {MAX_METRICS}.")
    for name, value in record.items():
        if not METRIC.fullmatch(name) or name in RESERVED:
            raise ProtocolError(f"'{name[:40]}' is not a valid name for a metric.")
        if not isinstance(value, (int, float)) or not abs(value) <= MAX_METRIC:
            raise ProtocolError(f"the metric '{name}' is {str(value)[:40]}, expected a number between ±{MAX_METRIC:g}.")
    return {name: float(value) for name, value in record.items()}  # type: ignore[arg-type]


def header_of(fields: Mapping[str, Scalar]) -> Header:
    federation, number, rad = (fields.get(key) for key in ("federation", "round", "rad"))
    if type(number) is not int or not 0 <= number < 10**6:
        raise ProtocolError(f"the message names round {str(number)[:40]}, expected 0 to 999,999.")
    return Header(check_hex("federation", federation, 32), number, check_hex("RAD", rad, 64))


def check_hex(what: str, value: object, digits: int) -> str:
    """Return an id or a digest. Nothing that a message or a run folder names may become a path before this check."""
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        raise ProtocolError(f"the {what} is named {str(value)[:40]!r}, expected {digits} hexadecimal digits.")
    return value


def check_header(content: RecordDict, expected: Header, sender: str) -> None:
    """Raise ProtocolError unless a reply repeats the header of its message."""
    fields = fields_of(content)
    for what, value in asdict(expected).items():
        sent = fields.get(what)
        if type(sent) is not type(value) or sent != value:
            raise ProtocolError(f"{sender} replied for {what} {str(sent)[:12]}, expected {str(value)[:12]}.")


def read_update(content: RecordDict, sender: str) -> Update:
    """Read a client's reply to a train message."""
    with reply_of(sender):
        examples = fields_of(content).get("examples")
        if type(examples) is not int or not 1 <= examples <= MAX_EXAMPLES:
            raise ProtocolError(f"it trained on {str(examples)[:40]} images, expected 1 to {MAX_EXAMPLES:,}.")
        return Update(examples, arrays_of(content), metrics_of(content))


@contextmanager
def reply_of(sender: str) -> Iterator[None]:
    """Name the sender in an error."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{sender} sent a reply that cannot be used: {error}") from None


# --- secure sums ---


def session_of(header: Header, fields: Mapping[str, Scalar]) -> Session:
    return Session(header.federation, header.round, check_hex("attempt", fields.get("attempt"), 32))


def with_roster(content: RecordDict, roster: Sequence[PublicKeys]) -> RecordDict:
    signatures = [keys.signature for keys in roster]
    lists: dict[str, list[str] | list[bytes]] = {"names": [keys.name for keys in roster]}
    lists |= {"sealing": [keys.sealing for keys in roster], "masking": [keys.masking for keys in roster]}
    return with_lists(content, {**lists, "signatures": signatures if any(signatures) else []})


def roster_of(content: RecordDict) -> list[PublicKeys]:
    names, sealing, masking = texts_of(content, "names"), blobs_of(content, "sealing"), blobs_of(content, "masking")
    signatures = blobs_of(content, "signatures") or [b""] * len(names)
    if not len(names) == len(sealing) == len(masking) == len(signatures):
        raise ProtocolError(f"the message has {len(names)} names but {len(masking)} keys, expected as many.")
    return [PublicKeys(*each) for each in zip(names, sealing, masking, signatures, strict=True)]


def with_named(content: RecordDict, blobs: Mapping[str, bytes], **lists: list[str] | list[bytes]) -> RecordDict:
    """Add something for each of some participants, and other lists."""
    return with_lists(content, {"names": list(blobs), "blobs": list(blobs.values()), **lists})


def named_of(content: RecordDict, who: str = "names", what: str = "blobs") -> dict[str, bytes]:
    names, blobs = texts_of(content, who), blobs_of(content, what)
    if len(names) != len(blobs) or len(set(names)) < len(names):
        raise ProtocolError(f"the message has {len(blobs)} {what} for {len(set(names))} names, expected one for each.")
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
        wanted = f"{layout.body} integers of {layout.word} bits and {layout.figures} of 64"
        raise ProtocolError(f"{sender} sent {str(sent)[:200]}, expected {wanted}. It may have a different RAD.")
    return Vector(arrays["figures"].view(np.uint64), arrays["body"].view(UNSIGNED[layout.word]))


def encode(message: Message) -> bytes:
    return message_to_proto(message).SerializeToString()


def decode(data: bytes) -> Message:
    return message_from_proto(ProtoMessage.FromString(data))


def encode_state(state: RecordDict) -> bytes:
    """Serialize what a client process keeps in its Context between two messages."""
    return recorddict_to_proto(state).SerializeToString()


def decode_state(data: bytes) -> RecordDict:
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


def content_size(content: RecordDict) -> int:
    """Return the size in bytes of a message's content: its arrays, and all else as it is serialized.

    Arrays are already bytes. Serializing the whole content only to measure it would copy them.
    """
    arrays = [array for record in content.array_records.values() for array in record.values()]
    rest = RecordDict({**content.config_records, **content.metric_records})
    return sum(len(array.data) for array in arrays) + recorddict_to_proto(rest).ByteSize()


def check_size(message: Message, limit_mb: int, sender: str) -> int:
    size = content_size(message.content) if message.has_content() else 0
    if size > limit_mb * 2**20:
        remedy = "Lower alignment.rank or rad.size, or raise message_mb on both sides."
        raise ProtocolError(f"a message from {sender} has {size / 2**20:,.0f} MB, the limit is {limit_mb} MB. {remedy}")
    return size
