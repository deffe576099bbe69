"""A method describes itself: what it sends, what it costs, what it warns of. So does a user's subclass."""

import pytest
import torch

from hetero_ssfl.config import load_config
from hetero_ssfl.data import Counts
from hetero_ssfl.federation.server.loop import collapse_warning
from hetero_ssfl.kernels.consensus import MeanKernel
from hetero_ssfl.kernels.mean import Sums
from hetero_ssfl.learning.forward_cost import Work
from hetero_ssfl.learning.learner import build_learner
from hetero_ssfl.methods import HeteroSSFL, Update, method_for
from hetero_ssfl.methods.capabilities import Warnings
from hetero_ssfl.methods.costs import Workload, message_bytes, training_seconds


class Mine(HeteroSSFL):
    name = "mine"


SPEC = f"{__name__}:Mine"
OVERRIDES = ["clients.models=['resnet8(width=4)']", "alignment.rank=8", "alignment.wire=float32"]


def bytes_of(method: str, *overrides: str) -> int | None:
    kind = "simsiam" if method == "fedsimsiam" else "byol"
    config = load_config("smoke", [*OVERRIDES, f"method={method}", f"ssl.kind={kind}", *overrides])
    learner = build_learner(config.model_of(0), config.ssl, 1, 16, 0, classes=10 if method == "fedavg" else None)
    return message_bytes(config, learner, torch.zeros(2, 1, 16, 16))


def test_a_subclass_costs_what_its_parent_costs() -> None:
    rows, rank, bytes_each = load_config("smoke").rad.size, 8, 4
    both_ways = 2 * rows * rank * bytes_each
    own, parents = bytes_of(SPEC), bytes_of("hetero-ssfl")
    assert own == parents
    assert own is not None
    assert own == both_ways


def test_alone_nothing_is_sent() -> None:
    assert bytes_of("local") == 0


@pytest.mark.parametrize("name", ["fedssl", "fedbyol", "fedsimsiam", "fedu", "fedema", "fedavg"])
def test_averaging_costs_the_weights_both_ways(name: str) -> None:
    config = load_config("smoke", OVERRIDES)
    learner = build_learner(config.model_of(0), config.ssl, 1, 16, 0)
    encoder = sum(p.numel() * 4 for p in learner.encoder.parameters())
    sent = bytes_of(name)
    assert sent is not None
    assert sent > 2 * encoder


def test_the_alignment_term_costs_its_steps() -> None:
    work = Workload(Work(1000, 4000, 64, 10**6, 10**5, 10**4, 10), Counts(200, 200, 10), 1, 16)

    def term(*overrides: str) -> float:
        config = load_config("smoke", [*OVERRIDES, "optim.batch=20", "alignment.rad_batch=32", *overrides])
        return sum(v for part, v in training_seconds(config, work).items() if part.startswith("alignment.rad_batch"))

    assert term("method=local") == term("alignment.mu=0") == 0
    assert term() > 0
    assert term("alignment.every=2") == pytest.approx(term() / 2)


def test_warnings_come_from_the_method() -> None:
    ours, alone = method_for(load_config("smoke")), method_for(load_config("smoke", ["method=local"]))
    assert "0.050" in str(collapse_warning(Update(1, metrics={"spread": 0.05})))
    assert collapse_warning(Update(1, metrics={"spread": 0.5})) is None
    assert isinstance(ours, Warnings)
    assert "is only 1.5" in str(ours.round_warning({"consensus_effective_rank": 1.5}))
    assert ours.round_warning({"consensus_effective_rank": 30.0}) is None
    assert not isinstance(alone, Warnings)


@pytest.mark.parametrize("sums", [None, Sums(torch.randn(6, 3), 2.5, 3.0)])
@pytest.mark.parametrize("norms", [None, torch.tensor([0.5, 2.0], dtype=torch.float64)])
def test_the_servers_kernels_survive_saving(sums: Sums | None, norms: torch.Tensor | None) -> None:
    kept = MeanKernel(torch.randn(6, 2), 0.25, sums, norms)
    again = MeanKernel.from_tensors(kept.to_tensors())
    assert again is not None
    assert torch.equal(again.factor, kept.factor)
    assert again.lost == kept.lost
    assert (again.sums is None) == (sums is None)
    if sums is not None and again.sums is not None:
        assert torch.equal(again.sums.sketch, sums.sketch)
        assert (again.sums.trace, again.sums.weight) == (sums.trace, sums.weight)
    assert (again.norms is None) == (norms is None)
    assert MeanKernel.from_tensors({}) is None
