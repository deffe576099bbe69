"""A real deployment on loopback: one SuperLink with TLS and node keys, and several runs on it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from helpers.federations import ENCODERS, write_federation, write_node
from helpers.rehearse import deployed
from helpers.saved import lines, server_tensors
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.local import Rehearsal
from hetero_ssfl.deploy.watch import RunWatch
from hetero_ssfl.federation import start
from hetero_ssfl.progress import RunView
from hetero_ssfl.runs import RunFolder

SHORT = ("rounds=1", "evaluation.untrained=false")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """A SuperLink and two SuperNodes, shared because starting them takes most of the time."""
    with Rehearsal(deployed(tmp_path_factory.mktemp("federation"), *SHORT, encoders=ENCODERS[:2])) as rehearsal:
        rehearsal.start_all()
        yield rehearsal


def run(rehearsal: Rehearsal) -> RunFolder:
    watch = RunWatch(rehearsal.run_dir, RunView(Console(quiet=True), "test"))
    reason = rehearsal.run_once(watch)
    assert watch.finished, reason
    return RunFolder.open(rehearsal.run_dir)


def test_two_supernodes_with_tls_and_keys_give_the_same_numbers_as_in_process(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    there = run(rehearsal)
    federation, paths = write_federation(tmp_path / "here", ENCODERS[:2])
    here = start(load_config(str(federation), SHORT), tmp_path / "run", lambda _: None, paths)
    assert there.read_json("results.json") == here.read_json("results.json")
    states = [server_tensors(folder.path) for folder in (here, there)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    events = lines(there)
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1]
    assert not [e for e in events if "excluded" in e]


def test_a_message_of_100_mb_is_carried_in_both_directions(rehearsal: Rehearsal, tmp_path: Path) -> None:
    """Average the weights of a wide transformer (25 million, float32), with the repository itself as the app."""
    it = rehearsal.deployment
    for name in it.nodes[1:]:
        rehearsal.processes.pop(name).stop()
    wide = "vit(width=1800, depth=1, heads=2)"
    settings = write_node(it.node("node-0"), "node-0", wide, more="[limits]\nweights_may_leave = true\n")
    settings.write_text(settings.read_text() + "limit = 8\n")
    federation, _ = write_federation(tmp_path, ENCODERS[:1], images=8)
    averaging = ["method=fedsimsiam", "ssl.kind=simsiam", "evaluation.probes=[]", *SHORT]
    (it.server / "federation.toml").write_text(load_config(str(federation), averaging).to_toml())
    shutil.rmtree(it.server / "app")
    (it.server / "app").symlink_to(Path(__file__).parents[2])
    rehearsal.run_dir = tmp_path / "run"
    folder = run(rehearsal)
    (event,) = [e for e in lines(folder) if e["event"] == "client" and e["round"] == 1]
    assert event["bytes_up"] > 100 * 10**6
    assert event["bytes_down"] > 100 * 10**6
