"""Secure sums on Flower's own engines: a real SuperLink with four SuperNodes, and Ray."""

import json
from pathlib import Path

import pytest
import torch

from helpers.rehearse import deployed, to_the_end
from helpers.saved import lines, server_tensors
from helpers.whole_runs import assert_same, everything, run
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.local import Rehearsal
from hetero_ssfl.federation import start
from hetero_ssfl.objectives import factor_cka
from hetero_ssfl.runs import RunFolder

pytestmark = pytest.mark.soak

FOUR = ("resnet8(width=4)", "mobilenet(width=8)", "vit(width=16, depth=1, heads=2)", "resnet10(width=4)")
SKETCHES = ("rounds=1", "alignment.form=sketch", "evaluation.untrained=false")


def factor(folder: RunFolder) -> torch.Tensor:
    return server_tensors(folder.path)["shared/factor"].double()


@pytest.mark.timeout(900)
def test_four_supernodes_with_registered_keys_give_the_plain_consensus(tmp_path: Path) -> None:
    it = deployed(tmp_path / "there", *SKETCHES, "privacy.secure=true", encoders=FOUR)
    nodes = [it.node(name) / "node.toml" for name in it.nodes]
    for settings in nodes:
        settings.write_text('key = "node.key"\npeers = "peers"\n' + settings.read_text())
    with Rehearsal(it) as rehearsal:
        there = to_the_end(rehearsal)
    events = lines(there)
    assert [e["replies"] for e in events if e["event"] == "round"] == [4, 4]
    assert not [e for e in events if "excluded" in e]
    assert not (there.path / "shares").exists()
    config = load_config(str(it.server / "federation.toml"))
    plain = config.model_copy(update={"privacy": config.privacy.model_copy(update={"secure": False})})
    for settings in nodes:  # the same images and encoders, with a new state
        settings.write_text('home = "again"\n' + settings.read_text())
    here = start(plain, tmp_path / "run", lambda _: None, nodes)
    assert factor_cka(factor(here), factor(there)) >= 0.9999
    accuracies = [folder.read_json("results.json")["mean"] for folder in (here, there)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=10), json.dumps(accuracies)


def test_ray_gives_the_same_bits_as_worker_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    secure = ("privacy.secure=true", "alignment.form=sketch", "rounds=2", "clients.count=3")
    ours, flowers = (run(tmp_path / kind, f"engine.kind={kind}", *secure) for kind in ("in-process", "simulation"))
    a, b = everything(ours), everything(flowers)
    for event in (*a["events"], *b["events"]):
        event.pop("bytes_up", None)  # node and run ids are longer on Ray
    assert_same(a, b)
