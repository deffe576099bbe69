"""Participants with their own disk, model and images; the server's loop when nodes join, leave, change and fail."""

import gc
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message

from helpers.federations import ENCODERS, write_federation, write_images, write_node
from helpers.rig import Rig, tensors
from helpers.saved import lines
from hetero_ssfl.config import load_config
from hetero_ssfl.data import digest
from hetero_ssfl.errors import ConfigError, ProtocolError, RunError
from hetero_ssfl.federation.participants import NodeSite
from hetero_ssfl.federation.participants.node import check_instruction, open_node
from hetero_ssfl.federation.participants.node_rad import check_rad, find_rad, save_rad
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.federation.start import start
from hetero_ssfl.federation.wire import fields_of, rad_of
from hetero_ssfl.learning.learner import Learner
from hetero_ssfl.report.status import read_status
from hetero_ssfl.report.tables import Result, results_table
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.use.encoders import reevaluate


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


class Crash(BaseException):
    """Stands for the end of the server's process."""


def crash() -> None:
    raise Crash


# --- a node's own files ---


def test_worker_processes_are_bit_identical_to_a_grid_in_one_thread(rig: Rig, tmp_path: Path) -> None:
    here = rig.run()
    federation, paths = write_federation(tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "rad")  # the same RAD, from the same place
    config = load_config(str(federation), [f"rad.source='{rig.root / 'rad'}'"])
    there = start(config, tmp_path / "again" / "run", lambda _: None, paths)
    assert here.read_json("results.json") == there.read_json("results.json")
    assert all(torch.equal(value, tensors(there)[key]) for key, value in tensors(here).items())
    shown = results_table(Result.read(there))
    floors = len(here.read_json("results.json")["floors"])
    assert floors > 0
    assert list(shown.columns[1].cells)[floors : floors + 3] == list(ENCODERS)
    assert len(list(reevaluate(there, config, "test"))) == 3
    with pytest.raises(RunError, match="on other machines"):
        list(reevaluate(here, config, "test"))


def test_an_evicted_client_is_freed_at_once(rig: Rig) -> None:
    """Freed without the garbage collector, which ignores the size of tensors and would run too late."""
    gc.collect()
    gc.disable()
    try:
        rig.run()
        assert sum(type(thing) is Learner for thing in gc.get_objects()) <= 1  # the last one that trained
    finally:
        gc.enable()


def test_a_missing_settings_file_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    federation, paths = write_federation(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read node settings.*none\.toml"):
        start(load_config(str(federation)), tmp_path / "run", lambda _: None, [*paths, tmp_path / "none.toml"])
    assert not (tmp_path / "run").exists()


def test_a_node_keeps_its_networks_and_model_on_its_own_disk_and_nothing_in_the_run_folder(rig: Rig) -> None:
    folder = rig.run()
    assert not (folder.path / "clients").exists()
    assert not (folder.path / "models").exists()
    state = rig.root / "node-1" / "state" / "federations" / folder.read_json("facts.json")["federation"]
    assert [f.name for f in sorted((state / "mobilenet-width-8--depth-1").glob("round-*"))] == [
        "round-000001.safetensors",
        "round-000002.safetensors",
    ]
    assert load_tensors(state / "model" / "encoder.safetensors")[1]["encoder"] == ENCODERS[1]


def test_the_rad_is_sent_once_to_each_node(rig: Rig) -> None:
    rig.run()
    with_rad = [m for m in rig.grid.sent if rad_of(m.content) is not None]
    assert sorted(m.metadata.dst_node_id for m in with_rad) == [100, 101, 102]
    assert {fields_of(m.content)["round"] for m in with_rad} == {0}


def test_only_a_node_that_lost_the_rad_gets_it_again(rig: Rig) -> None:
    rig.at["begin", 2] = lambda: shutil.rmtree(rig.root / "node-1" / "state" / "rad")
    rig.run()
    again = [m for m in rig.sent("train") if rad_of(m.content) is not None and fields_of(m.content)["round"] == 2]
    assert [m.metadata.dst_node_id for m in again] == [101]
    assert rig.excluded() == []


def test_a_corrupt_rad_on_disk_is_detected_and_sent_again(rig: Rig) -> None:
    def spoil() -> None:
        (file,) = (rig.root / "node-2" / "state" / "rad").iterdir()
        data = bytearray(file.read_bytes())
        data[-1] ^= 255
        file.write_bytes(data)

    rig.at["begin", 1] = spoil
    rig.run()
    assert rig.excluded() == []
    assert [m.metadata.dst_node_id for m in rig.sent("train") if rad_of(m.content) is not None][-1] == 102


def test_a_rad_that_does_not_match_its_digest_is_refused(tmp_path: Path) -> None:
    node = read_node(write_node(tmp_path, "a", ENCODERS[0]))
    rad = torch.zeros(8, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="does not match its digest"):
        check_rad(node, digest(rad + 1), rad)
    with pytest.raises(ProtocolError, match="expected uint8 images"):
        check_rad(node, digest(rad), rad.float())
    assert find_rad(node, digest(rad)) is None
    save_rad(node, digest(rad), rad)
    kept = find_rad(node, digest(rad))
    assert kept is not None
    assert torch.equal(kept, rad)


def test_old_rads_are_deleted(tmp_path: Path) -> None:
    node = read_node(write_node(tmp_path, "a", ENCODERS[0]))
    for shade in range(6):
        rad = torch.full((8, 1, 4, 4), shade, dtype=torch.uint8)
        save_rad(node, digest(rad), rad)
    assert len(list((tmp_path / "state" / "rad").iterdir())) == 3
    assert find_rad(node, digest(rad)) is not None


# --- joining, leaving, changing ---


def test_a_node_with_a_new_architecture_can_join_during_a_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "clients.newcomers=1")
    home = rig.root / "newcomer"
    shutil.copytree(rig.root / "node-0" / "images", home / "images")
    path = write_node(home, "newcomer", "resnet10(width=8)")
    rig.at["begin", 1] = lambda: rig.grid.nodes.update({777: path})
    folder = rig.run()
    results = folder.read_json("results.json")
    assert set(results["clients"]) == {"node-0", "node-1", "node-2", "newcomer"}
    state = load_tensors(folder.path / "server.safetensors")
    assert state[1]["roster"] == ["node-0", "node-1", "node-2", "newcomer"]
    assert "client/newcomer/factor" in tensors(folder)
    rounds = [e["round"] for e in lines(folder) if e.get("client") == "newcomer"]
    assert rounds == [2]


def test_the_run_continues_with_the_last_kernel_of_a_node_that_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "rounds=3")
    rig.at["round", 1] = lambda: rig.grid.nodes.pop(101)
    folder = rig.run()
    results = folder.read_json("results.json")
    assert results["absent"] == ["node-1"]
    assert set(results["clients"]) == {"node-0", "node-2"}
    assert [e.get("away") for e in lines(folder) if e["event"] == "round"] == [None, None, ["node-1"], ["node-1"]]
    assert "client/node-1/factor" in tensors(folder)
    assert read_status(folder)["nodes"]["node-1"]["state"] == "away"


def test_a_node_that_dies_in_a_round_is_excluded_and_can_reconnect_with_another_id(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "rounds=3", "clients.rejoin=name")
    path = rig.grid.nodes[101]
    rig.at["begin", 1] = lambda: rig.grid.nodes.pop(101)
    rig.at["begin", 2] = lambda: rig.grid.nodes.update({555: path})
    folder = rig.run()
    assert rig.excluded() == [(1, "node-1")]
    assert [e["round"] for e in lines(folder) if e.get("client") == "node-1" and "excluded" not in e] == [0, 3]
    assert set(folder.read_json("results.json")["clients"]) == {"node-0", "node-1", "node-2"}


def test_a_node_that_replaces_its_encoder_restarts_from_new_weights(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "rounds=3")

    def swap() -> None:
        write_node(rig.root / "node-0", "node-0", "resnet10(width=8)")

    rig.at["round", 1] = swap
    folder = rig.run()
    assert rig.excluded() == []
    (state,) = (rig.root / "node-0" / "state" / "federations").iterdir()
    assert sorted(p.name for p in state.iterdir()) == ["model", "resnet10-width-8", "resnet8-width-4"]
    assert load_tensors(state / "model" / "encoder.safetensors")[1]["encoder"] == "resnet10(width=8)"
    assert folder.finished


def test_a_second_node_with_the_same_name_is_refused(rig: Rig) -> None:
    rig.at["begin", 1] = lambda: rig.grid.nodes.update({900: rig.grid.nodes[100]})
    folder = rig.run()
    assert any("a second node has the name 'node-0'" in e.get("text", "") for e in rig.events)
    assert len(folder.read_json("results.json")["clients"]) == 3


@pytest.mark.parametrize(
    ("timeouts", "named"),
    [((2, 0.2), r"engine\.join_timeout = 0\.2 s"), ((0.5, 60), r"engine\.round_timeout = 0\.5 s")],
)
def test_slow_nodes_are_told_from_nodes_that_are_not_connected(
    tmp_path: Path, timeouts: tuple[float, float], named: str
) -> None:
    rig = Rig(tmp_path, f"engine.round_timeout={timeouts[0]}", f"engine.join_timeout={timeouts[1]}")
    rig.grid.nodes.pop(102)
    rig.grid.tamper |= dict.fromkeys((100, 101), lambda *_: None)
    with pytest.raises(RunError, match=rf"only 0 of 3 .*2 connected nodes .*{named}.*1 nodes are not connected"):
        rig.run()


def test_too_few_nodes_end_the_run_and_the_error_tells_how_to_continue(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "engine.min_replies=2", "engine.round_timeout=1")
    rig.at["round", 1] = rig.grid.nodes.clear
    with pytest.raises(RunError, match=r"only 0 of 2 nodes .*2 nodes are not connected.*run\.sh"):
        rig.run()


def test_a_restarted_server_continues_and_ends_bit_identical(tmp_path: Path) -> None:
    whole, broken = Rig(tmp_path / "a"), Rig(tmp_path / "b")
    broken.config = whole.config
    whole.run()
    broken.at["answered", 2] = crash
    with pytest.raises(Crash):
        broken.run()
    broken.run()
    assert all(torch.equal(v, tensors(broken.folder)[k]) for k, v in tensors(whole.folder).items())
    assert whole.folder.read_json("results.json") == broken.folder.read_json("results.json")


def test_a_resumed_run_continues_without_a_missing_node(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "engine.join_timeout=1")
    rig.at["round", 1] = crash
    with pytest.raises(Crash):
        rig.run()
    rig.grid.nodes.pop(102)
    folder = rig.run()
    assert any("node-2 did not reconnect" in e.get("text", "") for e in rig.events)
    assert folder.read_json("results.json")["absent"] == ["node-2"]


def test_a_resumed_run_does_not_wait_for_a_node_that_cannot_take_part(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "engine.join_timeout=1")
    rig.at["round", 1] = crash
    with pytest.raises(Crash):
        rig.run()
    rig.paths[2].write_text("name = ")
    folder = rig.run()
    assert folder.read_json("results.json")["absent"] == ["node-2"]


def test_nodes_without_labels_are_asked_once_at_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "rounds=1", "evaluation.untrained=true", "evaluation.floors=true")
    for path in rig.paths:
        for image in (path.parent / "images").rglob("*.png"):
            image.rename(path.parent / "images" / f"{image.parent.name}-{image.name}")
        for folder in (path.parent / "images").glob("class-*/"):
            folder.rmdir()
    results = rig.run().read_json("results.json")
    assert [message.metadata.dst_node_id for message in rig.sent("evaluate")] == [100, 101, 102]
    assert (results["mean"], results["untrained"], results["floors"]) == ({}, {}, {})


# --- limits of a node ---


def test_weights_leave_only_if_the_node_allows_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "method=fedbyol", "ssl.kind=byol", encoders=ENCODERS[:1] * 2)
    with pytest.raises(RunError, match=r"node-0 does not send weights.*weights_may_leave"):
        rig.run()
    for path in rig.paths:
        path.write_text(path.read_text() + "[limits]\nweights_may_leave = true\n")
    rig.grid.tamper[100] = lambda question, reply: (
        Message(Error(0, "no"), reply_to=question) if is_global_model(question) else reply
    )
    assert "linear_all" in rig.run().read_json("results.json")["global"]  # from node-1, since node-0 refuses
    assert any("node-0 failed: no (Flower error 0). It is left out" in e.get("text", "") for e in rig.events)


def is_global_model(question: Message) -> bool:
    return question.metadata.message_type == "evaluate" and bool(question.content.array_records["arrays"])


@pytest.mark.parametrize(
    ("overrides", "rows", "words"),
    [(["local_epochs=101"], 10, "local_epochs = 101, its limit is 100"), ([], 200_000, "rad_images = 200000")],
)
def test_a_node_enforces_its_limits(tmp_path: Path, overrides: list[str], rows: int, words: str) -> None:
    node = read_node(write_node(tmp_path, "a", ENCODERS[0]))
    with pytest.raises(ProtocolError, match=words):
        check_instruction(node, load_config("smoke", overrides), rows)


def test_a_server_cannot_choose_a_nodes_files_model_or_images(rig: Rig) -> None:
    config = load_config("smoke", ["data.source=/etc", "clients.models=['os:system']", "engine.device=cuda"])
    participant = open_node(read_node(rig.paths[0]), config, "0" * 32, torch.zeros(4, 1, 8, 8, dtype=torch.uint8))
    assert participant.config.data.source == str(rig.root / "node-0" / "images")
    assert participant.model.encoder == ENCODERS[0]
    assert participant.config.engine.device == "cpu"
    assert participant.states.path.is_relative_to(rig.root / "node-0" / "state")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "a b"\nencoder = "resnet8"', "name = 'a b'"),
        ('name = "a"', "encoder"),
        ('name = "a"\nencoder = "resnet8"\n[limit]\n', "unknown key 'limit', expected 'limits'"),
        ("name = ", "cannot read node settings"),
    ],
)
def test_bad_node_settings_give_a_one_sentence_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_node(path)


def test_a_node_with_missing_images_reports_it_and_the_others_continue(rig: Rig) -> None:
    rig.at["begin", 1] = lambda: shutil.rmtree(rig.root / "node-2" / "images")
    rig.run()
    assert rig.excluded() == [(1, "node-2"), (2, "node-2")]
    assert "data: its images cannot be used" in next(e["excluded"] for e in lines(rig.folder) if "excluded" in e)
    assert rig.folder.read_json("results.json")["absent"] == ["node-2"]


def test_a_server_without_a_rad_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rad\.source is not set"):
        NodeSite().set_up(load_config("smoke", []))


def test_unlabeled_nodes_train_and_are_not_probed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    shutil.rmtree(tmp_path / "node-0" / "images")
    import numpy as np

    write_images(tmp_path / "node-0" / "images", np.arange(30 * 64, dtype=np.uint8).reshape(30, 8, 8), None)
    results = rig.run().read_json("results.json")
    assert results["clients"]["node-0"] == {}
    assert results["clients"]["node-1"]


def test_nobody_is_asked_again_for_accuracies_if_nobody_has_labels(tmp_path: Path) -> None:
    import numpy as np

    rig = Rig(tmp_path, "rounds=3", "evaluation.every=1", "evaluation.floors=true", "evaluation.untrained=true")
    for number in range(3):
        shutil.rmtree(tmp_path / f"node-{number}" / "images")
        pictures = np.random.default_rng(number).integers(0, 255, (30, 8, 8), np.uint8)
        write_images(tmp_path / f"node-{number}" / "images", pictures, None)
    results = rig.run().read_json("results.json")
    assert results["clients"] == {"node-0": {}, "node-1": {}, "node-2": {}}
    assert len(rig.sent("evaluate")) == 2 * 3  # the first validation, and the last test, which exports the models
