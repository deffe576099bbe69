"""The Strategy for existing Flower projects, with synthetic replies and in the example (soak/test_ray.py: on Ray)."""

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from helpers.grids import LocalGrid
from hetero_ssfl import AlignmentConfig, HeteroSSFLStrategy, contribution
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.federation.engines.workers import RUN_ID, SERVER_NODE, set_identity
from hetero_ssfl.federation.wire import decode, encode
from hetero_ssfl.seeding import rng_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_project.py"
ALIGNMENT = AlignmentConfig(distance="cka", rad_batch=0)


def sent_factor(*scope: int, rows: int = 12) -> Tensor:
    return contribution(torch.randn(rows, 4, generator=rng_for(*scope)), ALIGNMENT).arrays["factor"]


def reply(node: int, factor: Tensor, examples: object = 10, loss: object = 1.0, key: str = "arrays") -> Message:
    """Build a reply as a SuperNode sends it."""
    set_identity(1)
    asked = Message(RecordDict(), node, "train")
    set_identity(node)
    figures = MetricRecord({"num-examples": examples, "loss": loss} if examples else {"loss": loss})  # type: ignore[dict-item]
    content = RecordDict({key: ArrayRecord({"factor": Array(factor.numpy())}), "metrics": figures})
    return Message(content, reply_to=asked)


def kernel(record: ArrayRecord | None) -> Tensor:
    assert record is not None
    factor = torch.from_numpy(record["factor"].numpy()).double()
    return factor @ factor.T


def mean(*factors: Tensor) -> Tensor:
    return sum((a.double() @ a.double().T for a in factors), torch.zeros(())) / len(factors)


def test_strategy_returns_the_mean_kernel_of_all_nodes_that_ever_replied() -> None:
    strategy = HeteroSSFLStrategy(12, ALIGNMENT)
    arrays, metrics = strategy.aggregate_train(1, [reply(8, sent_factor(8)), reply(5, sent_factor(5))])
    assert torch.allclose(kernel(arrays), mean(sent_factor(8), sent_factor(5)), atol=1e-6)
    assert metrics is not None
    assert metrics["loss"] == pytest.approx(1.0)
    assert float(metrics["consensus_effective_rank"]) > 1  # type: ignore[arg-type]
    arrays, _ = strategy.aggregate_train(
        2, [reply(5, sent_factor(5, 2)), reply(9, sent_factor(9))]
    )  # 8 did not reply, 9 is new
    assert torch.allclose(kernel(arrays), mean(sent_factor(8), sent_factor(5, 2), sent_factor(9)), atol=1e-6)


def test_unusable_replies_are_excluded_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    strategy = HeteroSSFLStrategy(12, ALIGNMENT)
    bad = [
        reply(2, sent_factor(2, rows=11)),
        reply(3, torch.full((12, 4), torch.nan)),
        reply(4, 1000 * sent_factor(4)),
        reply(6, sent_factor(6), examples=0),
        reply(7, sent_factor(7), examples=0.5),
        reply(9, sent_factor(9), loss=[1.0, 2.0]),  # comes after 8, whose figures the others must match
        reply(10, sent_factor(10), key="weights"),
    ]
    failed = Message(Error(0, "out of memory"), reply_to=Message(RecordDict(), 11, "train"))
    arrays, _ = strategy.aggregate_train(1, [*bad, failed, reply(8, sent_factor(8))])
    assert torch.allclose(kernel(arrays), mean(sent_factor(8)), atol=1e-6)
    assert set(strategy.state.clients) == {"node 8"}
    assert sum("continues without a reply: node" in text for text in caplog.messages) == len(bad)
    assert strategy.aggregate_train(2, bad[:5]) == (None, None)
    assert set(strategy.state.clients) == {"node 8"}


def test_strategy_accepts_fedavgs_keys_and_refuses_unsupported_settings() -> None:
    strategy = HeteroSSFLStrategy(12, ALIGNMENT, arrayrecord_key="kernel")
    arrays, _ = strategy.aggregate_train(1, [reply(8, sent_factor(8), key="kernel")])
    assert torch.allclose(kernel(arrays), mean(sent_factor(8)), atol=1e-6)
    for wrong in ({"form": "sketch"}, {"leave_one_out": True}):
        with pytest.raises(ConfigError, match="expected 'factor' and False"):
            HeteroSSFLStrategy(12, ALIGNMENT.model_copy(update=wrong))


class TwoNodes(LocalGrid):
    """Nodes of another project's ClientApp, which keeps its state in Flower's Context."""

    def __init__(self, app: Any) -> None:
        super().__init__({7: Path(), 8: Path()})
        self.contexts = {
            node: Context(RUN_ID, node, {"partition-id": k}, RecordDict(), {}) for k, node in enumerate(self.nodes)
        }
        self.app = app

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        set_identity(node)
        reply: Message = decode(encode(self.app(decode(encode(message)), self.contexts[node])))
        set_identity(SERVER_NODE)
        return reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


@pytest.mark.parametrize(("mu", "low", "high"), [(1.0, 0.8, 1.0), (0.0, 0.0, 0.7)])
def test_the_example_aligns_two_different_networks(
    mu: float, low: float, high: float, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(EXAMPLE))
    grid = TwoNodes(example["client_app"])
    example["server_app"](mu)(grid, Context(RUN_ID, SERVER_NODE, {}, RecordDict(), {}))
    assert low < float(capsys.readouterr().out.rsplit(":", 1)[1]) < high
