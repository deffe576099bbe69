"""Real machines' worth of processes on loopback: SuperLink, SuperNodes, TLS and node keys."""

import shutil
from pathlib import Path

import torch
from nodes import write_federation
from rehearse import deployed, to_the_end
from saved import server_tensors

from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.local import Rehearsal
from hetero_ssfl.federation import start


def test_three_supernodes_with_tls_and_keys_give_the_same_numbers_as_in_process(tmp_path: Path) -> None:
    fewer_messages = "evaluation.untrained=false"
    it = deployed(tmp_path, fewer_messages)
    with Rehearsal(it) as rehearsal:
        there = to_the_end(rehearsal)
    federation, paths = write_federation(tmp_path / "here")
    config = load_config(str(federation), [f"rad.source='{tmp_path / 'source' / 'rad'}'", fewer_messages])
    here = start(config, tmp_path / "run", lambda _: None, paths)
    assert there.read_json("results.json") == here.read_json("results.json")
    states = [server_tensors(folder.path) for folder in (here, there)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    events = there.events()
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1, 2]
    assert not [e for e in events if "excluded" in e]


def test_a_message_of_100_mb_goes_through_both_ways(tmp_path: Path) -> None:
    """Averaging the weights of a wide transformer, 25 million in single precision; the repository itself is the app."""
    few = ["method=fedsimsiam", "ssl.kind=simsiam", "rounds=1", "evaluation.untrained=false", "evaluation.probes=[]"]
    it = deployed(tmp_path, *few, encoders=("vit(width=1800, depth=1, heads=2)",), images=8)
    settings = it.node("node-0") / "node.toml"
    settings.write_text(settings.read_text() + "[limits]\nweights_may_leave = true\n")
    shutil.rmtree(it.server / "app")
    (it.server / "app").symlink_to(Path(__file__).parents[2])
    with Rehearsal(it) as rehearsal:
        folder = to_the_end(rehearsal)
    (event,) = [e for e in folder.events() if e["event"] == "client" and e["round"] == 1]
    assert event["bytes_up"] > 100 * 10**6
    assert event["bytes_down"] > 100 * 10**6
