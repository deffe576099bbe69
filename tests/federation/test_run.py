"""Whole runs on real worker processes: the same results with any number of workers, also after kills and failures."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from helpers.saved import lines, server_tensors
from helpers.whole_runs import assert_same, everything, run, tiny
from hetero_ssfl.config import Config
from hetero_ssfl.data import to_input
from hetero_ssfl.errors import ConfigError, DataError, FaultError, RunError
from hetero_ssfl.federation.client.memory import ClientCache
from hetero_ssfl.federation.engines import workers
from hetero_ssfl.federation.engines.workers import InlineGrid, WorkerGrid
from hetero_ssfl.federation.participants import LocalSite, NodeSite, Setup, SplitData
from hetero_ssfl.federation.participants.participant import Participant
from hetero_ssfl.federation.server import loop, saving
from hetero_ssfl.federation.start import open_run, resume, start
from hetero_ssfl.federation.wire import pack
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.learning.encoders.whitening import whitening_filters
from hetero_ssfl.methods import ServerState
from hetero_ssfl.runs import files
from hetero_ssfl.runs.events import Evaluating, Event, Progressed, RoundDone, Warned
from hetero_ssfl.runs.files import SavedTensors, load_tensors
from hetero_ssfl.runs.folder import RunFolder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(tmp_path_factory.mktemp("reference") / "run", "engine.workers=2")


def test_one_worker_is_bit_identical_to_two(reference: RunFolder, tmp_path: Path) -> None:
    assert_same(everything(reference), everything(run(tmp_path / "run", "engine.workers=1")))


def test_a_round_reads_each_kept_contribution_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
        read.append(path)
        return load_tensors(path)

    monkeypatch.setattr(files, "load_state", counted)
    run(tmp_path / "run", "clients.per_round=2")
    contributions = [path for path in read if path.parts[-3] == "shares"]
    assert len(contributions) >= 3 + 2 * 3, "of the opening and of three rounds with two clients each"
    assert len(contributions) == len(set(contributions))


def test_every_round_and_client_has_an_event(reference: RunFolder) -> None:
    events = lines(reference)
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1, 2, 3]
    clients = [(e["round"], e["client"]) for e in events if e["event"] == "client"]
    assert clients == [(r, f"client-{k:03d}") for r in range(4) for k in range(3)]
    trained = [e for e in events if e["event"] == "client" and e["round"] > 0]
    assert all(e["bytes_up"] > 0 and e["bytes_down"] > 0 and e["loss_ssl"] > 0 for e in trained)
    assert all("consensus_effective_rank" in e for e in events if e["event"] == "round")
    assert [e["round"] for e in events if e["event"] == "evaluation"] == [0, 1, 2, 3]


def test_the_run_folder_holds_models_with_cards(reference: RunFolder) -> None:
    card = reference.read_json("models/client-001/card.json")
    weights, about = load_tensors(reference.path / "models" / "client-001" / "encoder.safetensors")
    assert card["encoder"].startswith("mobilenet")
    assert about == card
    assert card["round"] == 3
    assert sum(v.numel() for k, v in weights.items() if "running" not in k and "tracked" not in k) == card["parameters"]


def test_only_representations_travel(reference: RunFolder) -> None:
    """The server's state contains only factors on the RAD, no weights of any client."""
    tensors = server_tensors(reference.path)
    assert {key.split("/")[-1] for key in tensors} == {"factor", "lost"}
    assert all(len(value) == 32 for key, value in tensors.items() if key.endswith("factor"))


def test_sketches_of_different_encoders_have_one_shape_and_give_the_same_consensus_as_factors(tmp_path: Path) -> None:
    short = ["rounds=1", "evaluation.every=0", "evaluation.untrained=false", "engine.workers=1"]
    # One round only, because rounding errors grow with every step in both forms.
    folders = [run(tmp_path / form, f"alignment.form={form}", *short) for form in ("factor", "sketch")]
    by_factor, tensors = (server_tensors(folder.path) for folder in folders)
    assert {key.split("/")[-1] for key in tensors} == {"sketch", "trace", "factor", "lost", "sums", "totals"}
    assert [tuple(v.shape) for key, v in tensors.items() if key.endswith("sketch")] == [(32, 32)] * 3
    assert float(tensors["shared/lost"]) < 1e-3
    assert float(factor_cka(tensors["shared/factor"], by_factor["shared/factor"])) > 0.999


def participant(folder: RunFolder, number: int) -> Participant:
    return LocalSite().participant(folder, number, folder.read_config())


SCRIPT = """
import sys
from pathlib import Path
from hetero_ssfl.config import parse_config
from hetero_ssfl.federation.start import start
if __name__ == "__main__":
    path = Path(sys.argv[1])
    print_event = lambda e: print(e.kind, getattr(e, "round", ""), flush=True)
    start(parse_config(Path(sys.argv[2]).read_text()), path, print_event)
"""


@pytest.mark.parametrize(
    "moment", ["progress", "evaluating 3", *(pytest.param(m, marks=pytest.mark.soak) for m in ("begin 2", "round 1"))]
)
def test_a_run_killed_at_any_moment_and_resumed_ends_bit_identical(
    reference: RunFolder, tmp_path: Path, moment: str
) -> None:
    script, config, path = tmp_path / "go.py", tmp_path / "config.toml", tmp_path / "run"
    script.write_text(SCRIPT)
    config.write_text(tiny("engine.workers=2").to_toml())
    child = subprocess.Popen([sys.executable, script, path, config], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(moment):
            break
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    folder = RunFolder.open(path)
    assert not folder.finished
    assert_same(everything(reference), everything(resume(folder, lambda _: None)))


COORDINATES = (
    *("alignment.distance=coordinates", "alignment.coordinates=8", "rad.in_ssl=true", "engine.workers=1"),
    "clients.models=['resnet8(width=4, stem=2, whiten=3, pool=2)', 'vit(width=8, depth=1, heads=2, whiten=3, pool=2)']",
)


def test_coordinates_and_whitening_survive_a_restart_with_the_same_bits(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(event: Event) -> None:
        if isinstance(event, RoundDone) and event.round == 1:
            raise StoppedError

    whole = run(tmp_path / "whole", *COORDINATES)
    with pytest.raises(StoppedError):
        start(whole.read_config(), tmp_path / "stopped", stop)
    stopped = RunFolder.open(tmp_path / "stopped")
    assert_same(everything(whole), everything(resume(stopped, lambda _: None)))
    saved, kept = stopped.states("client-001").load(3), server_tensors(whole.path)
    assert kept["shared/coordinates"].shape == (whole.read_config().rad.size, 8)
    assert saved["head.weight"].shape[0] == 8
    filters = saved["encoder.patches.0.filters"]
    assert torch.equal(filters, whitening_filters(whole.rad()[0], 3)), "it stays as it was made from the RAD"


def test_coordinates_of_a_secure_sum_are_those_of_plain_sketches(tmp_path: Path) -> None:
    short = ["alignment.form=sketch", "rounds=1", "evaluation.every=0", "evaluation.untrained=false"]
    settings = [*short, "alignment.distance=coordinates", "alignment.coordinates=8", "engine.workers=1"]
    plain, secure = (run(tmp_path / name, *settings, f"privacy.secure={name}") for name in ("false", "true"))
    ours, theirs = (server_tensors(folder.path)["shared/coordinates"] for folder in (secure, plain))
    assert float(torch.nn.functional.cosine_similarity(ours, theirs).min()) > 0.99


def test_a_finished_run_is_left_unchanged(reference: RunFolder) -> None:
    before = (reference.path / "results.json").stat().st_mtime_ns
    resume(reference, lambda _: None)
    start(reference.read_config(), reference.path, lambda _: None)
    assert (reference.path / "results.json").stat().st_mtime_ns == before


def test_a_run_is_never_overwritten_by_another(reference: RunFolder) -> None:
    other = r"different settings \(alignment\.mu is [\d.]+ there and 3\.5 here\)\. Continue that run with: .*--resume"
    with pytest.raises(RunError, match=other):
        start(tiny("engine.workers=2", "alignment.mu=3.5"), reference.path, lambda _: None)
    with pytest.raises(RunError, match="different participants"):
        start(reference.read_config(), reference.path, lambda _: None, nodes=[reference.path / "node.toml"])


def test_a_start_does_not_overwrite_a_run_that_another_process_has_created_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path, plain = tiny(), tmp_path / "run", LocalSite.set_up
    created: list[dict[str, object]] = []

    def late(site: LocalSite, config: Config) -> Setup:
        found = plain(site, config)
        if not created:
            created.append({})
            created[0] = open_run(path, config, LocalSite()).read_json("facts.json")
        return found

    monkeypatch.setattr(LocalSite, "set_up", late)
    assert open_run(path, config, LocalSite()).read_json("facts.json") == created[0]
    with RunFolder(tmp_path / "busy").lock(), pytest.raises(RunError, match="another process is working in"):
        open_run(tmp_path / "busy", config, LocalSite())


def test_partial_participation_changes_only_the_selected_clients(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "clients.per_round=1", "rounds=2", "evaluation.every=0")
    events = [e for e in lines(folder) if e["event"] == "client" and e["round"] > 0]
    assert [e["round"] for e in events] == [1, 2]
    idle = {f"client-{k:03d}" for k in range(3)} - {e["client"] for e in events}
    for name in idle:
        assert folder.states(name).newest(10**6) == 0
    tensors = server_tensors(folder.path)
    assert all(f"client/{name}/factor" in tensors for name in idle)


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's encoder that passes the checks and fails in training."""
    (tmp_path / "fragile.py").write_text(
        "import os, torch\n"
        "class Fragile(torch.nn.Module):\n"
        "    def __init__(self, in_channels):\n"
        "        super().__init__(); self.layer = torch.nn.Linear(256 * in_channels, 8)\n"
        "    def forward(self, x):\n"
        "        if self.training and 'LUCK' not in os.environ: raise RuntimeError('out of luck')\n"
        "        return self.layer(x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return "fragile:Fragile"


def test_a_client_that_fails_twice_stops_the_run_which_continues_when_the_cause_is_gone(
    tmp_path: Path, fragile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = f"clients.models=['resnet8(width=4)', '{fragile}', '{fragile}']"
    config, path, warnings = tiny(models, "rounds=1"), tmp_path / "run", list[str]()
    said = (
        r"client-001 \(encoder fragile:Fragile\) failed twice in round 1: RuntimeError: out of luck .*"
        r" So did client-002 \(encoder fragile:Fragile\)\. .*--resume"
    )
    with pytest.raises(FaultError, match=said):
        start(config, path, lambda e: warnings.append(e.text) if isinstance(e, Warned) else None)
    assert sum("client-001" in text and "starts again" in text for text in warnings) == 1
    folder = RunFolder.open(path)
    assert load_tensors(path / "server.safetensors")[1]["round"] == 0
    assert lines(folder)[-1]["round"] == 0
    monkeypatch.setenv("LUCK", "1")
    assert [e["round"] for e in lines(resume(folder, lambda _: None)) if e["event"] == "round"] == [0, 1]


def test_a_client_whose_loss_diverges_is_reported_and_excluded(tmp_path: Path) -> None:
    """Trying again would diverge again; the others go on, as they do with a node."""
    hot = ["optim.lr=1e30", "engine.workers=1", "evaluation.every=0", "rounds=1"]
    with pytest.raises(RunError, match=r"the loss diverged: .*of client-00\d diverged in round 1.*--resume") as hit:
        run(tmp_path / "run", *hot)
    assert not isinstance(hit.value, FaultError)


def test_waiting_for_clients_that_never_reply_ends(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"only 0 of 3 .*engine\.round_timeout = 0\.001 s"):
        run(tmp_path / "run", "engine.round_timeout=0.001")


def test_a_killed_worker_is_replaced_and_its_client_trains_again_to_the_same_bits(
    reference: RunFolder, tmp_path: Path
) -> None:
    import multiprocessing

    killed: list[int | None] = []

    def listen(event: Event) -> None:
        if isinstance(event, Progressed) and not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid)
            os.kill(victim.pid or 0, signal.SIGKILL)
        if isinstance(event, Warned):
            warnings.append(event.text)

    warnings: list[str] = []
    folder = start(tiny("engine.workers=1"), tmp_path / "run", listen)
    assert killed
    assert "killed (SIGKILL)" in warnings[0]
    assert "starts again from its saved state" in warnings[0]
    assert_same(everything(reference), everything(folder))


def test_a_dead_client_process_stops_the_run_and_is_named_with_its_encoder_and_the_signal(
    tmp_path: Path, dying: str
) -> None:
    said = (
        rf"client-001 \(encoder {dying}\) failed twice in round 1: its process died of SIGABRT. Try hetero-ssfl check"
        r".*--resume"
    )
    with pytest.raises(FaultError, match=said):
        run(tmp_path / "run", f"clients.models=['resnet8(width=4)', '{dying}']", "rounds=1")
    assert load_tensors(tmp_path / "run" / "server.safetensors")[1]["round"] == 0


@pytest.mark.parametrize(
    "override",
    [
        "clients.models=['resnet9']",
        "method=fedbyol",
        "rad.size=5000",
        "partition.classes_per_client=11",
        "data.source=/nowhere/at/all",
    ],
)
def test_a_run_that_cannot_work_leaves_no_files(tmp_path: Path, override: str) -> None:
    with pytest.raises((ConfigError, DataError)):
        run(tmp_path / "run", override)
    assert not (tmp_path / "run").exists()


def test_data_without_labels_is_trained_on_but_not_probed(tmp_path: Path) -> None:
    from PIL import Image

    for k in range(120):
        shade = Image.effect_noise((16, 16), 10 + k)
        (tmp_path / "images").mkdir(exist_ok=True)
        shade.save(tmp_path / "images" / f"{k}.png")
    folder = run(
        tmp_path / "run",
        f"data.source='{tmp_path / 'images'}'",
        "partition.kind=iid",
        "data.limit=90",
        "data.validation=0",
        "rounds=1",
    )
    assert folder.read_json("results.json")["mean"] == {}
    assert (folder.path / "models" / "client-002" / "encoder.safetensors").exists()


@torch.no_grad()
def accuracy_of_the_global_classifier(folder: RunFolder) -> float:
    """Compute the accuracy from the server's file, without the evaluation code."""
    learner, test = participant(folder, 0).untrained().eval(), SplitData(folder).held_out("test")
    shared, _ = load_tensors(folder.path / "server.safetensors")
    learner.load_state_dict({**learner.state_dict(), **shared})
    assert learner.classifier is not None
    assert test.labels is not None
    guesses = learner.classifier(learner.encoder(to_input(test.pixels))).argmax(1)
    return 100 * float((guesses == test.labels).double().mean())


@pytest.mark.parametrize(("method", "kind"), [("fedbyol", "byol"), ("fedema", "byol"), ("fedavg", "byol")])
def test_averaging_methods_run_end_to_end_and_probe_the_global_model(tmp_path: Path, method: str, kind: str) -> None:
    overrides = [f"method={method}", f"ssl.kind={kind}", "clients.models=['resnet8(width=4)']", "rounds=2"]
    folder = run(tmp_path / "run", *overrides, "clients.per_round=2", "evaluation.every=0", "engine.workers=1")
    results = folder.read_json("results.json")
    assert set(results["global"]) == {"linear_all"} | ({"classifier_all"} if method == "fedavg" else set())
    if method == "fedavg":
        assert results["global"]["classifier_all"] == pytest.approx(accuracy_of_the_global_classifier(folder))
    assert len(results["clients"]) == 3
    sent = [e["bytes_up"] for e in lines(folder) if e["event"] == "client"]
    weights = sum(v.numel() * 4 for k, v in server_tensors(folder.path).items() if "shared" in k)
    assert all(0.9 * weights < size < 1.5 * weights + 5000 for size in sent)
    opening = [e["client"] for e in lines(folder) if e["event"] == "client" and e["round"] == 0]
    assert opening == ["client-000"]  # all clients start from its weights


def test_a_small_memory_budget_does_not_change_the_results(tmp_path: Path) -> None:
    wide = ["clients.models=['resnet8(width=24)', 'mobilenet(width=24)']", "rounds=2", "engine.workers=1"]
    roomy, tight = (run(tmp_path / mb, f"engine.memory_mb={mb}", *wide) for mb in ("4096", "1"))
    assert_same(everything(roomy), everything(tight))


def test_clients_beyond_the_memory_budget_are_dropped_and_read_back(reference: RunFolder) -> None:
    cache = ClientCache()
    first = cache.get(participant(reference, 0), limit=3)
    before = {k: v.clone() for k, v in first.learner.state_dict().items()}
    assert cache.get(participant(reference, 0), limit=3) is first
    cache._shrink(budget=1)
    cache.get(participant(reference, 1), limit=3)
    cache._shrink(budget=1)
    again = cache.get(participant(reference, 0), limit=3)
    assert again is not first
    assert all(torch.equal(v, again.learner.state_dict()[k]) for k, v in before.items())


def test_networks_of_an_evicted_client_are_reused_for_the_same_kind(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "clients.models=['resnet8(width=4)']", "rounds=1", "evaluation.every=0")
    cache = ClientCache()
    first, second = (cache.get(participant(folder, k), limit=1) for k in (0, 1))
    cache._shrink(budget=1)
    third = cache.get(participant(folder, 2), limit=1)
    assert third.learner is first.learner
    assert third.learner is not second.learner
    saved = folder.states("client-002").load(1)
    assert all(torch.equal(value, saved[key]) for key, value in third.learner.state_dict().items())
    cache._shrink(budget=1)
    untrained = cache.get(participant(folder, 0), limit=0)  # initial weights, not another client's
    assert untrained.learner is not second.learner
    own = participant(folder, 0).untrained().state_dict()
    assert all(torch.equal(value, own[key]) for key, value in untrained.learner.state_dict().items())


def test_a_client_asked_for_an_earlier_round_loads_that_round(reference: RunFolder) -> None:
    cache = ClientCache()
    assert cache.get(participant(reference, 0), limit=3).round == 3
    assert cache.get(participant(reference, 0), limit=2).round == 2


@pytest.mark.parametrize("when", ["among the contributions", "between events and state"])
def test_a_round_killed_before_its_state_is_saved_is_repeated(reference: RunFolder, tmp_path: Path, when: str) -> None:
    """The cases that the commit point protects against: some contributions of round 3 are written, or all and the
    events, but not the state."""
    path = tmp_path / "run"
    written = list[str]()

    class Killed(BaseException):
        pass

    def save_state(folder: RunFolder, state: ServerState) -> ServerState:
        if state.round == 3:
            raise Killed
        return saving.save_state(folder, state)

    def save_contribution(folder: RunFolder, name: str, number: int, arrays: Mapping[str, Tensor]) -> SavedTensors:
        if number == 3 and when == "among the contributions" and written:
            raise Killed
        written.extend([name] if number == 3 else [])
        return saving.save_contribution(folder, name, number, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_state", save_state)
        patch.setattr(loop, "save_contribution", save_contribution)
        with pytest.raises(Killed):
            run(path, "engine.workers=2")
    assert lines(RunFolder.open(path))[-1]["round"] == (2 if when == "among the contributions" else 3)
    newest = [RunFolder(path).shares(f"client-{k:03d}").newest(99) for k in range(3)]
    assert sorted(newest) == ([2, 2, 3] if when == "among the contributions" else [3, 3, 3])
    assert_same(everything(reference), everything(resume(RunFolder.open(path), lambda _: None)))


def test_cancelled_messages_are_not_processed_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(_: object, message: Message, *__: object) -> Message:
        asked.append(message.metadata.dst_node_id)
        return Message(RecordDict(), reply_to=message)

    monkeypatch.setattr(workers, "answer", answer)
    with InlineGrid([{}, {}, {}], NodeSite()) as grid:
        nodes = list(grid.get_node_ids())
        ids = list(grid.push_messages([Message(RecordDict(), node, "query") for node in nodes]))
        grid.cancel(set(ids[:2]))  # a deadline has passed
        while not list(grid.pull_messages(ids[2:])):
            pass
    assert asked == nodes[2:]


def test_a_contribution_of_an_uncommitted_round_is_deleted(tmp_path: Path) -> None:
    """If it were kept, saving the next one would delete the committed contribution."""
    folder = run(tmp_path / "run", "rounds=2", "evaluation.every=0", "engine.workers=1")
    contributions = folder.shares("client-000")
    contributions.save(3, {"factor": torch.zeros(1)})
    (folder.path / "results.json").unlink()
    resume(folder, lambda _: None)
    assert contributions.newest(99) == 2


def test_a_failed_final_evaluation_is_not_a_finished_run(tmp_path: Path) -> None:
    """A failure at the very end must not discard the training before it."""
    path = tmp_path / "run"

    def spoil(event: Event) -> None:
        if isinstance(event, Evaluating) and event.split == "test":
            (path / "models").write_text("in the way")

    with pytest.raises(FaultError, match=r"failed twice in the evaluation after round 1: .*models.*--resume"):
        start(tiny("rounds=1", "evaluation.every=0"), path, spoil)
    assert not RunFolder.open(path).finished
    (path / "models").unlink()
    assert resume(RunFolder.open(path), lambda _: None).finished


def test_a_slow_client_is_excluded_and_its_work_is_stopped(tmp_path: Path) -> None:
    nodes = [{"run-dir": "unused", "number": 0}]
    with WorkerGrid(nodes, workers=1, threads=1) as grid:
        before = grid._workers[0].process.pid
        message = grid.create_message(pack(fields={"config": ""}), "query", 2, "0")
        (message_id,) = grid.push_messages([message])
        grid.cancel({message_id})
        assert grid._workers[0].process.pid != before
        assert grid._workers[0].busy is None
        assert not list(grid.pull_messages([message_id]))
        reply = next(iter(grid.send_and_receive([grid.create_message(pack(), "query", 2, "0")], timeout=120)))
        assert reply.has_error()  # the new worker replies that there is no run folder


def test_few_labels_are_used_for_frozen_and_fine_tuned_probes(tmp_path: Path) -> None:
    few = ["evaluation.label_shares=[0.1]", "evaluation.finetune_epochs=1", "evaluation.untrained=false"]
    folder = run(tmp_path / "run", "rounds=1", "method=local", "evaluation.every=0", "engine.workers=1", *few)
    scores = folder.read_json("results.json")["clients"]["client-000"]
    assert set(scores) == {"linear_all", "linear_own", "linear_10%", "finetune_10%"}


def test_cifar10_runs_end_to_end(cifar10: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "data.source=cifar10", "data.side=16", "rounds=1", "partition.classes_per_client=2")
    assert folder.read_json("facts.json")["classes"][0] == "airplane"
    assert set(folder.read_json("results.json")["mean"]) == {"linear_all", "linear_own"}
