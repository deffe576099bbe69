"""The kind of site is recorded when a run is created, and every process opens the same site from it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers.federations import write_federation
from helpers.whole_runs import tiny
from hetero_ssfl import Client, federate
from hetero_ssfl.config import Config, load_config
from hetero_ssfl.data import Images
from hetero_ssfl.errors import ProtocolError, RunError
from hetero_ssfl.federation.client.app import ClientProcess
from hetero_ssfl.federation.participants import (
    ClientInfo,
    LocalSite,
    NodeConfig,
    NodeSite,
    Setup,
    open_site,
)
from hetero_ssfl.federation.participants.participant import Participant
from hetero_ssfl.federation.start import open_run, prepare
from hetero_ssfl.runs.files import save_tensors
from hetero_ssfl.runs.folder import RunFolder, SiteKind, resume_command
from hetero_ssfl.use.encoders import participants


def simulated(path: Path) -> RunFolder:
    return open_run(path, tiny(), LocalSite())


def of_nodes(path: Path) -> RunFolder:
    federation, paths = write_federation(path / "owners")
    return open_run(path / "run", load_config(str(federation)), NodeSite(paths))


def remote(path: Path) -> RunFolder:
    federation, _ = write_federation(path / "owners")
    return open_run(path / "run", load_config(str(federation)), NodeSite())


def of_python(path: Path) -> RunFolder:
    pixels = torch.randint(0, 255, (40, 1, 8, 8), dtype=torch.uint8)
    clients = [Client(pixels[:20], "resnet8(width=4)", "zeta"), Client(pixels[20:], "resnet8(width=4)", "alpha")]
    return federate(clients, 8, "local", config="smoke", rounds=1, run_dir=path / "run", progress=False).folder


@pytest.mark.parametrize(
    ("make", "kind", "names", "continues"),
    [
        (simulated, "simulated", ["client-000", "client-001", "client-002"], "hetero-ssfl run --resume"),
        (of_nodes, "nodes", ["node-0", "node-1", "node-2"], "hetero-ssfl run --resume"),
        (of_python, "python", ["zeta", "alpha"], "federate(..., run_dir="),
    ],
)
def test_a_run_knows_its_participants_and_how_it_continues(
    make, kind: str, names: list[str], continues: str, tmp_path: Path
) -> None:
    folder = RunFolder.open(make(tmp_path).path)
    site = open_site(folder, to_train=True)
    assert (folder.read_facts().site, site.kind) == (kind, kind)
    assert [client.name for client in site.clients(folder)] == names
    assert resume_command(folder.path).startswith(continues)


def test_participants_on_other_machines_are_not_available_here(tmp_path: Path) -> None:
    folder = remote(tmp_path)
    site = open_site(folder, to_train=True)
    assert isinstance(site, NodeSite)
    for ask in (site.clients, site.nodes, lambda folder: list(participants(folder, site, folder.read_config()))):
        with pytest.raises(RunError, match="on other machines"):
            ask(folder)
    assert "run.sh" in resume_command(folder.path)


def test_error_for_objects_of_another_process_names_the_remedy(tmp_path: Path) -> None:
    folder = of_python(tmp_path)
    site = open_site(folder, to_train=True)
    assert [client.model for client in site.clients(folder)] == [folder.path / "models" / n for n in ("zeta", "alpha")]
    zeta, _ = participants(folder, site, folder.read_config())
    zeta.encoder(trained=True)  # it has a name, its data do not
    with pytest.raises(RunError, match=r"the data of zeta and the data of alpha\. Call there: federate\("):
        _ = zeta.images


@pytest.mark.parametrize("make", [simulated, of_nodes])
def test_a_node_finds_its_participant_from_its_node_config(make, tmp_path: Path) -> None:
    folder = make(tmp_path)
    config, site = folder.read_config(), open_site(folder, to_train=True)
    process = ClientProcess()
    for client, told in zip(site.clients(folder), json.loads(json.dumps(site.nodes(folder))), strict=True):  # as sent
        settings = process.settings(told)
        assert process.settings(told) is settings, "read once per process"
        assert (settings or process.participant(told, config)).name == client.name


def test_error_for_a_node_without_config_names_the_remedy() -> None:
    with pytest.raises(ProtocolError, match=r"node-config 'settings=\"node\.toml\"'"):
        ClientProcess().participant({"partition-id": 0}, tiny())


def test_an_unknown_kind_of_site_is_refused(tmp_path: Path) -> None:
    folder = simulated(tmp_path)
    facts = folder.read_json("facts.json")
    folder.write_json("facts.json", {**facts, "site": "on the moon"})
    with pytest.raises(RunError, match="site = on the moon, expected: 'simulated'"):
        open_site(folder, to_train=True)


def test_a_run_cannot_continue_with_other_settings_files(tmp_path: Path) -> None:
    folder = of_nodes(tmp_path)
    paths = [Path(path) for path in folder.read_json("facts.json")["nodes"]]
    assert open_run(folder.path, folder.read_config(), NodeSite(paths)).path == folder.path
    shutil.copytree(paths[0].parent, tmp_path / "moved")
    with pytest.raises(RunError, match="node settings files"):
        open_run(folder.path, folder.read_config(), NodeSite([tmp_path / "moved" / "node.toml", *paths[1:]]))


def test_a_process_that_serves_several_nodes_trains_each_with_its_own_threads(tmp_path: Path) -> None:
    _, paths = write_federation(tmp_path)
    paths[1].write_text("threads = 2\n" + paths[1].read_text())
    before, process, used = torch.get_num_threads(), ClientProcess(), []
    try:
        for path in (paths[0], paths[1], paths[0]):
            process.settings({"settings": str(path)})
            used.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert used == [1, 2, 1]


@pytest.mark.parametrize(("fact", "value"), [("rad_digest", "../../victim"), ("federation", "../../victim")])
def test_nothing_in_a_strangers_run_folder_becomes_a_path(fact: str, value: str, tmp_path: Path) -> None:
    """A RAD that does not match its digest is deleted: the digest must not name another file."""
    folder = of_nodes(tmp_path)
    site = open_site(folder, to_train=True)
    assert isinstance(site, NodeSite)
    home = site.settings[0].home
    (home / "rad").mkdir(parents=True)
    victim = home.parent / "victim.safetensors"
    save_tensors(victim, {"pixels": torch.zeros(1)})
    facts = folder.read_json("facts.json")
    folder.write_json("facts.json", {**facts, fact: value})
    with pytest.raises(ProtocolError, match=r"is named '\.\./\.\./victim', expected"):
        site.clients(folder) if fact == "federation" else list(participants(folder, site, folder.read_config()))
    assert victim.exists()


RAD = torch.randint(0, 255, (32, 1, 8, 8), dtype=torch.uint8)


class FakeSite:
    kind: SiteKind = "python"

    def set_up(self, config: Config) -> Setup:
        return Setup(RAD, {"skipped_images": 0})

    def difference(self, folder: RunFolder) -> None: ...

    def clients(self, folder: RunFolder) -> list[ClientInfo]:
        return []

    def nodes(self, folder: RunFolder) -> list[NodeConfig]:
        return [{"number": k, "run-dir": str(folder.path)} for k in range(2)]

    def participant(self, folder: RunFolder, number: int, config: Config) -> Participant:
        name, own = f"fake-{number}", lambda *_: Images(RAD, None, ())
        folders = folder.states(name), folder.path / name
        return Participant(name, config, config.model_of(number), (number,), RAD, own, *folders, own, own)


def test_a_fake_site_of_five_short_methods_trains(tmp_path: Path) -> None:
    config = tiny("clients.count=2", "rounds=1", "engine.workers=1")
    folder = prepare(config, tmp_path / "run", site=FakeSite()).train(lambda _: None)
    assert set(folder.read_json("results.json")["models"]) == {"fake-0", "fake-1"}
