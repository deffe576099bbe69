"""federate(...) trains objects of this process as other runs do."""

import copy
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.federations import ENCODERS, write_federation
from helpers.pieces import SETTINGS, Net, net
from hetero_ssfl import Client, Run, RunFolder, federate, load_config, mutual_cka, start
from hetero_ssfl.data import Images
from hetero_ssfl.errors import ConfigError, RunError
from hetero_ssfl.federation.engines.workers import InlineGrid
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.runs.folder import client_name


def final_bits(folder: RunFolder) -> dict[str, torch.Tensor]:
    found = dict(load_tensors(folder.path / "server.safetensors")[0])
    for path in sorted((folder.path / "models").rglob("encoder.safetensors")):
        found |= {f"{path.parent.name}/{key}": value for key, value in load_tensors(path)[0].items()}
    return found


def same(a: RunFolder, b: RunFolder) -> bool:
    first, second = final_bits(a), final_bits(b)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_the_table_has_one_row_per_client_in_the_given_order(run: Run) -> None:
    table = run.table()
    assert list(table.index) == ["own-net", "client-001", "client-002"]
    assert list(table["encoder"]) == ["Net", "resnet8(width=8)", "vit(width=16, depth=1, heads=2)"]
    assert table.loc["own-net", "parameters"] == sum(p.numel() for p in net().parameters())
    assert table["mutual_cka"].between(-0.2, 1).all()
    assert (
        table[["loss_ssl", "loss_alignment", "spread", "effective_rank", "linear_all", "knn_all"]]
        .notna()
        .all(axis=None)
    )
    assert table.loc["client-002", ["linear_own"]].isna().all()  # without labels, its own classes are unknown
    assert set(run.events()["event"]) >= {"client", "round", "evaluation"}


def test_a_trained_encoder_is_returned_and_the_users_is_unchanged(run: Run, clients: list[Client]) -> None:
    trained, given = run.encoder("own-net"), clients[0].encoder
    assert isinstance(trained, Net)
    assert isinstance(given, Net)
    assert not trained.training
    assert torch.equal(trained(torch.ones(2, 1, 16, 16)), run.encoder(0)(torch.ones(2, 1, 16, 16)))
    assert not torch.equal(trained.conv.weight, given.conv.weight)
    assert all(torch.equal(p, q) for p, q in zip(given.parameters(), net().parameters(), strict=True))
    with pytest.raises(RunError, match="no client 3, expected 0 to 2"):
        run.encoder(3)


def test_an_instance_starts_from_its_own_weights(clients: list[Client], digits: Images, tmp_path: Path) -> None:
    other = copy.deepcopy(clients[0].encoder)
    assert isinstance(other, Net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    federation = [Client(clients[0].data, other), Client(clients[1].data, "resnet8(width=8)")]
    tiny = {"optim.lr": 1e-12, "rounds": 1, "evaluation.every": 0, "local_epochs": 1}
    run = federate(federation, 16, config="smoke", run_dir=tmp_path / "r", settings=tiny, progress=False)
    trained = run.encoder(0)
    assert isinstance(trained, Net)
    assert torch.allclose(trained.conv.weight, other.conv.weight, atol=1e-6)


def test_training_is_bit_identical_to_a_simulated_run(tmp_path: Path, digits: Images) -> None:
    config = load_config("smoke", ["evaluation.every=0", "rounds=1"])
    simulated = start(config, tmp_path / "simulated", lambda _: None)
    rows = load_tensors(simulated.path / "split.safetensors")[0]
    parts = [digits.pixels[rows[client_name(k)]] for k in range(3)]
    federation = [Client(x, config.model_of(k).encoder) for k, x in enumerate(parts)]
    given = federate(federation, digits.pixels[rows["rad"]], config=config, run_dir=tmp_path / "given", progress=False)
    assert same(simulated, given.folder)


def test_training_in_this_process_is_bit_identical(
    run: Run, clients: list[Client], digits: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # as with a GPU in use
    grids: list[InlineGrid] = []
    real = InlineGrid.__enter__

    def enter(self: InlineGrid) -> InlineGrid:
        grids.append(self)
        return real(self)

    monkeypatch.setattr(InlineGrid, "__enter__", enter)
    rad = digits.pixels[600:650]
    inline = federate(clients, rad, config="smoke", settings=SETTINGS, run_dir=tmp_path / "r", progress=False)
    assert len(grids) == 1
    assert same(run.folder, inline.folder)


def test_forked_workers_work_after_training_with_several_threads(digits: Images, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    x = torch.randn(500, 500, requires_grad=True)
    (x @ x).sum().backward()
    federation = [Client(digits.pixels[:50], net()), Client(digits.pixels[50:100], net())]
    federate(federation, 8, config="smoke", rounds=1, run_dir=tmp_path / "r", progress=False)
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


@pytest.mark.parametrize("settings", [{"clients.per_round": 7}, {"clients.weights": [1, 2, 3, 4, 5, 6, 7]}])
def test_settings_are_checked_against_the_number_of_clients(digits: Images, tmp_path: Path, settings: dict) -> None:
    federation = [Client(digits.pixels[10 * k : 10 * k + 10], "resnet8(width=4)") for k in range(7)]
    tiny = {**settings, "local_epochs": 1, "evaluation.every": 0}
    run = federate(federation, 14, config="smoke", rounds=1, settings=tiny, run_dir=tmp_path / "r", progress=False)
    assert len(run.table()) == run.config.clients.count == 7


def test_clients_that_are_settings_files_keep_their_order(tmp_path: Path) -> None:
    federation, nodes = write_federation(tmp_path, images=20)
    config = load_config(str(federation), ["rounds=1"])
    start(config, tmp_path / "run", lambda _: None, nodes[::-1])
    run = Run.open(tmp_path / "run")
    assert run.clients == ["node-2", "node-1", "node-0"]
    assert list(run.table()["encoder"]) == list(ENCODERS[::-1])
    for k, name in enumerate(run.clients):
        first, second = run.encoder(k), run.encoder(name)
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    rad = run.folder.path / "rad.safetensors"
    features = [extract_features(run.encoder(name), load_tensors(rad)[0]["pixels"]) for name in run.clients]
    alike = mutual_cka(features)
    assert np.allclose(run.mutual_cka, alike, atol=1e-5)
    assert list(run.mutual_cka.columns) == list(run.mutual_cka.index) == run.clients
    assert run.table()["mutual_cka"].tolist() == pytest.approx([(float(row.sum()) - 1) / 2 for row in alike], abs=1e-5)
    assert repr(run) == f"Run('{run.path}', 3 clients, hetero-ssfl, 1 rounds)"


# --- second call ---


def test_a_finished_run_is_returned_at_once(run: Run, clients: list[Client], digits: Images) -> None:
    seen: list[object] = []
    rad = digits.pixels[600:650]
    again = federate(clients, rad, config="smoke", settings=SETTINGS, run_dir=run.path, progress=seen.append)
    assert not seen
    assert again.table().equals(run.table())
    del again
    gc.collect()
    assert isinstance(run.encoder(0), Net)  # freeing one run keeps the objects of another


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"settings": {"alignment.mu": 1}}, "settings"),
        ({"rad": np.s_[601:651]}, "RAD data"),
        ({"encoder": net(width=25)}, r"encoder of own-net \(Net-\w{8} then and Net-\w{8} now\)"),
        ({"data": lambda pixels: 255 - pixels}, r"data of own-net \(other contents\)"),
        ({"data": lambda pixels: pixels[:199]}, r"data of own-net \(140 training samples then and 139 now\)"),
        ({"name": "other"}, "clients"),
    ],
)
def test_a_folder_with_another_run_is_refused(
    run: Run, clients: list[Client], digits: Images, change: dict, what: str
) -> None:
    assert digits.labels is not None
    data = change.get("data", lambda pixels: pixels)(digits.pixels[:200])
    rad = digits.pixels[change.get("rad", np.s_[600:650])]
    encoder = change.get("encoder", clients[0].encoder)
    first = Client(data, encoder, change.get("name", "own-net"), labels=digits.labels[: len(data)])
    settings = {**SETTINGS, **change.get("settings", {})}
    with pytest.raises(RunError, match=rf"holds a run with different {what}.*or choose another run folder"):
        federate([first, *clients[1:]], rad, config="smoke", settings=settings, run_dir=run.path, progress=False)


def test_a_mistyped_encoder_is_named_before_the_folder_is_compared(run: Run, clients: list[Client]) -> None:
    mistyped = [clients[0], Client(clients[1].data, "resnett8(width=8)"), clients[2]]
    with pytest.raises(ConfigError, match="unknown encoder 'resnett8'"):
        federate(mistyped, 16, config="smoke", settings=SETTINGS, run_dir=run.path, progress=False)


def test_every_run_gets_its_own_folder(clients: list[Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "smoke-local-seed3").mkdir(parents=True)
    run = federate(clients[:1], 8, "local", config="smoke", rounds=1, seed=3, progress=False)
    assert run.path == Path("runs/smoke-local-seed3-2")
