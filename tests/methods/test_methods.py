"""Tests that every registered method must pass, and tests of each method."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.blocks import ROOT, blocks_of
from hetero_ssfl.config import AlignmentConfig, Config, load_config
from hetero_ssfl.data import to_input
from hetero_ssfl.errors import ConfigError, ProtocolError
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.kernels.contribution import contribution, packed
from hetero_ssfl.kernels.distance import alignment_distance
from hetero_ssfl.kernels.factor import kernel_factor
from hetero_ssfl.kernels.mean import sketch, sketching_matrix
from hetero_ssfl.learning.alignment import Alignment, mu_at
from hetero_ssfl.learning.learner import build_learner
from hetero_ssfl.learning.training import Step, TrainingClient, learning_rate, rad_representations, train
from hetero_ssfl.methods import METHODS, Broadcast, Method, ServerState, Update, method_class, method_for
from hetero_ssfl.methods.averaging import average
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.seeding import rng_for

SMALL = [
    "clients.count=2",
    "clients.models=['resnet8(width=4)']",
    "rad.size=16",
    "alignment.rad_batch=8",
    "optim.batch=8",
]


def config_with(*overrides: str) -> Config:
    config = load_config("smoke", [*SMALL, *overrides])
    kind = METHODS[config.method].ssl_kind if config.method in METHODS else None  # a test may name an unknown one
    return load_config("smoke", [*SMALL, *overrides, *([f"ssl.kind={kind}"] if kind else [])])


def plain(config: Config) -> AlignmentConfig:
    """Return the alignment with factors instead of sketches."""
    return config.alignment.model_copy(update={"form": "factor"})


def make_client(config: Config, number: int = 0) -> TrainingClient:
    rng = rng_for(0, "pixels", number)
    pixels = torch.randint(0, 256, (20, 1, 16, 16), generator=rng, dtype=torch.uint8)
    rad = torch.randint(0, 256, (config.rad.size, 1, 16, 16), generator=rng_for(0, "rad"), dtype=torch.uint8)
    classes = 3 if method_class(config.method).needs_labels else None
    learner = build_learner(config.model_of(number), config.ssl, 1, 16, config.seed, "init", number, classes=classes)
    labels = torch.arange(20) % 3 if classes else None
    return TrainingClient(f"client-{number}", config, learner, pixels, rad, labels)


def play(method: Method, config: Config, rounds: int) -> tuple[ServerState, list[TrainingClient]]:
    """Run the server loop without an engine."""
    clients = [make_client(config, k) for k in range(config.clients.count)]
    state = ServerState(0 if method.opening == "nobody" else -1, tuple(c.name for c in clients))
    while state.round < rounds:
        asked = clients[:1] if state.round < 0 and method.opening == "first" else clients
        updates = {c.name: method.local_update(c, method.broadcast(state, c.name)) for c in asked}
        for name, update in updates.items():
            method.check(state, name, update)
        state = method.aggregate(state, updates)
    return state, clients


def total(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return cast(torch.Tensor, sum(tensors))  # 0 only for no tensors


def parameters(client: TrainingClient) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in client.learner.state_dict().values()])


(OWN_METHOD,) = (block for block in blocks_of(ROOT / "docs" / "methods.md") if block.file == "my_method.py")
"""The example of the docs, which has to pass the same tests as a built-in method."""


@pytest.fixture
def my_method(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_method")
    exec(compile(OWN_METHOD.text, str(OWN_METHOD), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "my_method", module)


def test_the_own_method_of_the_docs_has_at_most_15_lines() -> None:
    code = [line for line in OWN_METHOD.text.splitlines() if line and not line.startswith("#")]
    assert len(code) <= 15


@pytest.mark.usefixtures("my_method")
@pytest.mark.parametrize("name", [*METHODS, "my_method:Spread"])
class TestEveryMethod:
    def test_trains_every_client_and_counts_rounds(self, name: str) -> None:
        config = config_with(f"method={name}")
        state, clients = play(method_for(config), config, rounds=2)
        assert state.round == 2
        for client in clients:
            fresh = make_client(config, int(client.name[-1]))
            assert client.round == 2
            assert not torch.equal(parameters(client), parameters(fresh))
            assert parameters(client).isfinite().all()

    def test_gives_the_same_bits_again(self, name: str) -> None:
        config = config_with(f"method={name}")
        (state, clients), (state_2, clients_2) = (play(method_for(config), config, rounds=1) for _ in range(2))
        assert all(torch.equal(parameters(a), parameters(b)) for a, b in zip(clients, clients_2, strict=True))
        assert all(torch.equal(value, state_2.shared[key]) for key, value in state.shared.items())

    def test_refuses_a_reply_that_is_not_finite(self, name: str) -> None:
        config = config_with(f"method={name}")
        bad = Update(1, {"factor": torch.full((16, 4), float("nan"))})
        with pytest.raises(ProtocolError, match=r"client-9.*not finite"):
            method_for(config).check(ServerState(0, ("client-9",)), "client-9", bad)

    def test_does_not_change_the_state_it_is_given(self, name: str) -> None:
        config = config_with(f"method={name}")
        method = method_for(config)
        state, clients = play(method, config, rounds=1)
        before = {k: v.clone() for k, v in state.shared.items()}
        method.aggregate(state, {c.name: method.local_update(c, method.broadcast(state, c.name)) for c in clients})
        assert state.round == 1
        assert all(torch.equal(before[k], state.shared[k]) for k in before)


@pytest.mark.parametrize("kind", ["byol", "simsiam"])
def test_mu_zero_is_exactly_local_ssl(kind: str) -> None:
    together = config_with("alignment.mu=0", f"ssl.kind={kind}")
    alone = config_with("method=local", f"ssl.kind={kind}")
    _, peers = play(method_for(together), together, rounds=2)
    _, loners = play(method_for(alone), alone, rounds=2)
    assert all(torch.equal(parameters(a), parameters(b)) for a, b in zip(peers, loners, strict=True))


def test_each_round_and_epoch_draws_anew() -> None:
    """The batches, the generator of the alignment term, and the global one of user code."""
    client, drawn = make_client(config_with("local_epochs=2")), dict[int, list[tuple[object, ...]]]()

    def watch(learner: object, rng: torch.Generator, step: Step) -> torch.Tensor:
        now.append((tuple(step.rows.tolist()), float(torch.rand((), generator=rng)), float(torch.rand(()))))
        return torch.zeros(())

    for number in (1, 2):
        now = drawn.setdefault(number, [])
        train(client, number, watch)
    for one in zip(*drawn[1], *drawn[2], strict=True):
        assert len(set(one)) == len(one) >= 8


def test_mu_above_zero_is_not_local_ssl() -> None:
    together, alone = config_with("alignment.mu=1"), config_with("method=local")
    _, peers = play(method_for(together), together, rounds=1)
    _, loners = play(method_for(alone), alone, rounds=1)
    assert not torch.equal(parameters(peers[0]), parameters(loners[0]))


def test_the_alignment_term_falls_as_clients_train() -> None:
    config = config_with("alignment.mu=4", "alignment.augment_rad=false", "local_epochs=8", "optim.schedule=constant")
    method = method_for(config)
    state, clients = play(method, config, rounds=1)
    terms = [method.local_update(clients[0], method.broadcast(state, "client-0")).metrics["loss_alignment"]]
    for number in (2, 3):
        down = Broadcast(number + 1, state.shared)  # the same consensus again: only the client changes
        terms.append(method.local_update(clients[0], down).metrics["loss_alignment"])
    assert terms[2] < terms[1] < terms[0]


def test_a_client_that_was_not_selected_keeps_its_contribution() -> None:
    config = config_with()
    method = HeteroSSFL(config)
    state, clients = play(method, config, rounds=1)
    update = method.local_update(clients[0], method.broadcast(state, "client-0"))
    after = method.aggregate(state, {"client-0": update})
    assert torch.equal(after.clients["client-1"]["factor"], state.clients["client-1"]["factor"])
    assert not torch.equal(after.clients["client-0"]["factor"], state.clients["client-0"]["factor"])
    kernels = [c["factor"].double() @ c["factor"].double().T for c in after.clients.values()]
    factor = after.shared["factor"].double()
    assert torch.allclose(factor @ factor.T, total(kernels) / 2, atol=1e-6)


def test_the_cached_factor_of_an_idle_client_is_current() -> None:
    config = config_with()
    state, clients = play(HeteroSSFL(config), config, rounds=1)
    now = contribution(rad_representations(clients[1]), plain(config)).arrays["factor"]
    assert torch.equal(now, state.clients["client-1"]["factor"])


@pytest.mark.parametrize(
    ("weights", "expected"), [("uniform", [0.5, 0.5]), ("size", [0.25, 0.75]), ("[1.0, 4.0]", [0.2, 0.8])]
)
def test_the_consensus_is_weighted_as_the_config_says(weights: str, expected: list[float]) -> None:
    config = config_with(f"clients.weights={weights}", "alignment.rank=64")
    factors = [torch.randn(16, 3, generator=rng_for(k)) for k in range(2)]
    updates = {f"client-{k}": Update(10 * (1 + 2 * k), {"factor": factors[k]}) for k in range(2)}
    state = HeteroSSFL(config).aggregate(ServerState(0, ("client-0", "client-1")), updates)
    mean = total(w * f @ f.T for w, f in zip(expected, factors, strict=True))
    assert torch.allclose(state.shared["factor"] @ state.shared["factor"].T, mean, atol=1e-5)


def test_leave_one_out_sends_a_client_only_the_others() -> None:
    config = config_with("alignment.leave_one_out=true")
    state, _ = play(HeteroSSFL(config), config, rounds=1)
    sent = HeteroSSFL(config).broadcast(state, "client-0").arrays["factor"].double()
    other = state.clients["client-1"]["factor"].double()
    assert torch.allclose(sent @ sent.T, other @ other.T, atol=1e-6)


def random_factor(*scope: int) -> torch.Tensor:
    a = torch.randn(16, 5, generator=rng_for(*scope), dtype=torch.float64)
    return (a / (a.T @ a).norm().sqrt()).float()


@given(rounds=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6), size=st.booleans())
@settings(max_examples=30)
def test_beyond_the_rank_the_mean_is_exact_and_only_changed_clients_are_read(
    rounds: list[set[int]], size: bool
) -> None:
    """Six factors of five columns do not fit into 20 columns, but the sums hold all 16 images and must be exact."""
    method = HeteroSSFL(config_with("alignment.rank=20", *(["clients.weights=size"] if size else [])))
    names = tuple(f"client-{k}" for k in range(6))
    newest: dict[str, Update] = {}
    state = ServerState(-1, names)
    for number, chosen in enumerate([set(range(6)), *rounds]):
        updates = {names[k]: Update(1 + number + k, {"factor": random_factor(k, number)}) for k in sorted(chosen)}
        looked_at = {n: newest[n].arrays if n in updates else Unread() for n in newest}
        state = method.aggregate(replace(state, clients=looked_at), updates)
        newest |= updates
        weights = {n: u.examples if size else 1 for n, u in newest.items()}
        mean = total(weights[n] * kernel(u.arrays["factor"]) for n, u in newest.items()) / sum(weights.values())
        assert torch.allclose(kernel(state.shared["factor"]), mean, atol=1e-5)


class Unread(dict[str, torch.Tensor]):
    """A contribution that must not be read."""

    def __getitem__(self, key: str) -> torch.Tensor:
        raise AssertionError("read a client that has not changed")


def test_leave_one_out_subtracts_the_clients_own_factor_from_the_sums() -> None:
    config = config_with("alignment.rank=16", "alignment.leave_one_out=true", "clients.count=4")
    updates = {f"client-{k}": Update(1, {"factor": random_factor(k)}) for k in range(4)}
    state = HeteroSSFL(config).aggregate(ServerState(0, tuple(updates)), updates)
    assert "sums" in state.shared
    sent = HeteroSSFL(config).broadcast(state, "client-2").arrays
    assert set(sent) == {"factor"}
    others = total(kernel(random_factor(k)) for k in (0, 1, 3)) / 3
    assert torch.allclose(kernel(sent["factor"]), others, atol=1e-5)


def unscaled(*overrides: str) -> tuple[HeteroSSFL, ServerState]:
    """Return the state of ten clients with unnormalised kernels after the opening, where client-9's was very large."""
    method = HeteroSSFL(config_with("alignment.normalize=false", "clients.count=10", *overrides))
    updates = {f"client-{k}": Update(1, {"factor": (1e9 if k == 9 else 1) * random_factor(k)}) for k in range(10)}
    return method, method.aggregate(ServerState(-1, tuple(updates)), updates)


def test_a_client_cannot_raise_the_bound_on_norms_by_itself() -> None:
    method, state = unscaled()
    for _ in range(3):
        fine, wild = (Update(1, {"factor": scale * random_factor(9)}) for scale in (20.0, 200.0))  # squared in a kernel
        method.check(state, "client-9", fine)
        with pytest.raises(ProtocolError, match="outweigh"):
            method.check(state, "client-9", wild)
        state = method.aggregate(state, {"client-9": fine})


def test_sums_are_exact_after_an_extreme_contribution_is_replaced() -> None:
    """1e18 + x - 1e18 is not x, so contributions that lost digits must be read again."""
    method, state = unscaled("alignment.rank=20")
    assert "sums" in state.shared
    state = method.aggregate(state, {"client-9": Update(1, {"factor": random_factor(9)})})
    mean = total(kernel(random_factor(k)) for k in range(10)) / 10
    assert torch.allclose(kernel(state.shared["factor"]), mean, atol=1e-5)


@pytest.mark.parametrize(
    "trace", [torch.tensor([1 + 1j]), torch.tensor([1e30]), torch.tensor([-1.0]), torch.tensor([1]), torch.ones(2)]
)
def test_an_impossible_trace_is_refused(trace: torch.Tensor) -> None:
    config = config_with(*SKETCH)
    omega = sketching_matrix(16, 16, config.seed)
    sent = sketch(random_factor(0), omega)
    HeteroSSFL(config).check(ServerState(0, ()), "client-0", Update(1, {"sketch": sent, "trace": torch.ones(1)}))
    with pytest.raises(ProtocolError, match="client-0 sent a trace"):
        HeteroSSFL(config).check(ServerState(0, ()), "client-0", Update(1, {"sketch": sent, "trace": trace}))


def test_a_snapshot_contains_mutual_cka_and_spectrum() -> None:
    factors = [
        random_factor(0),
        random_factor(0) @ torch.linalg.qr(torch.randn(5, 5, generator=rng_for(3))).Q,
        random_factor(1),
    ]
    updates = {f"client-{k}": Update(1, {"factor": a}) for k, a in enumerate(factors)}
    method = HeteroSSFL(config_with("clients.count=3"))
    assert method.kernel_snapshot(ServerState(0, tuple(updates))) == {}
    snapshot = json.loads(json.dumps(method.kernel_snapshot(method.aggregate(ServerState(0, tuple(updates)), updates))))
    assert snapshot["clients"] == list(updates)
    assert snapshot["mutual_cka"][0][1] == pytest.approx(1, abs=1e-3)
    assert abs(snapshot["mutual_cka"][0][2]) < 0.6
    assert sum(snapshot["spectrum"]) == pytest.approx(1, abs=1e-2)
    assert snapshot["spectrum"] == sorted(snapshot["spectrum"], reverse=True)


@pytest.mark.parametrize("shape", [(15, 4), (16,), (16, 0), (16, 2, 2), (16, 513)])
def test_representations_of_another_rad_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="client-0 sent representations"):
        HeteroSSFL(config_with()).check(ServerState(0, ()), "client-0", Update(1, {"factor": torch.zeros(shape)}))


# A sketch with as many columns as RAD images is exact, so the two forms must agree.
SKETCH = ["alignment.form=sketch", "alignment.rank=16"]


def kernel(factor: torch.Tensor) -> torch.Tensor:
    return factor.double() @ factor.double().T


def sketch_state(config: Config, factors: list[torch.Tensor]) -> ServerState:
    """Return the server's state after clients with these factors have sent their sketches."""
    omega = sketching_matrix(config.rad.size, config.alignment.rank, config.seed)
    wire = getattr(torch, config.alignment.wire)
    updates = {
        f"client-{k}": Update(1, {"sketch": sketch(a, omega).to(wire), "trace": a.square().sum().view(1)})
        for k, a in enumerate(factors)
    }
    return HeteroSSFL(config).aggregate(ServerState(0, tuple(updates)), updates)


def test_a_run_in_sketch_form_ends_near_the_run_in_factor_form() -> None:
    by_factor, by_sketch = config_with("alignment.rank=16"), config_with(*SKETCH)
    (state, peers), (state_2, peers_2) = (play(HeteroSSFL(c), c, rounds=2) for c in (by_factor, by_sketch))
    assert float(factor_cka(state.shared["factor"], state_2.shared["factor"])) > 0.9999
    assert torch.allclose(kernel(state.shared["factor"]), kernel(state_2.shared["factor"]), atol=1e-3)
    assert all(torch.allclose(parameters(a), parameters(b), atol=1e-3) for a, b in zip(peers, peers_2, strict=True))
    assert HeteroSSFL(by_sketch).metrics(state_2)["consensus_lost_share"] < 1e-3


def test_a_narrow_sketch_reports_the_lost_fraction() -> None:
    config = config_with("alignment.form=sketch", "alignment.rank=4")
    state, clients = play(HeteroSSFL(config), config, rounds=0)
    exact = total(kernel(kernel_factor(rad_representations(c), config.alignment)) for c in clients) / 2
    y = exact @ sketching_matrix(16, 4, config.seed)
    expected = y @ torch.linalg.pinv(sketching_matrix(16, 4, config.seed).T @ y) @ y.T
    assert torch.allclose(kernel(state.shared["factor"]), expected, atol=1e-5)
    missing = 1 - float(expected.trace() / exact.trace())
    assert HeteroSSFL(config).metrics(state)["consensus_lost_share"] == pytest.approx(missing, abs=1e-4)
    assert missing > 0.05


@pytest.mark.parametrize("clients", [1, 3])
def test_the_lost_fraction_counts_what_each_client_cut_off_itself(clients: int) -> None:
    """Factors of 12 columns, of which a client may send 3 and the server may keep 3."""
    config = config_with("alignment.rank=3", f"clients.count={clients}")
    method = HeteroSSFL(config)
    whole = [torch.randn(16, 12, generator=rng_for(k), dtype=torch.float64) for k in range(clients)]
    whole = [a / kernel(a).norm().sqrt() for a in whole]
    updates = {
        f"client-{k}": Update(1, packed(a, method.config.alignment, method.config.seed)) for k, a in enumerate(whole)
    }
    opening = ServerState(-1, tuple(updates))
    for name, update in updates.items():
        method.check(opening, name, update)
    state = method.aggregate(opening, updates)
    exact = total(kernel(a) for a in whole) / clients
    missing = 1 - float(kernel(state.shared["factor"]).trace() / exact.trace())
    assert missing > 0.3
    assert method.metrics(state)["consensus_lost_share"] == pytest.approx(missing, abs=1e-4)


def test_a_factor_that_is_not_cut_is_sent_alone() -> None:
    sent = packed(torch.randn(16, 12, dtype=torch.float64), config_with("alignment.rank=12").alignment)
    assert set(sent) == {"factor"}


def test_rounding_on_the_wire_adds_no_directions() -> None:
    config = config_with(*SKETCH, "alignment.wire=float16")
    a = torch.randn(16, 3, generator=rng_for(0), dtype=torch.float64)
    assert sketch_state(config, [a / kernel(a).norm().sqrt()]).shared["factor"].shape == (16, 3)


def test_the_consensus_of_sketches_depends_only_on_their_weighted_sum() -> None:
    a, b = (torch.randn(16, width, generator=rng_for(width), dtype=torch.float64) for width in (3, 5))
    two = sketch_state(config_with(*SKETCH, "clients.weights=[2.0, 1.0]"), [a, b])
    halves = sketch_state(config_with(*SKETCH, "clients.count=3"), [a, a, b])
    turned = sketch_state(config_with(*SKETCH, "clients.count=3"), [a, b, a])
    other = sketch_state(config_with(*SKETCH, "clients.weights=[1.0, 1.0]"), [a, b])
    expected = kernel(two.shared["factor"])
    assert torch.allclose(expected, (2 * a @ a.T + b @ b.T) / 3, atol=1e-5)
    assert torch.allclose(kernel(halves.shared["factor"]), expected, atol=1e-5)
    assert torch.allclose(kernel(turned.shared["factor"]), expected, atol=1e-5)
    assert not torch.allclose(kernel(other.shared["factor"]), expected, atol=1e-1)
    assert two.shared["lost"] < 1e-5


def test_leave_one_out_subtracts_the_clients_own_sketch_from_the_sum() -> None:
    config = config_with("alignment.leave_one_out=true", *SKETCH)
    state, clients = play(HeteroSSFL(config), config, rounds=1)
    sent = HeteroSSFL(config).broadcast(state, "client-0").arrays["factor"]
    other = contribution(rad_representations(clients[1]), plain(config)).arrays["factor"]
    assert torch.allclose(kernel(sent), kernel(other), atol=1e-5)


def test_the_sketch_of_a_client_that_was_not_selected_stays_in_the_sum() -> None:
    config = config_with(*SKETCH)
    method = HeteroSSFL(config)
    state, clients = play(method, config, rounds=1)
    after = method.aggregate(state, {"client-0": method.local_update(clients[0], method.broadcast(state, "client-0"))})
    exact = total(kernel(contribution(rad_representations(c), plain(config)).arrays["factor"]) for c in clients) / 2
    assert torch.allclose(kernel(after.shared["factor"]), exact, atol=1e-5)
    assert not torch.allclose(kernel(state.shared["factor"]), exact, atol=1e-5)


@pytest.mark.parametrize(
    ("rank", "width", "shape"),
    [(8, 8, (15, 8)), (8, 8, (16, 7)), (8, 8, (16, 9)), (8, 8, (16,)), (8, 8, (16, 2, 4)), (512, 16, (16, 17))],
)
def test_a_sketch_of_any_other_shape_is_refused(rank: int, width: int, shape: tuple[int, ...]) -> None:
    method = HeteroSSFL(config_with("alignment.form=sketch", f"alignment.rank={rank}"))
    good = {"sketch": torch.ones(16, width), "trace": torch.ones(1)}
    method.check(ServerState(0, ()), "client-0", Update(1, good))
    with pytest.raises(ProtocolError, match="client-0 sent representations"):
        method.check(ServerState(0, ()), "client-0", Update(1, {**good, "sketch": torch.full(shape, 0.1)}))


@pytest.mark.parametrize("arrays", [{}, {"trace": torch.ones(2)}])
def test_a_sketch_without_one_trace_is_refused(arrays: dict[str, torch.Tensor]) -> None:
    method = HeteroSSFL(config_with(*SKETCH))
    with pytest.raises(ProtocolError, match=r"client-0.*trace"):
        method.check(ServerState(0, ()), "client-0", Update(1, {"sketch": torch.ones(16, 16), **arrays}))


def term_of_one_step(layer: str, mu: float) -> tuple[TrainingClient, torch.Tensor, torch.Tensor]:
    """Return a client, a consensus, and the alignment term on the whole RAD without augmentation."""
    client = make_client(config_with("alignment.rad_batch=0", "alignment.augment_rad=false", layer))
    client.learner.eval()
    consensus = torch.randn(16, 5, generator=rng_for(1))
    return client, consensus, Alignment(client, consensus, mu)(client.learner, rng_for(2), step_of(0))


def test_a_step_aligns_on_rows_of_the_consensus() -> None:
    """The term equals mu * distance computed by hand on the same RAD images."""
    client, consensus, term = term_of_one_step("alignment.layer=projector", mu=3.0)
    by_hand = alignment_distance(rad_representations(client), consensus, client.config.alignment)
    assert float(term.detach()) == pytest.approx(3 * float(by_hand), abs=1e-4)


def test_the_compared_layer_can_differ_from_the_sent_one() -> None:
    """The client sends its encoder's output; the term is the distance of its projector's output."""
    client, consensus, term = term_of_one_step("alignment.live_layer=projector", mu=1.0)
    projected = client.learner.represent(to_input(client.rad), "projector")
    assert float(term.detach()) == pytest.approx(
        float(alignment_distance(projected, consensus, client.config.alignment).detach()), abs=1e-4
    )
    sent = client.learner.represent(to_input(client.rad), "encoder")
    assert torch.allclose(rad_representations(client), sent, atol=1e-5)
    assert projected.shape[1] != sent.shape[1]


def test_the_term_can_be_added_once_per_epoch() -> None:
    config = config_with("alignment.when=epoch")
    client = make_client(config)
    term = Alignment(client, torch.randn(16, 5, generator=rng_for(1)), mu=1.0)
    assert [float(term(client.learner, rng_for(2), step_of(step)).detach()) > 0 for step in range(3)] == [
        True,
        False,
        False,
    ]


def test_a_diverging_client_raises_an_error() -> None:
    client = make_client(config_with("optim.lr=1e30"))
    with pytest.raises(FloatingPointError, match=r"client-0.*lower optim\.lr"):
        train(client, 1)
    assert client.round == 0


def test_memory_adds_rows_without_repeating_any() -> None:
    config = config_with("alignment.memory=8", "alignment.rad_batch=6", "alignment.augment_rad=false")
    client = make_client(config)
    client.learner.eval()
    alignment = Alignment(client, torch.randn(16, 5, generator=rng_for(1)), mu=1.0)
    everything = client.learner.represent((client.rad.float() / 255 - 0.5) / 0.25, "encoder")
    rng = rng_for(3)
    for step in range(6):
        rows = torch.randperm(16, generator=rng)[:6]
        all_rows, representations = alignment._with_memory(rows, everything[rows])
        assert len(set(all_rows.tolist())) == len(all_rows)
        assert len(all_rows) <= 14
        assert step == 0 or len(all_rows) > 6
        assert torch.allclose(representations, everything[all_rows], atol=1e-5)
    assert sum(len(r) for r, _ in alignment.memory) <= 8 + 6


def test_only_the_rows_of_the_current_step_have_a_gradient() -> None:
    config = config_with("alignment.memory=100", "alignment.rad_batch=8")
    alignment = Alignment(make_client(config), torch.randn(16, 5), mu=1.0)
    alignment._with_memory(torch.arange(8), torch.randn(8, 3, requires_grad=True))
    _, representations = alignment._with_memory(torch.arange(8, 16), torch.randn(8, 3, requires_grad=True))
    assert len(representations) == 16
    assert representations.requires_grad
    assert not any(remembered.requires_grad for _, remembered in alignment.memory)


def step_of(number: int) -> Step:
    return Step(number, torch.arange(0), ())


def test_the_term_compares_the_neighbourhoods_of_the_steps_own_images_among_all_remembered_ones() -> None:
    kl = ["alignment.distance=relational-kl", "alignment.augment_rad=false"]
    config = config_with("alignment.memory=100", "alignment.rad_batch=6", *kl)
    client, consensus = make_client(config), torch.randn(16, 5, generator=rng_for(1))
    client.learner.eval()
    alignment, rng, same = Alignment(client, consensus, mu=1.0), rng_for(3), rng_for(3)
    alignment(client.learner, rng, step_of(0))
    found = alignment(client.learner, rng, step_of(1))
    before, now = (torch.randperm(16, generator=same)[:6].tolist() for _ in range(2))
    rows = now + [row for row in reversed(before) if row not in now]
    everything = client.learner.represent((client.rad.float() / 255 - 0.5) / 0.25, "encoder")
    expected = alignment_distance(everything[rows], consensus[rows], config.alignment, rows=6)
    assert len(rows) > 6
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_mu_ramps_up() -> None:
    config = config_with("alignment.mu=2", "alignment.ramp_rounds=4")
    assert [mu_at(config, r) for r in (1, 2, 4, 5)] == [0.5, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("form", [[], SKETCH], ids=["factor", "sketch"])
def test_half_precision_on_the_wire_changes_the_kernel_only_slightly(form: list[str]) -> None:
    exact, half = config_with(*form), config_with(*form, "alignment.wire=float16")
    (state, _), (state_half, _) = (play(HeteroSSFL(c), c, rounds=0) for c in (exact, half))
    assert state_half.shared["factor"].dtype == torch.float16
    a, b = state.shared["factor"].double(), state_half.shared["factor"].double()
    assert torch.allclose(a @ a.T, b @ b.T, atol=1e-3)


def test_averaging_weights_by_examples_and_takes_the_largest_counter() -> None:
    models: list[Mapping[str, torch.Tensor]] = [
        {"w": torch.tensor([1.0, 4.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([5.0, 0.0]), "n": torch.tensor(7)},
    ]
    mean = average(models, [1, 3])
    assert mean["w"].tolist() == [4.0, 1.0]
    assert int(mean["n"]) == 7


def test_averaging_refuses_different_models_and_suggests_hetero_ssfl() -> None:
    with pytest.raises(ConfigError, match="hetero-ssfl"):
        method_for(load_config("smoke", ["method=fedbyol"]))


def test_a_method_for_another_ssl_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ssl\.kind = 'simsiam', not 'byol'"):
        method_for(load_config("smoke", [*SMALL, "method=fedsimsiam"]))


def test_averaging_refuses_weights_that_grew_more_than_tenfold_but_not_batchnorms_statistics() -> None:
    config = config_with("method=fedbyol")
    method = method_for(config)
    state, (client, *_) = play(method, config, rounds=1)
    update = method.local_update(client, method.broadcast(state, client.name))
    busy = {  # after thousands of steps on large activations
        key: torch.full_like(a, 10**5) if key.endswith(("num_batches_tracked", "running_var")) else a
        for key, a in update.arrays.items()
    }
    method.check(state, client.name, replace(update, arrays=busy))
    huge = {key: a * 11 if a.is_floating_point() else a for key, a in update.arrays.items()}
    with pytest.raises(ProtocolError, match="times as large as the global weights"):
        method.check(state, client.name, replace(update, arrays=huge))


@pytest.mark.parametrize("kind", ["byol", "simsiam"])
def test_fedssl_contains_fedbyol_and_fedsimsiam(kind: str) -> None:
    general, special = (config_with(f"method=fed{name}", f"ssl.kind={kind}") for name in ("ssl", kind))
    (expected, _), (found, _) = (play(method_for(config), config, rounds=2) for config in (special, general))
    assert all(torch.equal(found.shared[key], expected.shared[key]) for key in expected.shared)


def test_supervised_fedavg_learns_its_labels_and_does_not_train_the_heads_of_byol() -> None:
    config = config_with("method=fedavg", "optim.schedule=constant", "local_epochs=10")
    method, client = method_for(config), make_client(config)
    before = {k: v.clone() for k, v in client.learner.state_dict().items()}
    losses = [method.local_update(client, Broadcast(r)).metrics["loss_ssl"] for r in (1, 2, 3)]
    assert losses[2] < losses[0]
    after = client.learner.state_dict()
    changed = {k.partition(".")[0] for k in before if not torch.equal(before[k], after[k])}
    assert {"encoder", "classifier"} <= changed
    assert "predictor" not in changed
    sent = method.local_update(client, Broadcast(4)).arrays
    assert {key.partition(".")[0] for key in sent} == {"encoder", "classifier"}


def test_an_error_about_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="hetero-ssfl"):
        method_for(config_with("method=hetero-sfl"))


def test_fedbyol_does_not_send_the_target_network() -> None:
    config = config_with("method=fedbyol")
    method = method_for(config)
    update = method.local_update(make_client(config), Broadcast(1))
    assert {key.partition(".")[0] for key in update.arrays} == {"encoder", "projector", "predictor"}


@pytest.mark.parametrize(
    ("name", "kind"), [("fedbyol", "byol"), ("fedsimsiam", "simsiam"), ("fedu", "byol"), ("fedssl", "simclr")]
)
def test_averaging_with_one_client_is_local_training_step_for_step(name: str, kind: str) -> None:
    alone = config_with("clients.count=1", "method=local", f"ssl.kind={kind}")
    averaged = config_with("clients.count=1", f"method={name}", f"ssl.kind={kind}")
    _, (a,) = play(method_for(alone), alone, rounds=2)
    _, (b,) = play(method_for(averaged), averaged, rounds=2)
    assert torch.equal(parameters(a), parameters(b))


def test_fedbyol_starts_every_target_from_the_global_model() -> None:
    config = config_with("method=fedbyol", "ssl.ema=1.0")  # the target then keeps its initial weights
    _, clients = play(method_for(config), config, rounds=1)
    targets = [c.learner.target.state_dict() for c in clients if c.learner.target is not None]
    assert all(torch.equal(targets[0][key], targets[1][key]) for key in targets[0] if key.endswith("weight"))


def test_training_uses_rad_images_only_with_rad_in_ssl() -> None:
    with_rad, without = config_with("rad.in_ssl=true"), config_with("rad.in_ssl=false")
    clients = [make_client(c) for c in (with_rad, without)]
    steps = []
    for client in clients:
        seen: list[float] = []

        def note(_: float, loss: float, seen: list[float] = seen) -> None:
            seen.append(loss)

        client.progress = note
        train(client, 1)
        steps.append(len(seen))
    assert steps == [(20 + 16) // 8, 20 // 8]


def test_the_cosine_schedule_covers_the_whole_run() -> None:
    config = config_with("rounds=4", "optim.lr=0.8")
    assert learning_rate(config, 0) == pytest.approx(0.8)
    assert learning_rate(config, 2) == pytest.approx(0.4)
    assert learning_rate(config, 4) == pytest.approx(0.0)
    assert learning_rate(config_with("optim.schedule=constant", "optim.lr=0.8"), 3) == pytest.approx(0.8)


def test_training_does_not_change_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(make_client(config_with()), 1)
    assert torch.equal(before, torch.get_rng_state())
