"""Learned weights: agreement with the geometric median of the others, against an independent dense computation."""

import pytest
import torch
from torch import Tensor

from helpers.attacks import ATTACKS, NORM, Knowledge, lie
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.kernels.agreement import PANEL, agreements, drawn, relative, smoothed, weight_of
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.methods import ServerState, Update
from hetero_ssfl.methods.hetero import HeteroSSFL

ROWS, ROUNDS = 60, 6
NAMES = tuple(f"client-{k}" for k in range(7))


def features(seed: int) -> Tensor:
    return torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(seed))


TRUTH = features(99)


def honest(client: int, number: int = 0, own: float = 0.5) -> Tensor:
    """Return the factor of an encoder of its own width and rotation, which sees the same images in its own way."""
    rng = torch.Generator().manual_seed(client)
    turned = TRUTH @ torch.randn(12, 16 + client, generator=rng)
    a = (
        turned / turned.std()
        + own * torch.randn(ROWS, 16 + client, generator=rng)
        + 0.1 * features(100 * number + client)[:, :1]
    )
    return scaled(a)


def scaled(a: Tensor) -> Tensor:
    a = a - a.mean(0)
    return a / (a.T @ a).norm().sqrt()


# --- the mathematics ---


def u_centred(a: Tensor) -> Tensor:
    """Return the kernel as a unit vector whose inner products are debiased CKA (Szekely and Rizzo 2014)."""
    k = (a @ a.T).double().fill_diagonal_(0)
    n = len(k)
    rows = k.sum(0) / (n - 2)
    k = (k - rows - rows[:, None] + k.sum() / ((n - 1) * (n - 2))).fill_diagonal_(0)
    return (k / k.norm()).flatten()


def dense_agreements(factors: list[Tensor]) -> list[float]:
    """Minimise the sum of distances to the others by gradient descent on all entries of the kernel."""
    vectors = torch.stack([u_centred(a) for a in factors])
    found = []
    for k in range(len(factors)):
        others = torch.cat([vectors[:k], vectors[k + 1 :]])
        middle = others.mean(0).clone().requires_grad_()
        descent = torch.optim.LBFGS([middle], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

        def total(middle: Tensor = middle, others: Tensor = others, descent: torch.optim.Optimizer = descent) -> Tensor:
            descent.zero_grad()
            sum_of_distances = (others - middle).norm(dim=1).sum()
            sum_of_distances.backward()
            return sum_of_distances

        descent.step(total)
        found.append(float(vectors[k] @ middle.detach() / middle.detach().norm()))
    return found


def test_agreements_are_those_of_a_dense_computation() -> None:
    factors = [honest(k) for k in range(5)] + [scaled(features(5)), scaled(TRUTH[:, :2])]
    assert agreements(factors) == pytest.approx(dense_agreements(factors), abs=2e-4)


def test_agreements_do_not_depend_on_order_rotation_scale_or_half_precision() -> None:
    factors = [honest(k) for k in range(6)]
    before = agreements(factors)
    assert agreements(factors[::-1]) == pytest.approx(before[::-1], abs=1e-6)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))[0]
    assert agreements([3 * factors[0] @ turn, *factors[1:]]) == pytest.approx(before, abs=1e-5)
    assert agreements([factors[0].half(), *factors[1:]]) == pytest.approx(before, abs=2e-3)
    assert agreements([factors[0].flip(0), *factors[1:]])[0] < 0.3 * before[0]


def test_clients_beside_the_panel_are_compared_with_all_of_it() -> None:
    """A client that the panel ignores agrees with the median of the panel, in which everybody counts."""
    panel = [honest(k) for k in range(5)]
    with_all = agreements([*panel, panel[0]])  # of the last one, the others are the panel
    beside = agreements(panel, [panel[0]])
    assert beside[:5] == pytest.approx(agreements(panel), abs=1e-7)
    assert beside[5] == pytest.approx(with_all[5], abs=1e-7)


def test_panel_and_images_follow_from_what_clients_reported() -> None:
    names = [f"c{k:02d}" for k in range(PANEL + 10)]
    panel, rows = drawn(names, 1000, 0, 3, "{'loss_ssl': 0.5}")
    assert (len(panel), len(set(rows.tolist()))) == (PANEL, 256)
    again, same = drawn(names, 1000, 0, 3, "{'loss_ssl': 0.5}")
    assert (panel, rows.tolist()) == (again, same.tolist())
    other, moved = drawn(names, 1000, 0, 3, "{'loss_ssl': 0.50001}")
    assert panel != other
    assert rows.tolist() != moved.tolist()


def test_fractions_and_weights() -> None:
    assert relative([0.6, 0.3, 0.9, -0.1, 0.6]) == pytest.approx([1.0, 0.5, 1.0, 0.0, 1.0])
    assert relative([0.01, 0.001, -0.01]) == [1.0, 1.0, 1.0]  # no consensus, no liars
    assert [weight_of(v) for v in (0.0, 0.4, 0.6, 0.8, 1.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    assert smoothed(None, 0.2) == 0.2
    assert smoothed(1.0, 0.0) == 0.5


# --- over the rounds, in the method ---


def method(count: int = 5, *overrides: str) -> HeteroSSFL:
    settings = [f"clients.count={count}", f"rad.size={ROWS}", "clients.weights=agreement", "alignment.distance=cka"]
    return HeteroSSFL(load_config("smoke", ["alignment.form=factor", *settings, *overrides]))


def update(factor: Tensor) -> Update:
    return Update(1, {"factor": factor}, {"effective_rank": float(factor.sum())})


def weights_of(ssfl: HeteroSSFL, state: ServerState) -> dict[str, float]:
    return dict(ssfl.kernel_snapshot(state)["weights"])


def play(ssfl: HeteroSSFL, liars: int, attack: str, count: int = 5, rounds: int = ROUNDS) -> list[dict[str, float]]:
    """Play rounds in which the last clients lie. Return the weights of each."""
    state, seen = ServerState(-1, NAMES[:count]), []
    for number in range(rounds + 1):
        updates = {}
        for k, name in enumerate(state.roster):
            own = honest(k, number)
            down = ssfl.broadcast(state, name).arrays.get("factor", own)
            known = Knowledge(own, down, features(7), number, rounds, seed=k)
            updates[name] = update(lie(attack, known) if k >= count - liars else own)
            ssfl.check(state, name, updates[name])  # a lie is well-formed
        state = ssfl.aggregate(state, updates)
        seen.append(weights_of(ssfl, state))
    return seen


STRANGE = ("random features", "permuted rows", "constant", "same lie")


@pytest.mark.parametrize(("count", "liars"), [(5, 1), (7, 2)])
@pytest.mark.parametrize("attack", STRANGE)
def test_a_persistent_liar_counts_nothing_and_honest_clients_count_all(attack: str, count: int, liars: int) -> None:
    for weights in play(method(count), liars, attack, count):
        honest_ones, bad = NAMES[: count - liars], NAMES[count - liars : count]
        assert [weights[name] for name in bad] == [0.0] * liars
        assert [weights[name] for name in honest_ones] == [1.0] * len(honest_ones)


def test_a_client_that_turns_at_half_time_loses_its_voice_within_two_rounds() -> None:
    weights = [seen["client-4"] for seen in play(method(), 1, "honest until half-time")]
    assert weights[:4] == [1.0] * 4
    assert 0 < weights[4] < 0.6
    assert weights[5:] == [0.0, 0.0]


def test_an_outlier_once_is_noise() -> None:
    ssfl, state, seen = method(), ServerState(-1, NAMES[:5]), []
    for number in range(5):
        updates = {name: update(honest(k, number)) for k, name in enumerate(state.roster)}
        if number == 2:
            updates["client-4"] = update(scaled(features(1)))
        state = ssfl.aggregate(state, updates)
        seen.append(weights_of(ssfl, state)["client-4"])
    assert seen[:2] == [1.0, 1.0]
    assert 0.1 < seen[2] < 0.6
    assert seen[3:] == [pytest.approx(0.9, abs=0.1), 1.0]


def test_a_liar_below_the_threshold_sends_what_agrees_with_the_others() -> None:
    """It keeps a weight, and what it can do with it is one client's part of a kernel that is mostly the consensus."""
    ssfl = method()
    weight = play(ssfl, 1, "below the threshold")[-1]["client-4"]
    assert weight > 0.5
    clean, spoilt = (consensus_with(attack) for attack in (None, "below the threshold"))
    assert float(factor_cka(clean, spoilt, debiased=True)) > 0.95


def consensus_with(attack: str | None) -> Tensor:
    ssfl, start = method(), ServerState(-1, NAMES[:5])
    updates = {name: update(honest(k)) for k, name in enumerate(NAMES[:5])}
    state = ssfl.aggregate(start, updates)
    if attack:
        known = Knowledge(honest(4), state.shared["factor"], features(7), 1, ROUNDS)
        state = ssfl.aggregate(state, {**updates, "client-4": update(lie(attack, known))})
    return state.shared["factor"]


def test_a_client_with_rare_images_keeps_its_voice() -> None:
    """Its kernel has twice as much of its own as of what all have in common; others have a fifth."""
    ssfl, state = method(), ServerState(-1, NAMES[:5])
    for number in range(4):
        updates = {name: update(honest(k, number, own=1.2 if k == 4 else 0.5)) for k, name in enumerate(state.roster)}
        state = ssfl.aggregate(state, updates)
    weights = weights_of(ssfl, state)
    assert ssfl.kernel_snapshot(state)["agreement"]["client-4"] < 0.9
    assert weights["client-4"] > 0.5
    assert all(weights[name] == 1.0 for name in NAMES[:4])


def test_the_mean_kernel_has_the_learned_weights() -> None:
    ssfl = method()
    updates = {name: update(honest(k, own=1.6 if k == 4 else 0.5)) for k, name in enumerate(NAMES[:5])}
    state = ssfl.aggregate(ServerState(-1, NAMES[:5]), updates)
    weights = torch.tensor([ssfl.weight(state, name) for name in NAMES[:5]])
    assert 0 < weights[4] < 1
    kernels = torch.stack([update.arrays["factor"] @ update.arrays["factor"].T for update in updates.values()])
    expected = (kernels * weights[:, None, None]).sum(0) / weights.sum()
    found = state.shared["factor"] @ state.shared["factor"].T
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("rank", [512, 8])  # all factors as they are, or running sums
def test_idle_clients_keep_their_value_and_the_mean_follows_the_weights(rank: int) -> None:
    ssfl, state = method(5, f"alignment.rank={rank}"), ServerState(-1, NAMES[:5])
    everyone = {name: update(honest(k)) for k, name in enumerate(NAMES[:5])}
    everyone["client-4"] = update(scaled(features(1)))
    if rank < 20:
        everyone = {name: update(u.arrays["factor"][:, :8]) for name, u in everyone.items()}
    state = ssfl.aggregate(state, everyone)
    before = ssfl.kernel_snapshot(state)["agreement"]
    after = ssfl.aggregate(state, {"client-4": update(everyone["client-0"].arrays["factor"])})
    found = ssfl.kernel_snapshot(after)["agreement"]
    assert {name: found[name] for name in NAMES[:4]} == {name: before[name] for name in NAMES[:4]}
    assert found["client-4"] > before["client-4"]
    arrays = {
        **{name: u.arrays["factor"] for name, u in everyone.items()},
        "client-4": everyone["client-0"].arrays["factor"],
    }
    weights = [ssfl.weight(after, name) for name in NAMES[:5]]
    mean = sum(w * a @ a.T for w, a in zip(weights, arrays.values(), strict=True)) / sum(weights)
    assert isinstance(mean, Tensor)
    assert torch.allclose(ssfl.mean_kernel(after, after, []).factor, after.shared["factor"])
    kept = after.shared["factor"] @ after.shared["factor"].T
    assert float((kept - mean).norm() / mean.norm()) < (1e-5 if rank == 512 else 0.5)


def test_lies_have_the_largest_norm_that_is_allowed() -> None:
    known = Knowledge(honest(0), honest(1), features(7), 2, ROUNDS)
    for attack in ATTACKS:
        a = lie(attack, known)
        assert float((a.T @ a).norm()) == pytest.approx(NORM, abs=1e-4)


@pytest.mark.parametrize(
    ("setting", "refused"),
    [("privacy.secure=true", "privacy.secure"), ("alignment.form=sketch", "clients.weights")],
)
def test_learned_weights_need_single_factors(setting: str, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        load_config("smoke", ["clients.weights=agreement", "alignment.form=sketch", setting])
