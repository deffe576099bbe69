"""Noise without secure sums, with the real server loop and ClientApp: what leaves a node, and what it has spent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from helpers.rig import Rig
from helpers.saved import lines
from hetero_ssfl.config import parse_config
from hetero_ssfl.errors import ConfigError, FaultError, LostStateError
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.federation.start import continue_with
from hetero_ssfl.federation.wire import arrays_of, fields_of
from hetero_ssfl.privacy.accountant import epsilon_of, noise_multiplier
from hetero_ssfl.report.page import render
from hetero_ssfl.use.card import model_card
from hetero_ssfl.use.encoders import read_rad_features
from hetero_ssfl.use.models import ModelFolder

NOISY = ("privacy.epsilon=8", "privacy.clip=0.5", "alignment.form=sketch", "rounds=2")
COST = noise_multiplier(8.0, 1e-5, 3) ** -2
SPENT = [epsilon_of(releases * COST, 1e-5) for releases in (1, 2, 3)]


class Noisy(Rig):
    """Three nodes. The owner of node-1 has a budget for two of three contributions."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, *NOISY, encoders=("resnet8(width=4)",) * 3)
        self.heard: dict[str, list[Message]] = {}
        self.grid.tamper = dict.fromkeys(self.grid.nodes, self.hear)
        self.paths[1].write_text(self.paths[1].read_text() + f"[limits]\nepsilon = {(SPENT[1] + SPENT[2]) / 2}\n")
        self.run()

    def hear(self, asked: Message, reply: Message) -> Message:
        self.heard.setdefault(asked.metadata.message_type, []).append(reply)
        return reply

    def node_file(self, node: int, name: str) -> dict[str, Any]:
        (path,) = (self.root / f"node-{node}").rglob(name)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Noisy:
    return Noisy(tmp_path_factory.mktemp("noisy"))


def test_only_a_sketch_with_noise_leaves_a_node(noisy: Noisy) -> None:
    """Beside it there are constants. The node keeps its figures."""
    trained = [reply for reply in noisy.heard["train"] if not reply.has_error()]
    assert len(trained) == 8, "three in the opening and in round 1, two in round 2"
    for reply in trained:
        arrays, fields = arrays_of(reply.content), fields_of(reply.content)
        assert set(arrays) == {"sketch", "trace"}
        assert float(arrays["sketch"].norm()) > 5 * 24 * 0.5, "noise of many times the largest norm"
        assert (arrays["trace"].tolist(), fields["examples"]) == ([1.0], 1)
        assert set(fields) == {"federation", "round", "rad", "examples"}
        assert not reply.content.metric_records.get("metrics")
    assert {fields_of(reply.content)["examples"] for reply in noisy.heard["query"]} == {0}
    assert noisy.node_file(0, "figures.json")["1"]["loss_ssl"] != 0


def test_events_say_what_was_spent_and_have_no_figures_of_clients(noisy: Noisy) -> None:
    events = lines(noisy.folder)
    assert [event["epsilon"] for event in events if event["event"] == "round"] == pytest.approx(SPENT)
    for event in events:
        if event["event"] == "client" and "excluded" not in event:
            assert set(event) == {"event", "round", "client", "bytes_down", "bytes_up"}
    told = [event["text"] for event in noisy.events if event["event"] == "warning"]
    assert any("with 3 clients and no secure sums the noise in the mean kernel is" in text for text in told)


def test_a_node_ends_at_its_budget_and_reports_no_accuracy(noisy: Noisy) -> None:
    ((number, name),) = noisy.excluded()
    assert (number, name) == (2, "node-1")
    (reason,) = [event["excluded"] for event in lines(noisy.folder) if "excluded" in event]
    assert f"this round would raise what it has spent to {SPENT[2]:.3g}" in reason
    assert noisy.node_file(1, "privacy-node-1.json")["releases"] == 2
    assert noisy.node_file(0, "privacy-node-0.json")["squared_mu"] == pytest.approx(3 * COST)
    assert noisy.node_file(1, "figures.json").keys() - {"sha256"} == {"0", "1"}, "it did not train in round 2"
    scores = json.loads((noisy.folder.path / "results.json").read_text())["clients"]
    assert (bool(scores["node-0"]), scores["node-1"]) == (True, {})


def test_a_server_cannot_stretch_a_budget_with_its_own_delta(noisy: Noisy) -> None:
    """At delta = 0.5 the same noise would seem to cost nothing."""
    (asked,) = [m for m in noisy.grid.sent if m.metadata.message_type == "train"][-1:]
    config = str(fields_of(asked.content)["config"])
    assert "delta = 1e-05" in config
    asked.metadata.__dict__["_dst_node_id"] = 101
    asked.content.config_records["settings"]["config"] = config.replace("delta = 1e-05", "delta = 0.5")
    reply = noisy.grid.answer(asked)
    assert reply is not None
    assert "has a privacy budget of epsilon" in str(reply.error.reason)


def test_the_card_of_a_model_and_the_report_say_what_was_spent(noisy: Noisy) -> None:
    for node, releases in ((0, 3), (1, 2)):
        (place,) = (noisy.root / f"node-{node}").rglob("card.json")
        card = json.loads(place.read_text())
        assert card["privacy"]["epsilon"] == pytest.approx(SPENT[releases - 1])
        text = model_card(ModelFolder.read(place.parent), None, {})
        assert (
            f"epsilon {SPENT[releases - 1]:.3g} at delta 1e-05, for the whole of its {releases} contributions" in text
        )
        assert "norm at most 0.5, each sent by itself" in text
        assert "It does not cover these weights" in text
    page = render([noisy.folder.path], read_rad_features)
    row = page.partition("Spent so far")[2].partition("</table>")[0]
    for cell in (f"{SPENT[2]:.3g}", "1e-05", "0.5", "each contribution"):
        assert f">{cell}</td>" in row


def test_rounds_with_noise_are_neither_repeated_nor_added(noisy: Noisy) -> None:
    """Both would cost more than the budget that the run began with."""
    server = Server(noisy.grid, noisy.folder, noisy.config, noisy.listen)
    with pytest.raises(FaultError, match="cannot be repeated"):
        server.step_back(LostStateError("the state is damaged."))
    with pytest.raises(ConfigError, match=r"'rounds' cannot change .* privacy\.epsilon = 8 was chosen for 2"):
        continue_with(noisy.folder, {"rounds": 5})


def test_a_damaged_count_is_not_taken_for_an_empty_one(noisy: Noisy) -> None:
    (path,) = (noisy.root / "node-2").rglob("privacy-node-2.json")
    whole = path.read_text()
    (asked,) = [m for m in noisy.grid.sent if m.metadata.message_type == "train"][:1]
    asked.metadata.__dict__["_dst_node_id"] = 102
    path.write_text(whole.replace('"releases": 3', '"releases": 0'))
    try:
        reply = noisy.grid.answer(asked)
    finally:
        path.write_text(whole)
    assert reply is not None
    assert reply.has_error()


def test_a_run_without_noise_says_nothing_about_a_budget(tmp_path: Path) -> None:
    plain = Rig(tmp_path, "rounds=1", encoders=("resnet8(width=4)",) * 2)
    plain.run()
    assert not list(plain.root.rglob("privacy-*.json"))
    assert "Privacy budget" not in render([plain.folder.path], read_rad_features)
    (place,) = (plain.root / "node-0").rglob("card.json")
    assert "privacy" not in json.loads(place.read_text())
    assert "privacy of what was sent" not in model_card(ModelFolder.read(place.parent), None, {})
    assert parse_config("").privacy.epsilon is None
    assert torch.isfinite(plain.folder.server_state()[0]["factor"]).all()  # type: ignore[index]
