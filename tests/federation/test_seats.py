"""One seat for each registered node: names, newcomers, claimed sizes, and the first weights of averaging methods."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message

from helpers.federations import ENCODERS, write_federation
from helpers.instructions import RAD, Owner, tiny
from helpers.rig import Rig, tensors
from hetero_ssfl.config import ClientsConfig, SeatConfig
from hetero_ssfl.errors import ProtocolError
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.federation.server.roster import Roster
from hetero_ssfl.federation.server.seats import Seats, capped_sizes, typical_opening
from hetero_ssfl.federation.wire import arrays_of, fields_of, metrics_of, pack
from hetero_ssfl.kernels.contribution import packed
from hetero_ssfl.learning.probes import accuracy, balanced_accuracy
from hetero_ssfl.methods import HeteroSSFL, ServerState, Update
from hetero_ssfl.runs.files import load_tensors

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], tuple[dict[str, Any], dict[str, torch.Tensor]]]


def changed(kind: str, change: Change) -> Callable[[Message, Message], Message]:
    """A node that changes the fields and arrays of its replies to one kind of message."""

    def tamper(question: Message, reply: Message) -> Message:
        if question.metadata.message_type != kind or reply.has_error() or "need" in fields_of(reply.content):
            return reply
        fields, arrays = change(fields_of(reply.content), arrays_of(reply.content))
        return Message(pack(arrays, fields, metrics_of(reply.content)), reply_to=question)

    return tamper


def warnings(rig: Rig) -> str:
    return " ".join(e["text"] for e in rig.events if e["event"] == "warning")


def about_state(rig: Rig) -> dict[str, Any]:
    return load_tensors(rig.folder.path / "server.safetensors")[1]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of all federations here, so that they are decoded once."""
    folder = tmp_path_factory.mktemp("images")
    write_federation(folder)
    return folder


@pytest.fixture
def build(images: Path, tmp_path: Path) -> Callable[..., Rig]:
    """Build a federation of three without probes. Averaging methods get three equal encoders and may have weights."""

    def build(*overrides: str) -> Rig:
        averages = "method=fedbyol" in overrides
        overrides = (f"rad.source='{images / 'rad'}'", "evaluation.probes=[]", *overrides)
        rig = Rig(tmp_path, *overrides, encoders=ENCODERS[:1] * 3 if averages else ENCODERS)
        for number, path in enumerate(rig.paths):
            text = path.read_text().replace('"images"', f'"{images / f"node-{number}" / "images"}"')
            path.write_text(text + f"[limits]\nweights_may_leave = {str(averages).lower()}\n")
        return rig

    return build


def another(rig: Rig, name: str) -> Path:
    """The settings of one more node."""
    path = rig.root / name / "node.toml"
    path.parent.mkdir()
    path.write_text(rig.paths[0].read_text().replace("node-0", name, 1))
    return path


def gathered(rig: Rig) -> Roster:
    """The roster of a server after all nodes have introduced themselves."""
    roster = Server(rig.grid, rig.folder, rig.config, rig.listen).roster
    roster.gather(None)
    return roster


# --- who takes a seat ---


def test_a_node_with_a_new_name_in_each_round_has_one_contribution(build: Callable[..., Rig]) -> None:
    """With a new name each round, one of three nodes had most of the mean after a few rounds."""
    rig = build("clients.newcomers=9")
    names, path = iter(["first", "second", "third"]), rig.grid.nodes[101]
    rig.grid.tamper[101] = changed("query", lambda fields, arrays: ({**fields, "name": next(names)}, arrays))
    roster = gathered(rig)
    for _ in range(2):
        rig.grid.nodes.pop(101)
        roster.hello()
        rig.grid.nodes[101] = path
        roster.hello()
    assert sorted(roster.ids) == ["node-0", "node-2"]
    assert "node 101 has the name 'second', but it was 'first'. A node keeps its name." in warnings(rig)


def test_the_name_of_an_absent_node_cannot_be_taken(build: Callable[..., Rig]) -> None:
    rig = build("clients.newcomers=9")
    roster = gathered(rig)
    rig.grid.nodes[900] = rig.grid.nodes.pop(101)
    roster.hello()
    assert sorted(roster.ids) == ["node-0", "node-2"]
    assert "node 900 has the name 'node-1', which belongs to node 101" in warnings(rig)


def test_newcomers_are_refused_unless_the_config_allows_them(build: Callable[..., Rig]) -> None:
    rig = build()
    roster = gathered(rig)
    rig.grid.nodes[777] = another(rig, "late")
    roster.hello()
    assert sorted(roster.ids) == ["node-0", "node-1", "node-2"]
    assert "node 777 ('late') cannot join: all 3 seats are taken" in warnings(rig)


def test_a_stranger_does_not_keep_a_run_from_starting(build: Callable[..., Rig]) -> None:
    rig = build("clients.seats=[{name = 'node-0', node = 100}, {name = 'node-2'}]", "clients.count=2")
    rig.grid.nodes = {node: rig.grid.nodes[node] for node in (101, 100)}
    waiting = rig.grid.get_node_ids
    late = iter([None, rig.paths[2]])

    def get_node_ids() -> Iterable[int]:
        path = next(late, None)
        if path:
            rig.grid.nodes[102] = path
        return waiting()

    rig.grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    assert sorted(gathered(rig).ids) == ["node-0", "node-2"]
    assert "node 101 has the name 'node-1', which is not in clients.seats" in warnings(rig)
    assert all("node = 100" not in str(fields_of(message.content)["config"]) for message in rig.grid.sent)


@pytest.mark.parametrize("new_database", [False, True])
def test_a_restarted_server_knows_whose_name_it_is(build: Callable[..., Rig], new_database: bool) -> None:
    """Without the SuperLink's database every node gets a new id; `deploy local` starts with a new one, too."""
    rig = build("rounds=1", "engine.join_timeout=1", "clients.newcomers=9")
    rig.at["round", 0] = stop
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    assert about_state(rig)["seats"] == {"node-0": 100, "node-1": 101, "node-2": 102}
    if new_database:
        rig.grid.nodes = {node + 800: path for node, path in rig.grid.nodes.items()}
    else:
        rig.grid.nodes[901] = rig.grid.nodes.pop(101)
    rig.run()
    refused = "node 901 has the name 'node-1', which belongs to node 101" in warnings(rig)
    assert refused != new_database
    assert about_state(rig)["seats"]["node-1"] == (901 if new_database else 101)


def stop() -> None:
    raise KeyboardInterrupt


def test_a_registered_id_decides_who_has_a_name() -> None:
    seats = Seats(ClientsConfig(count=2, seats=(SeatConfig(name="a", node=7), SeatConfig(name="b")), rejoin="name"))
    with pytest.raises(ProtocolError, match="node 8 has the name 'a', which belongs to node 7"):
        seats.take("a", 8)
    seats.take("a", 7)
    seats.take("b", 8)
    seats.take("b", 9)  # without keys, a node gets a new id each time it connects


# --- a contribution leaves with its seat ---


@pytest.mark.parametrize(
    "overrides",
    [[], ["alignment.rank=8"], ["alignment.form=sketch"], ["alignment.normalize=false", "alignment.rank=8"]],
    ids=["factors", "sums", "sketches", "not normalised"],
)
def test_a_forgotten_contribution_leaves_the_mean(overrides: list[str]) -> None:
    """The mean without it is that of a server that never had it."""
    method = HeteroSSFL(tiny("rad.size=24", *overrides))
    rng = torch.Generator().manual_seed(0)
    factors = {name: torch.randn(24, 6, generator=rng, dtype=torch.float64) for name in "abc"}
    updates = {
        name: Update(10, packed(a / (a.T @ a).norm().sqrt(), method.config.alignment, method.config.seed), {})
        for name, a in factors.items()
    }
    state = method.aggregate(ServerState(-1, ("a", "b", "c")), updates)
    without = method.forget(state, ["b"])
    never = method.aggregate(ServerState(-1, ("a", "b", "c")), {name: updates[name] for name in "ac"})
    assert set(without.clients) == {"a", "c"}
    found, expected = (s.shared["factor"].double() for s in (without, never))
    assert torch.allclose(found @ found.T, expected @ expected.T, atol=1e-5)
    assert set(method.forget(without, ["a", "c"]).clients) == {"a", "c"}  # the last ones stay


def test_the_contribution_of_a_node_that_stays_away_leaves(build: Callable[..., Rig]) -> None:
    rig = build("rounds=3", "clients.absent_rounds=2", "clients.per_round=1")
    rig.at["round", 0] = lambda: rig.grid.nodes.pop(101)
    kept = tensors(rig.run())
    assert "client/node-1/factor" not in kept
    assert "client/node-0/factor" in kept
    assert "node-1 is absent for 2 rounds: its contribution leaves" in warnings(rig)


# --- claimed sizes ---


def test_a_claim_counts_up_to_a_multiple_of_the_median_or_to_what_is_registered() -> None:
    clients = ClientsConfig(seats=(SeatConfig(name="big", images=5_000), SeatConfig(name="other")))
    claims = {"big": 9_000, "liar": 10**9, "a": 100, "b": 300}
    assert capped_sizes(claims, {"c": 200}, clients) == {"big": 5_000, "liar": 600, "a": 100, "b": 300}
    assert capped_sizes({"liar": 10**9, "a": 1}, {}, clients) == {"liar": 2, "a": 1}
    assert capped_sizes({"liar": 10**9}, {"a": 10, "b": 20}, clients) == {"liar": 40}  # the median of three is 20


CLAIM: Change = lambda fields, arrays: ({**fields, "examples": 10**9}, arrays)  # noqa: E731


def test_a_claim_of_a_billion_images_does_not_outweigh_the_others(build: Callable[..., Rig]) -> None:
    rig = build("clients.weights=size", "rounds=1")
    rig.grid.tamper[101] = changed("train", CLAIM)
    rig.run()
    assert about_state(rig)["examples"] == {"node-0": 48, "node-1": 96, "node-2": 48}
    assert "node-1 claims 1,000,000,000 images, which count as 96" in warnings(rig)


def test_a_claim_of_a_billion_images_does_not_replace_the_global_model(build: Callable[..., Rig]) -> None:
    rig, sent = build("method=fedbyol", "ssl.kind=byol", "rounds=1"), dict[int, dict[str, torch.Tensor]]()

    def keep(node: int, claim: bool) -> None:
        def remember(fields: dict[str, Any], arrays: dict[str, torch.Tensor]) -> Any:
            sent[node] = arrays
            return CLAIM(fields, arrays) if claim else (fields, arrays)

        rig.grid.tamper[node] = changed("train", remember)

    for node in (100, 101, 102):
        keep(node, claim=node == 101)
    rig.run()
    for name, found in tensors(rig.folder).items():
        key = name.removeprefix("shared/")
        if found.is_floating_point():
            honest = sent[100][key].double() / 4 + sent[101][key].double() / 2 + sent[102][key].double() / 4
            assert torch.allclose(found.double(), honest, atol=1e-6)


# --- the opening ---


def refuse(question: Message, reply: Message) -> Message:
    return Message(Error(0, "no"), reply_to=question)


NONSENSE: dict[str, Callable[[Message, Message], Message]] = {
    "other shapes": changed("train", lambda f, arrays: (f, {key: a.flatten()[:1] for key, a in arrays.items()})),
    "huge": changed("train", lambda f, arrays: (f, {key: a * 10**9 for key, a in arrays.items()})),
    "none": refuse,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_a_nonsense_opening_does_not_block_a_run(
    build: Callable[..., Rig], nonsense: Callable[[Message, Message], Message]
) -> None:
    rig = build("method=fedbyol", "ssl.kind=byol", "rounds=1", "engine.min_replies=3")
    rig.grid.tamper[100] = lambda question, reply: (
        nonsense(question, reply)
        if (question.metadata.message_type, fields_of(question.content)["round"]) == ("train", 0)
        else reply
    )
    assert rig.run().finished
    assert [number for number, _ in rig.excluded() if number > 0] == []


def test_the_first_typical_client_gives_the_first_weights() -> None:
    updates = {name: Update(1, {"w": torch.ones(4) * scale}) for name, scale in (("a", 1e6), ("b", 1.0), ("c", 2.0))}
    assert typical_opening(updates) == "b"
    assert typical_opening({"odd": Update(1, {"w": torch.ones(5)}), **updates}) == "b"
    assert typical_opening({"zero": Update(1, {"w": torch.zeros(4)}), **updates}) == "b"
    assert typical_opening({"a": updates["a"]}) == "a"


# --- what an evaluation reveals ---


@pytest.mark.parametrize("weights", ["zero", "own"])
def test_an_evaluation_does_not_reveal_how_many_images_a_class_has(tmp_path: Path, weights: str) -> None:
    """With weights of zero, every probe predicts one class, whose share of the images was the accuracy."""
    found = []
    for third in (3, 12):  # number of images of one class, out of 39 and 48
        owner = Owner(tmp_path / f"{weights}-{third}", "weights_may_leave = true", labels=shares(third))
        config = tiny(
            "method=fedbyol",
            "ssl.kind=byol",
            "optim.lr=1e-30",
            "evaluation.probes=['linear', 'knn', 'knn-flat']",
            "evaluation.epochs=50",
        )
        start = arrays_of(owner.ask("train", config, RAD, round=0).content)
        sent = {key: torch.zeros_like(value) for key, value in start.items()}
        if weights == "zero":
            reply = owner.ask("evaluate", config, arrays=sent)
        else:  # the node trains from the server's weights, at a rate that changes nothing
            assert not owner.ask("train", config, arrays=sent).has_error()
            reply = owner.ask("evaluate", config)
        found.append(metrics_of(reply.content))
    assert found[0] == found[1]
    assert set(found[0].values()) == {33.0}


def shares(of_one_class: int) -> list[int]:
    return [k % 2 for k in range(36)] + [2] * of_one_class


def test_figures_are_means_over_classes_in_whole_percent() -> None:
    truth = torch.tensor([0] * 90 + [1] * 10)
    predicted = torch.cat([truth[:60], 1 - truth[60:90], truth[90:97], 1 - truth[97:]])
    assert accuracy(predicted, truth) == pytest.approx(67.0)
    assert balanced_accuracy(predicted, truth) == 68.0  # (2/3 + 7/10) / 2 = 68.3 %
    assert balanced_accuracy(torch.zeros_like(truth), truth) == 50.0


def test_weights_of_a_server_are_evaluated_only_with_methods_that_average(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    reason = owner.refusal("evaluate", tiny(), RAD, arrays={"encoder.x": torch.zeros(1)})
    assert "a global model, but method 'hetero-ssfl' has none" in reason
    owner = Owner(tmp_path / "averages", "weights_may_leave = true")
    config = tiny("method=fedbyol", "ssl.kind=byol")
    bad = {"encoder.x": torch.full((1,), torch.nan)}
    assert "not finite" in owner.refusal("evaluate", config, RAD, arrays=bad)
    assert "does not fit" in owner.refusal("evaluate", config, RAD, arrays={"encoder.x": torch.zeros(1)})


def test_a_node_evaluates_only_the_images_that_its_owner_allows(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 'evaluation = ["validation"]')
    assert not owner.ask("train", tiny(), RAD).has_error()
    reply = owner.ask("evaluate", tiny(), split="test", export=True)
    assert not reply.has_error()
    assert metrics_of(reply.content) == {}
    assert any("model/encoder.safetensors" in file for file in owner.files())  # it still gets its model
