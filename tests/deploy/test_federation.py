"""A real deployment on loopback: a SuperLink behind its proxy, two SuperNodes, and a server that dies."""

from pathlib import Path

import pytest
import torch

from helpers.federations import ENCODERS, write_federation
from helpers.rehearse import deployed, to_the_end
from helpers.sabotage import Saboteur, kill_server
from helpers.saved import lines, server_tensors
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy import nginx
from hetero_ssfl.deploy.local import Rehearsal
from hetero_ssfl.federation import start

SHORT = ("rounds=1", "evaluation.untrained=false")


@pytest.mark.timeout(600)  # Flower notices the dead server after a minute
def test_two_supernodes_and_a_server_killed_in_its_round_give_the_same_numbers_as_in_process(tmp_path: Path) -> None:
    """No cheaper test shows that Flower's programs, TLS, the proxy and a restarted server change no bit."""
    root = tmp_path / "there"
    with Rehearsal(deployed(root, *SHORT, encoders=ENCODERS[:2])) as rehearsal:
        assert rehearsal.proxied == (nginx.program() is not None)
        saboteur = Saboteur(rehearsal.run_dir, {1: lambda: kill_server(root)})
        saboteur.start()
        there = to_the_end(rehearsal)
    assert saboteur.done == [1]
    federation, paths = write_federation(tmp_path / "here", ENCODERS[:2])
    here = start(load_config(str(federation), SHORT), tmp_path / "run", lambda _: None, paths)
    assert there.read_json("results.json") == here.read_json("results.json")
    states = [server_tensors(folder.path) for folder in (here, there)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    events = lines(there)
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1]
    assert not [e for e in events if "excluded" in e]
