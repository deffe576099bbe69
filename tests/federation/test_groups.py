"""Sums per group (`privacy.groups`): a client that dictates a secure sum dictates that of its own group only."""

from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from torch import Tensor

from helpers.rig import Rig, tensors
from helpers.saved import lines
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError, ProtocolError
from hetero_ssfl.federation.server.loop import Server
from hetero_ssfl.federation.server.sums import SecureRound
from hetero_ssfl.federation.start import start
from hetero_ssfl.federation.wire import roster_of
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.kernels.contribution import packed
from hetero_ssfl.methods import ServerState, Update, method_for
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.privacy.sums.rules import groups_of
from hetero_ssfl.privacy.sums.vectors import Vector
from hetero_ssfl.runs.files import load_tensors

SECURE = ("privacy.secure=true", "alignment.form=sketch", "evaluation.probes=[]", "rad.size=40")
SMALL = "resnet8(width=4)"


@pytest.mark.parametrize("count", [9, 10, 14])
def test_groups_are_as_large_as_possible_and_stay_the_same(count: int) -> None:
    names = [f"client-{k:03d}" for k in range(count)]
    groups = groups_of(names, 3, seed=1)
    assert sorted(name for group in groups for name in group) == names
    assert {len(group) for group in groups} <= {count // 3, -(-count // 3)}
    assert groups_of(names[::-1], 3, seed=1) == groups
    assert groups_of(names, 3, seed=2) != groups
    assert groups_of(names, 1, seed=1) == [names]


def run_of_nine(folder: Path, name: str, groups: int) -> Tensor:
    """Return the consensus of nine clients after round 1."""
    settings = [*SECURE, "clients.count=9", f"clients.models=['{SMALL}']", f"privacy.groups={groups}", f"name={name}"]
    settings += ["method=helpers.attacks:Dictator", "rounds=1", "local_epochs=1", "evaluation.floors=false"]
    settings += ["alignment.distance=cka", "evaluation.untrained=false", "partition.kind=iid", "engine.workers=1"]
    run = start(load_config("smoke", settings), folder, lambda _: None)
    return load_tensors(run.path / "server.safetensors")[0]["factor"]


def test_one_of_nine_dictates_a_sum_but_not_three(tmp_path: Path) -> None:
    found = {groups: run_of_nine(tmp_path / f"lied-{groups}", "liar", groups) for groups in (1, 3)}
    honest = run_of_nine(tmp_path / "honest", "nobody", 3)
    agreement = {groups: float(factor_cka(factor, honest, debiased=True)) for groups, factor in found.items()}
    assert agreement[1] < 0.5, "without groups the consensus is the liar's"
    assert agreement[3] > 0.8


class Groups(Rig):
    def __init__(self, root: Path, *overrides: str) -> None:
        super().__init__(root, *SECURE, "privacy.groups=3", "rounds=1", *overrides, encoders=(SMALL,) * 9)

    def groups(self) -> list[list[str]]:
        return groups_of([f"node-{k}" for k in range(9)], 3, self.config.seed)


def test_each_group_has_its_own_list_of_participants_and_a_lost_one_costs_its_group(tmp_path: Path) -> None:
    rig = Groups(tmp_path)
    lost = rig.groups()[1][0]

    def vanish(question: Message, reply: Message) -> Message:
        trains = question.metadata.message_type == "train"
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=question) if trains else reply

    rig.grid.tamper[100 + int(lost[-1])] = vanish
    rig.run()
    asked = {tuple(sorted(k.name for k in roster_of(m.content))) for m in rig.sent("query.shares")}
    assert asked == {tuple(group) for group in rig.groups()}
    rounds = [event for event in lines(rig.folder) if event["event"] == "round"]
    assert [event["replies"] for event in rounds] == [6, 6]
    assert {name for number, name in rig.excluded() if number == 1} == set(rig.groups()[1])
    assert "shared/factor" in tensors(rig.folder)
    # A node that is away from the start changes no other group.
    server = Server(rig.grid, rig.folder, rig.config, rig.listen)
    present = [f"node-{k}" for k in range(9) if f"node-{k}" != lost]
    sums = SecureRound(server.roster, method(), 2, present, [*present, lost])
    together = {frozenset(n for n in present if sums.of[n] is own) for own in sums.sums}
    assert together == {frozenset(group) - {lost} for group in rig.groups()}


def method() -> HeteroSSFL:
    made = method_for(load_config("smoke", [*SECURE, "clients.count=9", "privacy.groups=3"]))
    assert isinstance(made, HeteroSSFL)
    return made


def sum_of(ssfl: HeteroSSFL, kernels: list[Tensor]) -> tuple[Vector, int, int]:
    total = ssfl.layout().zeros()
    for a in kernels:
        arrays = packed(a, ssfl.config.alignment, ssfl.config.seed, torch.float32)
        total.add(ssfl.summand(Update(1, arrays, {"spread": float(a.shape[1])}), len(kernels)))
    return total, len(kernels), len(kernels)


def factor(*scope: int) -> Tensor:
    rng = torch.Generator().manual_seed(scope[0])
    a = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + 0.3 * torch.randn(40, 6, generator=rng)
    a = a - a.mean(0)
    return a / (a.T @ a).norm().sqrt()


def test_the_consensus_of_groups_is_the_geometric_median_of_their_means() -> None:
    ssfl = method()
    groups = [[factor(3 * g + k) for k in range(3)] for g in range(3)]
    state, metrics, warnings = ssfl.aggregate_groups(ServerState(0, ()), [sum_of(ssfl, group) for group in groups])
    assert metrics["spread"] == pytest.approx(6.0)
    assert warnings == []
    means = torch.stack([torch.stack([a @ a.T for a in group]).mean(0) for group in groups]).double()
    median = means.mean(0)
    for _ in range(500):
        parts = 1 / (means - median).flatten(1).norm(dim=1)
        median = (means * (parts / parts.sum())[:, None, None]).sum(0)
    found = state.shared["factor"].double()
    assert float((found @ found.T - median).norm() / median.norm()) < 1e-3


def test_a_sum_that_is_no_kernel_is_left_out_and_two_of_three_end_the_round() -> None:
    ssfl = method()
    good = [sum_of(ssfl, [factor(3 * g + k) for k in range(3)]) for g in range(2)]
    bad = sum_of(ssfl, [3 * factor(9), factor(10), factor(11)])
    _, _, warnings = ssfl.aggregate_groups(ServerState(0, ()), [*good, bad])
    assert len(warnings) == 1
    with pytest.raises(ProtocolError, match="only 1 of 3 groups"):
        ssfl.aggregate_groups(ServerState(0, ()), [good[0], bad, bad])


@pytest.mark.parametrize(
    "settings",
    [
        ("clients.count=9", "privacy.groups=3"),
        (*SECURE, "clients.count=9", "privacy.groups=2"),
        (*SECURE, "clients.count=8", "privacy.groups=3"),
        (*SECURE, "clients.count=12", "clients.per_round=9", "privacy.groups=3"),
        (*SECURE, "clients.count=9", "privacy.groups=3", "privacy.epsilon=8"),
        (*SECURE, "clients.count=9", "privacy.groups=3", "clients.newcomers=1"),
    ],
)
def test_groups_that_cannot_work_are_refused(settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.groups"):
        load_config("smoke", settings)
