"""A hostile client: each malformed reply is reported and excluded, and changes nothing."""

import io
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.rig import Rig
from helpers.saved import lines
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ProtocolError
from hetero_ssfl.federation.client.app import app
from hetero_ssfl.federation.client.memory import ClientCache
from hetero_ssfl.federation.engines.workers import RUN_ID
from hetero_ssfl.federation.participants.node import open_node
from hetero_ssfl.federation.participants.node_rad import find_rad
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.federation.wire import arrays_of, fields_of, metrics_of, pack, read_update
from hetero_ssfl.methods import Broadcast, ServerState, method_for
from hetero_ssfl.methods.hetero import HeteroSSFL

ROSTER = ("node-0", "node-1", "node-2")

Reply = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Arrays, fields and metrics of a reply, before they are packed."""
Spoil = Callable[[Reply], Any]


def with_array(change: Callable[[np.ndarray], Any]) -> Spoil:
    return lambda reply: ({"factor": change(reply[0]["factor"])}, reply[1], reply[2])


def with_field(key: str, value: Any) -> Spoil:
    return lambda reply: (reply[0], {**reply[1], key: value}, reply[2])


def with_metric(key: str, value: Any) -> Spoil:
    return lambda reply: (reply[0], reply[1], {**reply[2], key: value})


def without(part: int, key: str) -> Spoil:
    def spoil(reply: Reply) -> Any:
        parts = [dict(p) for p in reply]
        parts[part].pop(key)
        return tuple(parts)

    return spoil


def put(value: float, at: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        out = array.copy()
        out.flat[at % out.size] = value
        return out

    return change


shapes = st.lists(st.integers(0, 40), max_size=4).filter(
    lambda s: not (len(s) == 2 and s[0] == 24 and 1 <= s[1] <= 512)
)
names = st.text(max_size=60)

malformed: st.SearchStrategy[Spoil] = st.one_of(
    st.builds(put, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 10**6)).map(with_array),
    shapes.map(lambda shape: with_array(lambda a: np.zeros(shape, a.dtype))),
    shapes.map(lambda shape: with_array(lambda _: np.ones(shape, np.float16))),
    st.sampled_from([np.int64, np.uint8, np.bool_, np.complex64]).map(lambda t: with_array(lambda a: a.astype(t))),
    st.floats(2.0, 1e30).map(lambda scale: with_array(lambda a: a * np.float32(scale))),
    st.just(with_array(lambda a: np.zeros_like(a))),
    st.integers(1, 500).map(lambda more: with_array(lambda a: np.tile(a, (1, 1 + 40 * more))[:, : 513 + more])),
    names.filter(lambda n: n != "factor").map(
        lambda n: lambda r: ({**r[0], n: np.zeros(3, np.float32)}, r[1], r[2])  # an extra array
    ),
    st.just(without(0, "factor")),
    st.integers(-5, 10**7).filter(lambda r: r != 0).map(lambda r: with_field("round", r)),
    st.sampled_from(["0", True, 0.0, math.nan]).map(lambda r: with_field("round", r)),
    st.text("0123456789abcdef", min_size=64, max_size=64).map(lambda d: with_field("rad", d)),
    names.map(lambda d: with_field("rad", d)),
    names.map(lambda d: with_field("federation", d)),
    st.sampled_from(["federation", "round", "rad", "examples"]).map(lambda key: without(1, key)),
    st.sampled_from([0, -1, 10**12, 1.5, "many", True]).map(lambda n: with_field("examples", n)),
    st.sampled_from([math.nan, math.inf]).map(lambda v: with_metric("loss_ssl", v)),
    st.sampled_from(["event", "round", "client", "excluded", "bytes_up", "", "Ä", "a b", "x" * 99]).map(
        lambda key: with_metric(key, 1.0)
    ),
    st.just(lambda r: (r[0], r[1], {f"figure_{k}": 0.0 for k in range(500)})),
    st.just(lambda _: RecordDict()),
    st.binary(max_size=200).map(
        lambda data: lambda r: ({"factor": Array("float32", (24, 4), "numpy.ndarray", data)}, r[1], r[2])
    ),
    st.just(lambda r: ({"factor": pickled_array()}, r[1], r[2])),
    st.integers(0, 99).map(lambda code: lambda _: Error(code, "x" * 5000)),
)


def pickled_array() -> Array:
    """Return an array that would run code if it were unpickled."""
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", stream.getvalue())


def rebuilt(spoilt: Any, question: Message) -> Message:
    if isinstance(spoilt, (Error, RecordDict)):
        return Message(spoilt, reply_to=question)
    arrays, told, figures = spoilt
    content = RecordDict()
    content["arrays"] = ArrayRecord(
        OrderedDict((k, v if isinstance(v, Array) else Array(np.ascontiguousarray(v))) for k, v in arrays.items())
    )
    content["settings"] = ConfigRecord(told)
    content["metrics"] = MetricRecord(figures)
    return Message(content, reply_to=question)


class Stage:
    """The opening of a federation of three. Honest replies are kept, so that it can be repeated quickly."""

    def __init__(self, root: Path) -> None:
        self.rig = Rig(root)
        self.replies: dict[int, Message] = {}
        for node in (100, 101, 102):
            self.rig.grid.tamper[node] = self.remember
        self.server = Server(self.rig.grid, self.rig.folder, self.rig.config, self.rig.listen)
        self.server.roster.gather(None)
        self.start = ServerState(-1, ROSTER)
        self.server.play(self.start, ROSTER)
        self.honest = {
            name: read_update(self.replies[node].content, name)
            for name, node in zip(ROSTER, (100, 101, 102), strict=True)
        }
        self.rig.grid.answer = self.answer  # type: ignore[method-assign]
        self.spoil: Spoil = lambda reply: reply

    def remember(self, question: Message, reply: Message) -> Message:
        self.replies[question.metadata.dst_node_id] = reply
        return reply

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        content = self.replies[node].content
        if node != 101:
            return Message(content, reply_to=message)
        arrays = {k: v.numpy() for k, v in arrays_of(content).items()}
        return rebuilt(self.spoil((arrays, fields_of(content), metrics_of(content))), message)

    def play(self, spoil: Spoil) -> ServerState:
        self.spoil = spoil
        self.rig.events.clear()
        (self.rig.folder.path / "events.jsonl").unlink(missing_ok=True)
        return self.server.play(self.start, ROSTER)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("hostile"))


def test_an_unmodified_reply_is_accepted(stage: Stage) -> None:
    state = stage.play(lambda reply: reply)
    assert set(state.clients) == set(ROSTER)
    assert stage.rig.excluded() == []


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(malformed)
def test_200_malformed_replies_are_each_reported_and_excluded(stage: Stage, spoil: Spoil) -> None:
    state = stage.play(spoil)
    (event,) = [e for e in lines(stage.rig.folder) if "excluded" in e]
    assert event["client"] == "node-1"
    assert "node-1" in event["excluded"]
    assert len(event["excluded"]) < 1000
    assert any("node-1" in e["text"] for e in stage.rig.events if e["event"] == "warning")
    without_it = {name: update for name, update in stage.honest.items() if name != "node-1"}
    expected = stage.server.method.aggregate(stage.start, without_it)
    assert torch.equal(state.shared["factor"], expected.shared["factor"])
    assert set(state.clients) == {"node-0", "node-2"}


def npy(header: str, data: bytes = b"") -> bytes:
    """Bytes in numpy's format with any header."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def zipped() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, factor=np.zeros(3))
    return stream.getvalue()


BAD_BYTES = {
    "a zip archive": zipped(),
    "petabytes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000000)}"),
    "a shape of 10^30": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1" + "0" * 30 + ",)}"),
    "a negative shape": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -24)}", bytes(96)),
    "an unclosed header": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (24, "),
    "code in the header": npy("{'descr': __import__('os').abort(), 'fortran_order': False, 'shape': ()}"),
    "too few bytes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (24, 4)}", bytes(8)),
    "too many bytes": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (24, 4)}", bytes(500)),
    "a huge header": b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{" * 3000,
    "an unknown version": b"\x93NUMPY\x09\x00" + bytes(200),
    "nothing": b"",
    "deep nesting": npy("(" * 60),
}


@pytest.mark.parametrize("data", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bytes_that_are_no_array_cost_only_their_sender(stage: Stage, data: bytes) -> None:
    """Each of these ended a server once: BadZipFile, MemoryError, OverflowError, TokenError."""
    array = Array("float32", (24, 4), "numpy.ndarray", data)
    state = stage.play(lambda reply: ({"factor": array}, reply[1], reply[2]))
    assert set(state.clients) == {"node-0", "node-2"}
    (event,) = [e for e in lines(stage.rig.folder) if "excluded" in e]
    assert "the array 'factor' cannot be read" in event["excluded"]


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 1e31])
def test_a_figure_that_would_overflow_a_mean_is_refused(stage: Stage, value: float) -> None:
    state = stage.play(with_metric("loss_ssl", value))
    assert set(state.clients) == {"node-0", "node-2"}


@pytest.mark.parametrize("name", ["away", "replies", "figures", "seconds", "event", "excluded"])
def test_a_figure_cannot_take_the_place_of_a_field_of_an_event(stage: Stage, name: str) -> None:
    state = stage.play(with_metric(name, 0.5))
    assert set(state.clients) == {"node-0", "node-2"}


def test_whatever_a_check_raises_is_the_fault_of_the_sender(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(state: ServerState, name: str, update: object) -> None:
        if name == "node-1":
            raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(stage.server.method, "check", check)
    state = stage.play(lambda reply: reply)
    assert set(state.clients) == {"node-0", "node-2"}


def test_a_message_over_the_size_limit_is_refused(stage: Stage) -> None:
    def huge(reply: Reply) -> Reply:
        return {"factor": np.zeros((24, 2**20 // 8), np.float32)}, reply[1], reply[2]

    tight = load_config(str(stage.rig.federation), ["engine.message_mb=1"])
    before = stage.server.config
    stage.server.config = stage.server.roster.config = tight
    try:
        stage.play(huge)
    finally:
        stage.server.config = stage.server.roster.config = before
    (event,) = [e for e in lines(stage.rig.folder) if "excluded" in e]
    assert "a message from node-1 has 12 MB, the limit is 1 MB" in event["excluded"]


# --- hostile messages to a client ---


@pytest.mark.parametrize("distance", ["cka", "coordinates"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda sent: sent * math.nan, "not finite"),
        (lambda sent: sent + 1e30, "with a value of 1e.30, expected at most 2"),
        (lambda sent: sent - 3, "with a value of 3, expected at most 2"),
        (lambda sent: sent[:23], "of shape"),
        (lambda sent: sent.repeat(1, 99), "of shape"),
        (lambda sent: sent[:, 0], "of shape"),
        (lambda sent: sent.long(), "of type"),
        (None, "'other', expected only"),
    ],
)
def test_a_client_refuses_an_invalid_consensus(
    stage: Stage, distance: str, spoil: Callable[[Tensor], Tensor] | None, reason: str
) -> None:
    path = stage.rig.paths[0]
    rad = find_rad(read_node(path), stage.server.roster.rad_digest)
    assert rad is not None
    alignment = stage.rig.config.alignment.model_copy(update={"distance": distance})
    config = stage.rig.config.model_copy(update={"alignment": alignment})
    participant = open_node(read_node(path), config, stage.server.roster.federation, rad)
    client, method = ClientCache().get(participant, 0), method_for(participant.config)
    assert isinstance(method, HeteroSSFL)
    honest = torch.zeros(24, alignment.coordinates)
    method.check_broadcast(client, Broadcast(1, {method.sends: honest}))
    sent = {"other": honest} if spoil is None else {method.sends: spoil(honest)}
    with pytest.raises(ProtocolError, match=f"the server sent .*{reason}"):
        method.check_broadcast(client, Broadcast(1, sent))


@pytest.mark.parametrize(
    "told",
    [
        {"federation": "../../etc", "round": 1, "rad": "0" * 64},
        {"federation": "0" * 32, "round": -1, "rad": "0" * 64},
        {"federation": "0" * 32, "round": 1, "rad": "../secret"},
        {},
    ],
)
def test_a_client_refuses_a_message_with_an_invalid_header(stage: Stage, told: dict[str, Any]) -> None:
    question = Message(pack(fields={**told, "config": stage.rig.config.to_toml()}), 100, "train")
    context = Context(RUN_ID, 100, {"settings": str(stage.rig.paths[0])}, RecordDict(), {})
    reply = app(question, context)
    assert reply.has_error()
    assert reply.error.reason is not None
    assert "is named" in reply.error.reason or "the message names" in reply.error.reason
