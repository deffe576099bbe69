"""Secure sums on Flower's own engines: a real SuperLink with SuperNodes, also when one is killed, and Ray."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from helpers.deployments import deployed, kill_program, to_the_end
from helpers.saved import lines, server_tensors
from helpers.whole_runs import assert_same, everything, run
from hetero_ssfl.config import load_config
from hetero_ssfl.deploy.local import LocalDeployment
from hetero_ssfl.federation.client.memory import ClientCache
from hetero_ssfl.federation.participants.node import open_node
from hetero_ssfl.federation.participants.node_rad import find_rad
from hetero_ssfl.federation.participants.node_settings import read_node
from hetero_ssfl.federation.start import start
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.methods import Broadcast, ServerState, method_for
from hetero_ssfl.runs.folder import RunFolder

pytestmark = pytest.mark.soak

FOUR = ("resnet8(width=4)", "mobilenet(width=8)", "vit(width=16, depth=1, heads=2)", "resnet10(width=4)")
SKETCHES = ("rounds=1", "alignment.form=sketch")


def factor(folder: RunFolder) -> torch.Tensor:
    return server_tensors(folder.path)["shared/factor"].double()


@pytest.mark.timeout(900)
def test_four_supernodes_with_registered_keys_give_the_plain_consensus(tmp_path: Path) -> None:
    it = deployed(tmp_path / "there", *SKETCHES, "privacy.secure=true", encoders=FOUR)
    nodes = [it.node(name) / "node.toml" for name in it.nodes]
    for settings in nodes:
        settings.write_text('key = "node.key"\npeers = "peers"\n' + settings.read_text())
    with LocalDeployment(it) as running:
        there = to_the_end(running)
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


class Killer(threading.Thread):
    """Kills a SuperNode and its ClientApp once a line of its log appears for the given time.

    The log names each message that arrives ("Receiving: train message"), and says when a reply has left ("Sent
    successfully", after "Sending: train message"). The opening has the same messages as round 1.
    """

    def __init__(self, running: LocalDeployment, name: str, line: str, times: int = 2) -> None:
        super().__init__(daemon=True)
        self.running, self.name, self.line, self.times = running, name, re.compile(line, re.DOTALL), times
        self.killed = False

    def run(self) -> None:
        log = self.running.logs / f"{self.name}.log"
        while not log.exists() or len(self.line.findall(log.read_text(errors="replace"))) < self.times:
            time.sleep(0.02)
        kill_program(self.running, self.name)
        self.killed = True


PHASES = {
    "before it has sent its vector": (r"Receiving: train message", {"node-2"}),
    "after it has sent its vector": (r"Sending: train message.*?Sent successfully", set()),
    "while it unmasks": (r"Receiving: query\.unmask message", set()),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("line", "missing"), PHASES.values(), ids=PHASES)
def test_one_of_five_supernodes_may_be_killed_in_any_phase(tmp_path: Path, line: str, missing: set[str]) -> None:
    """The consensus of the round is the plain one of those whose vectors arrived."""
    patience = ("engine.join_timeout=40", "engine.round_timeout=120", "evaluation.probes=[]")
    it = deployed(tmp_path / "there", *SKETCHES, *patience, "privacy.secure=true", encoders=(FOUR[0],) * 5)
    with LocalDeployment(it) as running:
        killer = Killer(running, "node-2", line)
        killer.start()
        there = to_the_end(running)
    assert killer.killed
    events = [event for event in lines(there) if event.get("round") == 1]
    assert [event["replies"] for event in events if event["event"] == "round"] == [5 - len(missing)]
    assert {event["client"] for event in events if "excluded" in event} == missing
    config = load_config(str(it.server / "federation.toml"))
    privacy = config.privacy.model_copy(update={"secure": False})
    plain = method_for(config.model_copy(update={"privacy": privacy}))
    federation, rad = there.read_json("facts.json")["federation"], there.read_json("facts.json")["rad_digest"]
    updates = {}
    for name in sorted({*it.nodes} - missing):
        node = read_node(running.deployment.node(name) / "node.toml")
        pixels = find_rad(node, rad)
        assert pixels is not None
        client = ClientCache().get(open_node(node, config, federation, pixels), 1)
        assert client.round == 1
        updates[name] = plain.local_update(client, Broadcast(0))  # as in the opening: without training
    expected = plain.aggregate(ServerState(0, tuple(it.nodes)), updates).shared["factor"].double()
    assert torch.allclose(factor(there) @ factor(there).T, expected @ expected.T, atol=1e-5)


def test_ray_gives_the_same_bits_as_worker_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    secure = ("privacy.secure=true", "alignment.form=sketch", "rounds=2", "clients.count=3")
    ours, flowers = (run(tmp_path / kind, f"engine.kind={kind}", *secure) for kind in ("in-process", "simulation"))
    a, b = everything(ours), everything(flowers)
    for event in (*a["events"], *b["events"]):
        event.pop("bytes_up", None)  # node and run ids are longer on Ray
    assert_same(a, b)
