"""What travels, in Flower's records: arrays, one set of scalars, and figures."""

from collections import OrderedDict
from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from torch import Tensor

from ..errors import ProtocolError
from ..methods import Broadcast, Update

Scalar = int | float | str | bool


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


def arrays_of(content: RecordDict) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy()) for name, array in content.array_records["arrays"].items()}


def settings_of(content: RecordDict) -> dict[str, Scalar]:
    return dict(content.config_records["settings"])  # type: ignore[arg-type]


def metrics_of(content: RecordDict) -> dict[str, float]:
    return {name: float(value) for name, value in content.metric_records["metrics"].items()}  # type: ignore[arg-type]


def pack_broadcast(down: Broadcast, config_toml: str) -> RecordDict:
    return pack(down.arrays, {"round": down.round, "config": config_toml})


def read_broadcast(content: RecordDict) -> Broadcast:
    return Broadcast(int(settings_of(content)["round"]), arrays_of(content))


def pack_update(update: Update) -> RecordDict:
    return pack(update.arrays, {"examples": update.examples}, update.metrics)


def read_update(content: RecordDict, client: str) -> Update:
    """A client's reply; anything that is not one is a ProtocolError that names the client."""
    try:
        examples = settings_of(content)["examples"]
        update = Update(int(examples), arrays_of(content), metrics_of(content))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"{client} sent a reply that cannot be read: {error!r}. Does it run this version?"
        ) from None
    if update.examples < 1:
        raise ProtocolError(f"{client} says it trained on {update.examples} images, expected at least 1.")
    return update


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
