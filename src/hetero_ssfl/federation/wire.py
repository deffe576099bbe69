"""Messages as Flower records: arrays, scalar fields, and metrics.

Every message names its federation, round and RAD, and every reply repeats them, so that a reply to an old message or
for another RAD is recognised. All received content is checked here before it is used.
"""

import io
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
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

from ..errors import ProtocolError
from ..methods import Update
from ..runs.events import RESERVED

Scalar = int | float | str | bool

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
FEDERATION = re.compile(r"[0-9a-f]{32}")
DIGEST = re.compile(r"[0-9a-f]{64}")
METRIC = re.compile(r"[a-z][a-z0-9_]{0,39}(%)?")
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
    rad: str
    """The RAD's digest."""


# --- packing ---


def pack(
    arrays: Mapping[str, Tensor] | None = None,
    fields: Mapping[str, Scalar] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> RecordDict:
    """Build the content of one message."""
    content = RecordDict()
    content["arrays"] = ArrayRecord(OrderedDict((k, Array(v.cpu().numpy())) for k, v in (arrays or {}).items()))
    content["settings"] = ConfigRecord(dict(fields or {}))
    content["metrics"] = MetricRecord(dict(metrics or {}))
    return content


def pack_rad(pixels: Tensor) -> ArrayRecord:
    return ArrayRecord(OrderedDict(pixels=Array(pixels.numpy())))


def with_rad(content: RecordDict, rad: ArrayRecord) -> RecordDict:
    return RecordDict({**content, "rad": rad})


def with_lists(content: RecordDict, lists: Mapping[str, list[str] | list[bytes]]) -> RecordDict:
    """Add lists of texts or of bytes. Empty ones are left out, because their type would be lost."""
    return RecordDict({**content, "lists": ConfigRecord({name: entries for name, entries in lists.items() if entries})})


def pack_reply(
    header: Header,
    arrays: Mapping[str, Tensor] | None = None,
    metrics: Mapping[str, float] | None = None,
    facts: Mapping[str, Scalar] | None = None,
) -> RecordDict:
    return pack(arrays, {**asdict(header), **(facts or {})}, metrics)


def pack_update(header: Header, update: Update) -> RecordDict:
    return pack_reply(header, update.arrays, update.metrics, {"examples": update.examples})


# --- reading: invalid content raises ProtocolError ---


def arrays_of(content: RecordDict, key: str = "arrays") -> dict[str, Tensor]:
    record: Mapping[str, Array] = content.array_records.get(key, {})
    return {str(name): tensor_of(array, f"array '{str(name)[:40]}'") for name, array in record.items()}


def rad_of(content: RecordDict) -> Tensor | None:
    record = content.array_records.get("rad")
    if record is None or "pixels" not in record:
        return None
    return tensor_of(record["pixels"], "RAD")


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
    """Return a list of names of participants."""
    texts = _list_of(content, name)
    for text in texts:
        if not isinstance(text, str) or not NAME.fullmatch(text):
            raise ProtocolError(f"the list '{name}' has {str(text)[:64]!r}, expected names of participants.")
    return [str(text) for text in texts]


def blobs_of(content: RecordDict, name: str) -> list[bytes]:
    blobs = _list_of(content, name)
    if not all(isinstance(blob, bytes) for blob in blobs):
        raise ProtocolError(f"the list '{name}' must contain only bytes.")
    return [bytes(blob) for blob in blobs]


def _list_of(content: RecordDict, name: str) -> list[Any]:
    record: Mapping[str, object] = content.config_records.get("lists", {})
    entries = record.get(name, [])
    if not isinstance(entries, list) or len(entries) > MAX_LIST:
        raise ProtocolError(f"the message has no list '{name}' of at most {MAX_LIST:,} entries.")
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
    if not isinstance(federation, str) or not FEDERATION.fullmatch(federation):
        raise ProtocolError(f"the message names federation {str(federation)[:40]!r}, expected 32 hexadecimal digits.")
    if type(number) is not int or not 0 <= number < 10**6:
        raise ProtocolError(f"the message names round {str(number)[:40]}, expected 0 to 999,999.")
    if not isinstance(rad, str) or not DIGEST.fullmatch(rad):
        raise ProtocolError(f"the message names RAD {str(rad)[:40]!r}, expected a SHA-256 digest.")
    return Header(federation, number, rad)


def check_header(header: Header, expected: Header, sender: str) -> None:
    for what in ("federation", "round", "rad"):
        a, b = getattr(header, what), getattr(expected, what)
        if a != b:
            raise ProtocolError(
                f"{sender} replied for {what} {str(a)[:12]}, expected {str(b)[:12]}: it answers another message."
            )


def read_update(content: RecordDict, expected: Header, sender: str) -> Update:
    """Read a client's reply to a train message."""
    with _reply_of(sender):
        fields = fields_of(content)
        check_header(header_of(fields), expected, sender)
        examples = fields.get("examples")
        if type(examples) is not int or not 1 <= examples <= MAX_EXAMPLES:
            raise ProtocolError(f"it trained on {str(examples)[:40]} images, expected 1 to {MAX_EXAMPLES:,}.")
        return Update(examples, arrays_of(content), metrics_of(content))


def read_metrics(content: RecordDict, expected: Header, sender: str) -> dict[str, float]:
    """Read a client's reply to an evaluate message."""
    with _reply_of(sender):
        check_header(header_of(fields_of(content)), expected, sender)
        return metrics_of(content)


@contextmanager
def _reply_of(sender: str) -> Iterator[None]:
    """Name the sender in an error."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{sender} sent a reply that cannot be used: {error}") from None


# --- bytes ---


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
        raise ProtocolError(
            f"a message from {sender} has {size / 2**20:,.0f} MB, the limit is {limit_mb} MB. "
            "Lower alignment.rank or rad.size, or raise message_mb on both sides."
        )
    return size
