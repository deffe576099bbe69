"""Several clients on one GPU: those that train at the same time never use more than the whole GPU."""

import pytest
import torch

from hetero_ssfl.config import load_config
from hetero_ssfl.federation.engines.workers import WorkerGrid, limit_gpu_memory
from hetero_ssfl.federation.start import gpu_fraction
from hetero_ssfl.federation.wire import pack

MODELS = "clients.models=[{encoder='resnet8', gpu_fraction=0.6}, 'resnet10', {encoder='vit', gpu_fraction=0.3}]"


def test_encoders_have_their_own_fraction_or_an_equal_part() -> None:
    config = load_config("smoke", [MODELS, "clients.count=3", "engine.device=cuda"])
    assert [gpu_fraction(config, k, workers=4) for k in range(3)] == [0.6, 0.25, 0.3]


def test_a_client_that_does_not_fit_beside_the_others_waits() -> None:
    nodes = [{"run-dir": "unused", "partition-id": k, "gpu-fraction": f} for k, f in enumerate((0.6, 0.6, 0.4))]
    with WorkerGrid(nodes, workers=3, threads=1) as grid:
        messages = [grid.create_message(pack(fields={"config": ""}), "query", node, "0") for node in (2, 3, 4)]
        waiting = set(grid.push_messages(messages))
        most = 0.0
        while waiting:
            at_work = [worker.busy.metadata.dst_node_id for worker in grid._workers if worker.busy]
            most = max(most, sum(nodes[number - 2]["gpu-fraction"] for number in at_work))  # type: ignore[misc]
            waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(waiting)}
    assert most == pytest.approx(1.0)  # 0.6 and 0.4 together, the other 0.6 after one of them


def test_the_fraction_is_passed_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    limit_gpu_memory(0.6)
    limit_gpu_memory(None)
    assert told == [0.6]
