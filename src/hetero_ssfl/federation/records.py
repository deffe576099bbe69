"""What travels, in Flower's records: arrays, one set of scalars, and figures.

Every message says which federation, round and RAD it belongs to, and every reply repeats that: an answer to an old
question, or one from another RAD, is known as such. Nothing that arrives is believed before it is checked here.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from torch import Tensor

from ..errors import ProtocolError
from ..methods import Update

Scalar = int | float | str | bool

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
FEDERATION = re.compile(r"[0-9a-f]{32}")
DIGEST = re.compile(r"[0-9a-f]{64}")
FIGURE = re.compile(r"[a-z][a-z0-9_]{0,39}(%)?")
RESERVED = {"event", "round", "client", "bytes_down", "bytes_up", "examples", "excluded", "warning", "seconds"}
MOST_FIGURES = 100
MOST_EXAMPLES = 10**9


@dataclass(frozen=True)
class Header:
    """Where a message belongs."""

    federation: str
    round: int
    rad: str
    """The RAD's digest."""


# --- packing ---


def pack(
    arrays: Mapping[str, Tensor] | None = None,
    settings: Mapping[str, Scalar] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> RecordDict:
    """One message's content."""
    content = RecordDict()
    content["arrays"] = ArrayRecord(OrderedDict((k, Array(v.cpu().numpy())) for k, v in (arrays or {}).items()))
    content["settings"] = ConfigRecord(dict(settings or {}))
    content["metrics"] = MetricRecord(dict(metrics or {}))
    return content


def with_rad(content: RecordDict, pixels: Tensor) -> RecordDict:
    return RecordDict({**content, "rad": ArrayRecord(OrderedDict(pixels=Array(pixels.numpy())))})


def pack_reply(
    header: Header,
    arrays: Mapping[str, Tensor] | None = None,
    metrics: Mapping[str, float] | None = None,
    facts: Mapping[str, Scalar] | None = None,
) -> RecordDict:
    return pack(arrays, {**asdict(header), **(facts or {})}, metrics)


def pack_update(header: Header, update: Update) -> RecordDict:
    return pack_reply(header, update.arrays, update.metrics, {"examples": update.examples})


# --- reading: whatever is not as it must be is a ProtocolError ---


def arrays_of(content: RecordDict, key: str = "arrays") -> dict[str, Tensor]:
    record: Mapping[str, Array] = content.array_records.get(key, {})
    try:
        return {str(name): torch.from_numpy(array.numpy()) for name, array in record.items()}
    except (KeyError, TypeError, ValueError, EOFError) as error:  # numpy's reader, on bytes that are not an array
        raise ProtocolError(f"an array cannot be read: {error}.") from None


def rad_of(content: RecordDict) -> Tensor | None:
    record = content.array_records.get("rad")
    if record is None or "pixels" not in record:
        return None
    try:
        return torch.from_numpy(record["pixels"].numpy())
    except (KeyError, TypeError, ValueError, EOFError) as error:
        raise ProtocolError(f"the RAD that was sent cannot be read: {error}.") from None


def settings_of(content: RecordDict) -> dict[str, Scalar]:
    record: Mapping[str, object] = content.config_records.get("settings", {})
    return {str(k): v for k, v in record.items() if isinstance(v, (int, float, str, bool))}


def metrics_of(content: RecordDict) -> dict[str, float]:
    """Figures that may stand in an event: plain names, finite numbers."""
    record: Mapping[str, object] = content.metric_records.get("metrics", {})
    if len(record) > MOST_FIGURES:
        raise ProtocolError(f"{len(record)} figures came, expected at most {MOST_FIGURES}.")
    for name, value in record.items():
        if not FIGURE.fullmatch(name) or name in RESERVED:
            raise ProtocolError(f"'{name[:40]}' cannot be the name of a figure.")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ProtocolError(f"the figure '{name}' is {str(value)[:40]}, expected a finite number.")
    return {name: float(value) for name, value in record.items()}  # type: ignore[arg-type]


def header_of(settings: Mapping[str, Scalar]) -> Header:
    federation, number, rad = (settings.get(key) for key in ("federation", "round", "rad"))
    if not isinstance(federation, str) or not FEDERATION.fullmatch(federation):
        raise ProtocolError(f"the message names federation {str(federation)[:40]!r}, expected 32 hexadecimal digits.")
    if type(number) is not int or not 0 <= number < 10**6:
        raise ProtocolError(f"the message names round {str(number)[:40]}, expected 0 to 999,999.")
    if not isinstance(rad, str) or not DIGEST.fullmatch(rad):
        raise ProtocolError(f"the message names RAD {str(rad)[:40]!r}, expected a SHA-256 digest.")
    return Header(federation, number, rad)


def check_header(found: Header, expected: Header, sender: str) -> None:
    for what in ("federation", "round", "rad"):
        a, b = getattr(found, what), getattr(expected, what)
        if a != b:
            raise ProtocolError(
                f"{sender} answered for {what} {str(a)[:12]}, expected {str(b)[:12]}: not this question."
            )


def read_update(content: RecordDict, expected: Header, sender: str) -> Update:
    """A client's reply to an instruction to train."""
    settings = settings_of(content)
    check_header(header_of(settings), expected, sender)
    examples = settings.get("examples")
    if type(examples) is not int or not 1 <= examples <= MOST_EXAMPLES:
        raise ProtocolError(
            f"{sender} says it trained on {str(examples)[:40]} images, expected 1 to {MOST_EXAMPLES:,}."
        )
    return Update(examples, arrays_of(content), metrics_of(content))


def read_figures(content: RecordDict, expected: Header, sender: str) -> dict[str, float]:
    """A client's reply to an instruction to evaluate."""
    check_header(header_of(settings_of(content)), expected, sender)
    return metrics_of(content)


# --- bytes ---


def encode(message: Message) -> bytes:
    return message_to_proto(message).SerializeToString()


def decode(data: bytes) -> Message:
    return message_from_proto(ProtoMessage.FromString(data))


def content_size(content: RecordDict) -> int:
    """Bytes of a message's content as it travels."""
    return recorddict_to_proto(content).ByteSize()


def encoded_size(message: Message) -> int:
    """Bytes of the whole message as it travels."""
    return message_to_proto(message).ByteSize()


def check_size(message: Message, limit_mb: int, sender: str) -> int:
    size = encoded_size(message)
    if size > limit_mb * 2**20:
        raise ProtocolError(
            f"a message of {sender} has {size / 2**20:,.0f} MB, the limit is {limit_mb} MB. "
            "Lower alignment.rank or rad.size, or raise message_mb on both sides."
        )
    return size
