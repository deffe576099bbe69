"""Rounds as secure sums, with the real server loop and ClientApp: what the server gets, who may fail, what
a client refuses."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from torch import Tensor

from helpers.federations import write_node
from helpers.rig import Rig, tensors
from helpers.saved import lines
from hetero_ssfl.config import parse_config
from hetero_ssfl.deploy import pki
from hetero_ssfl.errors import ConfigError, ProtocolError
from hetero_ssfl.federation.client.memory import ClientCache
from hetero_ssfl.federation.participants.node import check_instruction, open_node
from hetero_ssfl.federation.participants.node_rad import find_rad
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.federation.start import start
from hetero_ssfl.federation.wire import arrays_of, fields_of, roster_of, texts_of, with_lists, with_roster
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.methods import Broadcast, ServerState, Update, method_for
from hetero_ssfl.methods.capabilities import SecureSums
from hetero_ssfl.privacy.sums.client import advertise
from hetero_ssfl.privacy.sums.keys import PublicKeys, fingerprint
from hetero_ssfl.privacy.sums.rules import MIN_PARTICIPANTS, Session
from hetero_ssfl.runs.events import RoundDone
from hetero_ssfl.runs.files import write_json

SECURE = ("privacy.secure=true", "alignment.form=sketch", "evaluation.probes=['knn']")
SMALL = "resnet8(width=4)"
NAMES = tuple(f"node-{k}" for k in range(5))


class Crash(BaseException):
    """Stands for the end of the server's process."""


class Stage:
    """The opening of a federation of five. It can be repeated quickly."""

    def __init__(self, root: Path) -> None:
        self.rig = Rig(root, *SECURE, encoders=(SMALL,) * 5)
        self.server = self.new_server()
        self.honest = {name: self.update(name) for name in NAMES}

    def new_server(self) -> Server:
        server = Server(self.rig.grid, self.rig.folder, self.rig.config, self.rig.listen)
        server.roster.gather(None)
        return server

    def play(self) -> ServerState:
        return self.server.play(ServerState(-1, NAMES), NAMES)

    def reset(self) -> None:
        """Forget all that nodes, grid and server remember of earlier plays."""
        for node in range(5):
            (self.rig.root / f"node-{node}" / "state" / f"privacy-node-{node}.json").unlink(missing_ok=True)
        self.rig.grid.states.clear()
        self.rig.grid.tamper.clear()
        self.rig.grid.sent.clear()
        self.rig.grid.replies.clear()
        self.rig.events.clear()
        (self.rig.folder.path / "events.jsonl").unlink(missing_ok=True)

    def update(self, name: str) -> Update:
        """Return the reply of a client before it is masked."""
        node = read_node(self.rig.root / name / "node.toml")
        if find_rad(node, self.server.roster.rad_digest) is None:
            self.play()
        rad = find_rad(node, self.server.roster.rad_digest)
        assert rad is not None
        participant = open_node(node, self.rig.config, self.server.roster.federation, rad)
        client = ClientCache().get(participant, 0)
        return method_for(participant.config).local_update(client, Broadcast(0))

    def expected(self, *missing: str) -> Tensor:
        updates = {name: update for name, update in self.honest.items() if name not in missing}
        return self.server.method.aggregate(ServerState(-1, NAMES), updates).shared["factor"]

    def silence(self, name: str, kind: str) -> None:
        """Let nothing arrive from a node from one kind of message on, as if it had been killed."""
        kinds = ["query.keys", "query.shares", "train", "query.confirm", "query.unmask"]
        late = kinds[kinds.index(kind) :]
        number = 100 + int(name[-1])
        self.rig.grid.tamper[number] = lambda asked, reply: None if asked.metadata.message_type in late else reply

    def warnings(self) -> list[str]:
        return [event["text"] for event in self.rig.events if event["event"] == "warning"]

    def done(self) -> dict[str, object]:
        (event,) = [event for event in self.rig.events if event["event"] == "round"]
        return event


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("secure"))


@pytest.fixture
def stage(opened: Stage) -> Stage:
    opened.reset()
    opened.server = opened.new_server()
    opened.server.config = opened.server.roster.config = opened.rig.config
    return opened


def impatient(stage: Stage) -> None:
    """Do not wait for nodes that will not reply."""
    engine = stage.rig.config.engine.model_copy(update={"join_timeout": 0.01, "round_timeout": 0.01})
    stage.server.config = stage.server.roster.config = stage.rig.config.model_copy(update={"engine": engine})
    stage.server.roster.patience = 0.01


def same(a: Tensor, b: Tensor) -> bool:
    """Compare kernels: the columns of their factors may differ in sign."""
    return torch.allclose(a @ a.T, b @ b.T, atol=1e-5)


# --- the sum ---


def test_the_consensus_is_that_of_the_plain_sketches(stage: Stage) -> None:
    found = stage.play().shared["factor"]
    plain = stage.rig.config.model_copy(
        update={"privacy": stage.rig.config.privacy.model_copy(update={"secure": False})}
    )
    expected = method_for(plain).aggregate(ServerState(-1, NAMES), stage.honest).shared["factor"]
    assert factor_cka(found.double(), expected.double()) >= 0.999999
    assert same(found, expected)
    assert stage.done()["replies"] == 5
    ranks = [update.metrics["effective_rank"] for update in stage.honest.values()]
    assert stage.done()["effective_rank"] == pytest.approx(sum(ranks) / 5, rel=1e-6)


@pytest.mark.parametrize("kind", ["query.keys", "query.shares", "train", "query.confirm", "query.unmask"])
def test_one_of_five_may_be_killed_in_any_phase(stage: Stage, kind: str) -> None:
    stage.silence("node-2", kind)
    impatient(stage)
    state = stage.play()
    counted = kind in ("query.confirm", "query.unmask")  # its vector had arrived
    assert same(state.shared["factor"], stage.expected(*([] if counted else ["node-2"])))
    excluded = [event["client"] for event in lines(stage.rig.folder) if "excluded" in event]
    assert excluded == ([] if counted else ["node-2"])
    assert any("node-2 did not reply in time" in text for text in stage.warnings())


@pytest.mark.parametrize("kind", ["query.keys", "query.shares", "train", "query.confirm", "query.unmask"])
def test_with_too_few_the_round_is_given_up_and_nothing_is_unmasked(stage: Stage, kind: str) -> None:
    for name in NAMES[: 3 if kind == "query.keys" else 2]:
        stage.silence(name, kind)
    impatient(stage)
    state = stage.play()
    assert (state.round, state.shared) == (0, {})
    assert stage.done()["replies"] == 0
    (text,) = [text for text in stage.warnings() if "is given up" in text]
    assert "expected at least" in text
    asked = {message.metadata.message_type for message in stage.rig.grid.sent}
    assert ("query.unmask" in asked) is (kind == "query.unmask")


def test_a_vector_that_is_no_kernel_gives_up_the_round(stage: Stage) -> None:
    def spoil(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train":
            body = arrays_of(reply.content)["body"].numpy() + np.int32(2**30)
            reply.content.array_records["arrays"]["body"] = Array(body)
        return reply

    stage.rig.grid.tamper[102] = spoil
    assert stage.play().shared == {}
    assert any("given up: the mean kernel has norm" in text for text in stage.warnings())


def test_sizes_can_be_weights(stage: Stage) -> None:
    by_size = stage.rig.config.clients.model_copy(update={"weights": "size"})
    secure = stage.rig.config.model_copy(update={"clients": by_size})
    plain = secure.model_copy(update={"privacy": secure.privacy.model_copy(update={"secure": False})})
    updates = {name: replace(u, examples=10 ** (2 * k)) for k, (name, u) in enumerate(stage.honest.items())}
    found, expected = (
        method_for(config).aggregate(ServerState(-1, NAMES), updates).shared["factor"] for config in (secure, plain)
    )
    assert same(found, expected)
    assert not same(found, stage.expected())
    assert {e["examples"] for e in stage.rig.events if e["event"] == "joined"} == {0}, "sizes are not told otherwise"


def test_a_part_of_the_last_consensus_can_be_kept(stage: Stage) -> None:
    privacy = stage.rig.config.privacy.model_copy(update={"keep": 0.25})
    method = method_for(stage.rig.config.model_copy(update={"privacy": privacy}))
    first = {name: stage.honest[name] for name in NAMES[:3]}
    second = {name: stage.honest[name] for name in NAMES[2:]}
    state = method.aggregate(method.aggregate(ServerState(-1, NAMES), first), second)
    old, new, mixed = (
        factor @ factor.T for factor in (stage.expected(*NAMES[3:]), stage.expected(*NAMES[:2]), state.shared["factor"])
    )
    assert torch.allclose(mixed, 0.25 * old + 0.75 * new, atol=1e-5)


# --- what the server gets ---


def test_everything_that_the_server_received_and_stored_hides_each_client(stage: Stage) -> None:
    """Masked replies are uniform and unrelated to the vectors. Neither they nor the vectors are on the disk."""
    heard: dict[int, dict[str, Message]] = {}

    def listen(asked: Message, reply: Message) -> Message:
        heard.setdefault(asked.metadata.dst_node_id, {})[asked.metadata.message_type] = reply
        return reply

    stage.rig.grid.tamper = dict.fromkeys(range(100, 105), listen)
    state = stage.play()
    stored = b"".join(file.read_bytes() for file in stage.rig.folder.path.rglob("*") if file.is_file())
    method = stage.server.method
    assert isinstance(method, SecureSums)
    for number, name in enumerate(NAMES):
        masked = arrays_of(heard[100 + number]["train"].content)["body"].numpy()
        vector = method.summand(stage.honest[name], 5)
        counts = np.bincount(masked.view(np.uint8), minlength=256)
        assert (
            (counts - counts.mean()) ** 2 / counts.mean()
        ).sum() < 450  # 255 degrees of freedom: 1 in 10^12 by chance, millions unmasked
        related = np.corrcoef(masked.astype(float), vector.body.view(np.int32).astype(float))[0, 1]
        assert abs(related) < 4 / len(masked) ** 0.5
        for secret in (masked.tobytes(), vector.body.tobytes(), stage.honest[name].arrays["sketch"].numpy().tobytes()):
            assert secret[:64] not in stored
        told = heard[100 + number]["train"].content
        assert not told.metric_records.get("metrics")
        assert set(fields_of(told)) == {"federation", "round", "rad"}
    assert (state.clients, state.examples) == ({}, {})
    assert not (stage.rig.folder.path / "shares").exists()
    for event in lines(stage.rig.folder):
        if event["event"] == "client":
            assert set(event) == {"event", "round", "client", "bytes_down", "bytes_up"}


def test_a_node_keeps_its_figures_and_no_secrets(stage: Stage) -> None:
    kept: list[bytes] = []

    def look(asked: Message, reply: Message) -> Message:
        state: Mapping[str, object] = stage.rig.grid.states[101].config_records.get("secure-sum", {})
        if "state" in state:
            values = json.loads(str(state["state"]))
            kept.extend(bytes.fromhex(values[key]) for key in ("sealing", "masking", "self_seed") if values[key])
        return reply

    stage.rig.grid.tamper[101] = look
    stage.play()
    assert len(kept) >= 3
    on_disk = b"".join(f.read_bytes() for f in (stage.rig.root / "node-1").rglob("*") if f.is_file())
    assert not [secret for secret in kept if secret in on_disk or secret.hex().encode() in on_disk]
    assert not stage.rig.grid.states[101].config_records, "forgotten after the shares were revealed"
    (figures,) = (stage.rig.root / "node-1").rglob("figures.json")
    assert json.loads(figures.read_text())["0"] == pytest.approx(dict(stage.honest["node-1"].metrics))


# --- crashes ---


@pytest.mark.parametrize("kind", ["query.keys", "query.shares", "train", "query.confirm", "query.unmask"])
def test_a_server_killed_in_any_phase_starts_the_round_again_with_new_keys(stage: Stage, kind: str) -> None:
    whole = stage.play().shared["factor"]
    stage.reset()
    keys: list[PublicKeys] = []

    def die(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "query.keys":
            keys.extend(roster_of(reply.content))
        if asked.metadata.message_type == kind and len(keys) == 1:
            raise Crash
        return reply

    stage.rig.grid.tamper[104] = die
    with pytest.raises(Crash):
        stage.play()
    stage.server = stage.new_server()
    assert torch.equal(stage.play().shared["factor"], whole), "the same bits"
    assert keys[0].masking != keys[1].masking


def test_a_repeated_round_is_not_unmasked_for_other_participants(stage: Stage) -> None:
    """The vectors are the same, so the difference of both sums would be a single one."""
    stage.play()
    stage.silence("node-2", "train")
    impatient(stage)
    stage.rig.events.clear()
    assert stage.play().shared == {}
    assert any("revealed the sum of round 0 for other participants" in text for text in stage.warnings())
    assert any("is given up: 0 participants revealed shares" in text for text in stage.warnings())


def test_a_restarted_node_has_lost_its_keys_and_the_round_goes_on_without_it(stage: Stage) -> None:
    def restart(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "query.shares":
            stage.rig.grid.states.pop(103)
        return reply

    stage.rig.grid.tamper[103] = restart
    state = stage.play()
    assert same(state.shared["factor"], stage.expected("node-3"))
    (event,) = [event for event in lines(stage.rig.folder) if "excluded" in event]
    assert "node-3 has no keys for this sum: it was restarted" in event["excluded"]


# --- a server that asks for too much ---


@pytest.fixture
def altered(stage: Stage) -> Iterator[Callable[[str, Callable[[Message], None]], list[str]]]:
    """Play with a server that alters its messages of one kind to node-1. Return what node-1 replied."""
    honest = stage.rig.grid.answer

    def play(kind: str, alter: Callable[[Message], None]) -> list[str]:
        refused: list[str] = []

        def answer(message: Message) -> Message | None:
            if message.metadata.message_type == kind and message.metadata.dst_node_id == 101:
                alter(message)
                reply = honest(message)
                assert reply is not None
                refused.extend([str(reply.error.reason)] if reply.has_error() else [])
                return reply
            return honest(message)

        stage.rig.grid.answer = answer  # type: ignore[method-assign]
        stage.play()
        return refused

    yield play
    stage.rig.grid.answer = honest  # type: ignore[method-assign]


def relisted(message: Message, **lists: list[str]) -> None:
    known: Any = dict(message.content.config_records["lists"])
    message.content["lists"] = with_lists(message.content, {**known, **lists}).config_records["lists"]


def test_a_client_refuses_to_give_both_shares(altered: Callable[..., list[str]]) -> None:
    (text,) = altered("query.confirm", lambda m: relisted(m, dropped=["node-3"]))
    assert "the server asks node-1 for both shares of node-3" in text


def test_a_client_refuses_to_reveal_twice(stage: Stage, altered: Callable[..., list[str]]) -> None:
    asked: list[Message] = []
    assert altered("query.unmask", asked.append) == []
    again = stage.rig.grid.answer(asked[0])
    assert again is not None
    assert "has already revealed its shares" in str(again.error.reason)


def test_a_client_refuses_a_false_roster_and_repeated_keys(stage: Stage, altered: Callable[..., list[str]]) -> None:
    def forge(message: Message) -> None:
        roster = roster_of(message.content)
        roster[2] = replace(roster[2], masking=bytes(32))
        message.content["lists"] = with_roster(message.content, roster).config_records["lists"]

    (text,) = altered("query.shares", forge)
    assert "small order" in text
    stage.reset()
    old = advertise(Session(stage.server.roster.federation, 0, "0" * 32), "node-4")[1]
    write_json(stage.rig.root / "node-1" / "state" / "privacy-node-1.json", {"seen": [fingerprint(old)]})

    def repeat(message: Message) -> None:
        roster = [old if keys.name == "node-4" else keys for keys in roster_of(message.content)]
        message.content["lists"] = with_roster(message.content, roster).config_records["lists"]

    (text,) = altered("query.shares", repeat)
    assert "repeats keys of node-4" in text


def test_a_client_does_not_train_for_a_sum_that_it_would_not_mask(
    stage: Stage, altered: Callable[..., list[str]]
) -> None:
    for file in (stage.rig.root / "node-1").rglob("figures.json"):
        file.unlink()
    (text,) = altered("train", lambda m: relisted(m, senders=["node-0", "node-1"]))
    assert "only 2 of 5 participants shared their secrets" in text
    assert not list((stage.rig.root / "node-1").rglob("figures.json")), "written after training"


def test_names_that_would_be_paths_are_refused(altered: Callable[..., list[str]]) -> None:
    (text,) = altered("query.confirm", lambda m: relisted(m, survivors=["../../etc/passwd"]))
    assert "must contain only names of participants" in text


def test_a_client_refuses_the_phases_without_the_setting(stage: Stage) -> None:
    stage.play()
    (asked,) = [m for m in stage.rig.grid.sent if m.metadata.message_type == "query.keys"][:1]
    config = str(fields_of(asked.content)["config"]).replace("secure = true", "secure = false")
    asked.content.config_records["settings"]["config"] = config
    reply = stage.rig.grid.answer(asked)
    assert reply is not None
    assert "its config has privacy.secure = false" in str(reply.error.reason)
    assert texts_of(asked.content, "names") == []


# --- a node's own limits and keys ---


def test_a_node_can_insist_on_secure_sums_and_on_many_participants(stage: Stage, tmp_path: Path) -> None:
    limits = "[limits]\nsecure_only = true\nparticipants = 9\n"
    node = read_node(write_node(tmp_path, "a", SMALL, limits))
    plain = parse_config("", ["alignment.form=sketch"])
    with pytest.raises(ProtocolError, match="a takes part in secure sums only"):
        check_instruction(node, plain, 10)
    for count, threshold, refused in (
        (8, 0.7, "participants = 8, its limit is 9"),
        (9, 0.6, "threshold = 0.6, its limit is 0.666667"),
        (9, 0.7, ""),
    ):
        asked = ["alignment.form=sketch", "privacy.secure=true"]
        config = parse_config("", [*asked, f"clients.count={count}", f"privacy.threshold={threshold}"])
        with pytest.raises(ProtocolError, match=refused) if refused else nullcontext():
            check_instruction(node, config, 10)
    settings = stage.rig.root / "node-3" / "node.toml"
    before = settings.read_text()
    settings.write_text(before + "[limits]\nparticipants = 9\n")
    try:
        stage.play()
    finally:
        settings.write_text(before)
    (event,) = [event for event in lines(stage.rig.folder) if "excluded" in event]
    assert "secure sums with participants = 5, its limit is 9" in event["excluded"]


def test_nodes_with_registered_keys_recognise_each_other(stage: Stage) -> None:
    """A node without a key, or with another one than the others know, stops those that check."""
    keys = {name: pki.node_key() for name in NAMES}
    for name in NAMES:
        home = stage.rig.root / name
        (home / "node.key").write_bytes(keys[name][0])
        (home / "peers").mkdir(exist_ok=True)
        for peer in NAMES:
            (home / "peers" / f"{peer}.pub").write_bytes(keys[peer][1])
        settings = home / "node.toml"
        settings.write_text(f'key = "node.key"\npeers = "peers"\n{settings.read_text()}')
    try:
        assert same(stage.play().shared["factor"], stage.expected())
        stage.reset()
        (stage.rig.root / "node-4" / "node.key").write_bytes(pki.node_key()[0])
        assert stage.play().shared == {}
        assert any("the keys of node-4 are not signed with its registered key" in t for t in stage.warnings())
        stage.reset()
        (stage.rig.root / "node-4" / "node.key").write_text("nonsense")
        assert same(stage.play().shared["factor"], stage.expected("node-4"))
        assert any("node-4" in text and "settings: its settings" in text for text in stage.warnings())
    finally:
        for name in NAMES:
            settings = stage.rig.root / name / "node.toml"
            settings.write_text(settings.read_text().replace('key = "node.key"\npeers = "peers"\n', ""))


def test_a_node_ends_at_its_privacy_budget(stage: Stage) -> None:
    """Each vector costs, also that of a repeated round. The last one that fits is sent."""
    privacy = stage.rig.config.privacy.model_copy(update={"epsilon": 2.0, "largest_entry": 16.0})
    noisy = stage.rig.config.model_copy(update={"privacy": privacy})
    stage.server = Server(stage.rig.grid, stage.rig.folder, noisy, stage.rig.listen)
    stage.server.roster.gather(None)
    settings = stage.rig.root / "node-3" / "node.toml"
    before = settings.read_text()
    settings.write_text(before + "[limits]\nepsilon = 1.8\n")
    try:
        for _ in range(3):  # three releases cost epsilon = 2
            stage.play()
    finally:
        settings.write_text(before)
    excluded = [event["excluded"] for event in lines(stage.rig.folder) if "excluded" in event]
    assert len(excluded) == 1
    assert "node-3 has a privacy budget of epsilon = 1.8; this round would raise what it has spent to 2" in excluded[0]


def test_a_node_with_a_budget_refuses_rounds_without_noise(stage: Stage, tmp_path: Path) -> None:
    node = read_node(write_node(tmp_path, "a", SMALL, "[limits]\nepsilon = 3\n"))
    with pytest.raises(ProtocolError, match="a takes part only with noise"):
        check_instruction(node, stage.rig.config, 10)


# --- settings ---


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("alignment.form=factor", "alignment.form = 'factor': only sketches can be summed"),
        ("alignment.leave_one_out=true", "the server knows no single kernel"),
        ("alignment.normalize=false", "integers need a common scale"),
        ("clients.weights=[1.0,2.0,3.0,4.0,5.0]", "could single out a client"),
        ("clients.per_round=2", "2 clients per round: a sum of fewer than three"),
    ],
)
def test_what_needs_summands_is_refused_with_the_config(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.secure = true does not allow") as caught:
        parse_config("", ["privacy.secure=true", "alignment.form=sketch", "alignment.distance=cka", setting])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_methods_that_need_each_reply_are_refused() -> None:
    config = parse_config("", ["privacy.secure=true", "alignment.form=sketch", "method=fedbyol", "ssl.kind=byol"])
    with pytest.raises(ConfigError, match="method 'fedbyol' needs each client's reply"):
        method_for(config)
    assert MIN_PARTICIPANTS == 3


def test_worker_processes_give_the_same_bits_as_one_thread(tmp_path: Path) -> None:
    """The secrets of a round follow a client from worker to worker."""
    short = (*SECURE, "rounds=1", "engine.workers=2")
    one = Rig(tmp_path / "one", *short, encoders=(SMALL,) * 3)
    here = one.run()
    other = Rig(tmp_path / "two", *short, f"rad.source='{one.root / 'rad'}'", encoders=(SMALL,) * 3)
    events: list[RoundDone] = []
    there = start(
        other.config,
        tmp_path / "run",
        lambda event: events.append(event) if isinstance(event, RoundDone) else None,
        other.paths,
    )
    assert [event.replies for event in events] == [3, 3]
    assert all(torch.equal(value, tensors(there)[key]) for key, value in tensors(here).items())
