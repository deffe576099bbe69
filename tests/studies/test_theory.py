"""The paper's theorem: its formula, its constants on toys with known ones, and its measurement on a run."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.whole_runs import run, tiny
from hetero_ssfl.federation.participants import open_site
from hetero_ssfl.kernels.distance import alignment_distance
from hetero_ssfl.learning.training import TrainingClient
from hetero_ssfl.methods import Broadcast, HeteroSSFL
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.studies.theory.bound import (
    Constants,
    ConstantsAlong,
    Point,
    bound_for_every_step,
    bound_terms,
    for_all_clients,
    largest_eta,
    largest_mu,
    point,
)
from hetero_ssfl.studies.theory.measure import Probe, play, shortened
from hetero_ssfl.studies.theory.tables import HEAD, changed_assumptions, rows
from hetero_ssfl.use.encoders import participants

Call = Callable[..., tuple[int, str, str]]
positive = st.floats(0.1, 3)


def loss_change_bound(c: Constants, eta: float, mu: float, norms: list[float]) -> float:
    """The bound as printed."""
    return bound_terms(c, eta, mu, norms).total


CONSTANTS = st.builds(Constants, *[positive] * 5, rows=st.integers(1, 6), steps=st.just(4))
NORMS = st.lists(positive, min_size=4, max_size=4)


# --- the formula ---


@given(CONSTANTS, positive, positive, NORMS)
def test_the_bound_is_the_sum_over_all_steps_and_all_pairs_of_rad_images(
    c: Constants, eta: float, mu: float, norms: list[float]
) -> None:
    expected = 0.0
    for squared in norms:
        expected += -eta * squared + c.l1 * eta**2 * (squared + c.sigma**2) / 2
    for _pair in product(range(c.rows), repeat=2):
        entry, moved = c.r**2, c.l2 * eta * c.p
        expected += mu * entry * (c.r * moved + moved * c.r)
    assert loss_change_bound(c, eta, mu, norms) == pytest.approx(expected)


@given(CONSTANTS, NORMS, st.floats(0, 0.95))
def test_below_the_largest_eta_the_bound_promises_a_decrease_and_above_it_does_not(
    c: Constants, norms: list[float], share: float
) -> None:
    mu = share * largest_mu(c, norms)
    limit = largest_eta(c, mu, norms)
    assert limit > 0
    assert loss_change_bound(c, 0.999 * limit, mu, norms) < 0
    assert loss_change_bound(c, 1.001 * limit, mu, norms) > 0


@given(CONSTANTS, NORMS, positive)
def test_the_largest_mu_separates_runs_with_an_allowed_eta_from_runs_without(
    c: Constants, norms: list[float], eta: float
) -> None:
    limit = largest_mu(c, norms)
    below, above = 0.999 * limit, 1.001 * limit
    assert loss_change_bound(c, 0.5 * largest_eta(c, below, norms), below, norms) < 0
    assert largest_eta(c, above, norms) == 0
    assert loss_change_bound(c, eta, above, norms) > 0


def test_limits_say_when_nothing_or_everything_is_allowed() -> None:
    c = Constants(l1=2, l2=1, p=1, r=1, sigma=0, rows=2, steps=1)
    assert largest_mu(c, [0.0]) == 0
    assert largest_eta(c, 1.0, [8.0]) == 0  # mu is exactly the largest one
    assert largest_eta(c, 0.0, [8.0]) == 1
    assert largest_mu(replace(c, l2=0), [8.0]) == math.inf
    assert largest_eta(replace(c, l1=0), 0.0, [8.0]) == math.inf
    with pytest.raises(ValueError, match="expected one for each of E steps"):
        loss_change_bound(c, 0.1, 0.1, [1.0, 2.0])


# --- the constants of f(w) = a/2 ||w||^2 with Phi(x; w) = c x w and noise +s or -s across w ---


def estimate(*points: Point) -> Constants:
    along = ConstantsAlong()
    for each in points:
        along.add(each)
    return along.constants


@given(a=positive, c=positive, s=positive, places=st.lists(st.integers(1, 50), min_size=2, max_size=6, unique=True))
def test_the_estimators_find_the_known_constants_of_a_quadratic(
    a: float, c: float, s: float, places: list[int]
) -> None:
    along, across = torch.eye(3, dtype=torch.float64)[:2]
    instances = torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64)
    points = [
        point(t * along, [a * t * along + sign * s * across for sign in (1, -1)], c * instances[:, None] * t * along)
        for t in places
    ]
    farthest = max(places)
    found = estimate(*points)
    assert found.l1 == pytest.approx(a)
    assert found.l2 == pytest.approx(c)  # the instance of size 1
    assert found.r == pytest.approx(c * farthest)
    assert found.p == pytest.approx(math.hypot(a * farthest, s))
    assert found.sigma == pytest.approx(s)
    assert [p.squared_gradient_norm for p in points] == pytest.approx([(a * t) ** 2 for t in places])


def test_a_sample_of_minibatches_gives_the_true_norm_and_variance_on_average() -> None:
    every = [torch.tensor(g, dtype=torch.float64) for g in ([3.0, 0.0], [-1.0, 2.0], [1.0, 1.0])]
    true = point(torch.zeros(2), every, torch.zeros(1, 1))
    pairs = [point(torch.zeros(2), pair, torch.zeros(1, 1), sampled=True) for pair in product(every, repeat=2)]
    assert sum(p.variance for p in pairs) / len(pairs) == pytest.approx(true.variance)
    assert sum(p.squared_gradient_norm for p in pairs) / len(pairs) == pytest.approx(true.squared_gradient_norm)


def test_the_largest_slope_may_lie_between_the_first_point_and_a_later_one() -> None:
    def at(w: float, gradient: float) -> Point:
        return point(torch.tensor([w]), [torch.tensor([gradient])], torch.tensor([[w]]))

    assert estimate(at(1.0, 1.0), at(1.0, 1.0)).l1 == 0  # weights that did not move give no slope
    points = [at(0.0, 0.0), at(4.0, 4.0), at(1.0, 3.0)]  # slopes 1, 1/3 and, from the first to the last, 3
    assert estimate(*points).l1 == pytest.approx(3)


def test_the_kernel_term_needs_constants_that_hold_for_every_client() -> None:
    own, other = Constants(1, 2, 3, 4, 5, 6, 7), Constants(9, 4, 8, 5, 9, 6, 7)
    assert for_all_clients(own, [own, other]) == Constants(1, 4, 8, 5, 5, 6, 7)


# --- the theorem on a toy: a quadratic loss, linear Phi, one client, noise of two values ---


@dataclass(frozen=True)
class Toy:
    """L(W) = a/2 ||W||^2 - b W_11 + mu trace(K(W) K_mean), K = X W^T W X^T. Noise is +s or -s in one direction."""

    start: Tensor
    x: Tensor
    a: float
    b: float
    s: float
    mu: float

    def kernel(self, w: Tensor) -> Tensor:
        z = self.x @ w.T
        return z @ z.T

    def loss(self, w: Tensor, mean: Tensor) -> float:
        local = self.a / 2 * w.square().sum() - self.b * w[0, 0]
        return float(local + self.mu * (self.kernel(w) * mean).sum())

    def gradient(self, w: Tensor) -> Tensor:
        pull = torch.zeros_like(w)
        pull[0, 0] = self.b
        return self.a * w - pull + 2 * self.mu * w @ self.x.T @ self.kernel(self.start) @ self.x

    def play(self, eta: float, steps: int) -> tuple[float, Constants, list[float]]:
        """Return the mean change over every sequence of noise, the exact constants, and the mean ||grad_i||^2."""
        noise = torch.zeros_like(self.start)
        noise[0, -1] = self.s
        changes, squares, norms, visited = [], [0.0] * steps, [0.0] * steps, [self.start]
        before = self.loss(self.start, self.kernel(self.start))
        paths = list(product((1, -1), repeat=steps))
        for path in paths:
            w = self.start
            for i, sign in enumerate(path):
                squares[i] += float(self.gradient(w).square().sum()) / len(paths)
                g = self.gradient(w) + sign * noise
                norms[i] += float(g.norm()) / len(paths)
                w = w - eta * g
                visited.append(w)
            changes.append(self.loss(w, self.kernel(w)) - before)
        pull = self.x.T @ self.kernel(self.start) @ self.x
        constants = Constants(
            l1=self.a + 2 * self.mu * float(torch.linalg.eigvalsh(pull).max()),
            l2=float(self.x.norm(dim=1).max()),
            p=max(norms),
            r=max(float((self.x @ w.T).norm(dim=1).max()) for w in visited),
            sigma=self.s,
            rows=len(self.x),
            steps=steps,
        )
        return sum(changes) / len(changes), constants, squares


@given(st.integers(0, 99), positive, positive, st.floats(0, 2), st.floats(0.001, 0.5), st.integers(1, 4))
def test_the_bound_holds_on_a_toy_if_the_kernel_term_counts_every_step(
    seed: int, a: float, s: float, mu: float, eta: float, steps: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    start, x = (torch.randn(2, 2, generator=rng, dtype=torch.float64) for _ in range(2))
    change, constants, squares = Toy(start, x, a, 1.0, s, mu).play(eta, steps)
    assert change <= bound_for_every_step(constants, eta, mu, squares) + 1e-9
    if steps == 1:
        assert change <= loss_change_bound(constants, eta, mu, squares) + 1e-9


def test_without_alignment_and_noise_the_bound_is_reached_by_a_quadratic() -> None:
    """A bound that were too loose by any factor would pass the test above."""
    one = torch.ones(1, 1, dtype=torch.float64)
    for eta in (0.01, 0.3, 1.5):
        change, constants, norms = Toy(one, one, 2.0, 0.0, 0.0, 0.0).play(eta, 3)
        assert change == pytest.approx(loss_change_bound(constants, eta, 0.0, norms))


def test_the_printed_kernel_term_is_too_small_for_more_than_one_step() -> None:
    """A linear loss that makes one representation grow: the printed theorem fails, with the factor E it holds."""
    one = torch.ones(1, 1, dtype=torch.float64)
    eta, mu = 0.01, 1e-3
    change, constants, squares = Toy(one, one, 0.0, 1.0, 0.0, mu).play(eta, 10)
    assert change > loss_change_bound(constants, eta, mu, squares) + 1e-4
    assert change <= bound_for_every_step(constants, eta, mu, squares)


# --- measuring a client ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(tmp_path_factory.mktemp("theory") / "run", "rounds=2", "evaluation.every=0")


def client_of(folder: RunFolder) -> tuple[TrainingClient, Broadcast]:
    first = next(participants(folder, open_site(folder), folder.read_config()))
    factor = load_tensors(folder.path / "server.safetensors")[0]["factor"]
    client = TrainingClient(first.name, first.config, first.newest(), first.images.pixels, first.rad)
    return client, Broadcast(1, {"factor": factor})


def test_a_measured_round_trains_exactly_as_the_method_does(finished: RunFolder) -> None:
    client, down = client_of(finished)
    again = shortened(client_of(finished)[0], 3)
    measured = play(client, HeteroSSFL(client.config), down, 1, 3)
    expected = HeteroSSFL(again.config).local_update(again, down)
    assert torch.equal(measured.update.arrays["factor"], expected.arrays["factor"])
    assert measured.constants.steps == 3
    new = expected.arrays["factor"]  # as if it were the new mean kernel
    distances = [alignment_distance(z, new[rows], client.config.alignment) for rows, z in measured.after.rad]
    client_round = measured.beside_the_bound(new, [measured.constants])
    assert client_round["after_round"] == pytest.approx(
        measured.after.local + 4 * float(sum(distances)) / len(distances)
    )
    assert abs(client_round["after_round"] - client_round["after_steps"]) > 1e-3


def test_the_measured_loss_is_one_function_whose_gradient_is_measured(finished: RunFolder) -> None:
    client, down = client_of(finished)
    probe = Probe(client, down.arrays["factor"], 4.0)
    weights = {name: value.clone() for name, value in client.learner.state_dict().items()}
    here, _ = probe.at(client.learner)
    assert torch.equal(probe.at(client.learner)[0].gradient, here.gradient)
    assert all(torch.equal(value, weights[name]) for name, value in client.learner.state_dict().items())

    def moved(step: float) -> float:
        """Return the loss after a step along the gradient."""
        direction, place = step * here.gradient / here.gradient.norm(), 0
        client.learner.load_state_dict(weights)
        with torch.no_grad():
            for p in client.learner.trainable():
                p.add_(direction[place : place + p.numel()].view(p.shape))
                place += p.numel()
        return probe.at(client.learner)[1].loss(down.arrays["factor"], 4.0, client.config)

    slope = (moved(1e-3) - moved(-1e-3)) / 2e-3
    assert slope == pytest.approx(float(here.gradient.norm()), rel=0.02)


# --- the command ---


def digests(folder: Path) -> dict[str, str]:
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()}


def test_the_command_prints_tables_and_only_adds_what_a_report_shows(
    finished: RunFolder, tmp_path: Path, call: Call
) -> None:
    path = Path(shutil.copytree(finished.path, tmp_path / "run"))
    before = digests(path)
    code, shown, _ = call("theory", path, "--steps", 2, "--quiet")
    after = digests(path)
    assert after.pop(str(path / "theory.json"))
    assert (code, after) == (0, before)
    page = tmp_path / "page.html"
    assert call("report", path, "-o", page)[0] == 0
    section = page.read_text().partition('id="theory"')[2].partition("</section>")[0]
    assert section.count("client-002") == 2
    assert "bound / |change|" in section
    assert "round 1 from the untrained networks: E = 2 steps, eta = 0.032, mu = 4, L = 32" in shown
    assert "round 2 from the networks of round 2" in shown
    assert shown.count("client-002") == 2
    assert all(text in shown for text in ("bound / |change|", "Momentum 0.9"))


def test_the_command_gives_the_same_figures_to_programs(finished: RunFolder, call: Call) -> None:
    found = json.loads(call("theory", finished.path, "--steps", 2, "--json", "--quiet")[1])
    assert [each["round"] for each in found["rounds"]] == [1, 2]
    untrained = found["rounds"][0]["clients"]
    assert list(untrained) == ["client-000", "client-001", "client-002"]
    largest = {key: max(f["constants"][key] for f in untrained.values()) for key in ("l2", "p", "r")}
    for figures in untrained.values():
        c = figures["constants"]
        assert figures["change"] == pytest.approx(figures["after_round"] - figures["before"])
        kernel = 2 * 4 * 0.032 * largest["l2"] * largest["p"] * largest["r"] ** 3 * 32**2
        assert figures["bound"]["kernel"] == pytest.approx(kernel)
        assert figures["bound"]["noise"] == pytest.approx(c["l1"] * 2 * 0.032**2 * c["sigma"] ** 2 / 2)
        assert figures["ratio"] == pytest.approx(figures["bound"]["total"] / abs(figures["change"]))
    assert found["changed_assumptions"]
    table = [dict(zip(HEAD, row, strict=True)) for row in rows(untrained)]
    assert [row["client"] for row in table] == [*untrained, "largest"]
    assert table[-1]["L2"] == f"{largest['l2']:.3g}"
    assert table[-1]["R"] == f"{largest['r']:.3g}"
    assert table[-1]["bound"] == table[-1]["largest mu"] == ""


def test_a_run_that_has_not_finished_a_round_is_measured_from_untrained_networks(
    finished: RunFolder, tmp_path: Path, call: Call
) -> None:
    path = Path(shutil.copytree(finished.path, tmp_path / "young"))
    for file in ("server.safetensors", "server-before.safetensors", "results.json"):
        (path / file).unlink()
    found = json.loads(call("theory", path, "--steps", 1, "--json", "--quiet")[1])
    assert [each["start"] for each in found["rounds"]] == ["untrained networks"]


@pytest.mark.parametrize("method", ["local", "fedbyol"])
def test_a_method_without_kernels_is_refused_in_a_sentence(
    method: str, finished: RunFolder, tmp_path: Path, call: Call
) -> None:
    path = Path(shutil.copytree(finished.path, tmp_path / "other"))
    RunFolder(path).write_config(tiny(f"method={method}", "clients.models=['resnet8']"))
    code, _, said = call("theory", path)
    assert code == 2
    assert f"trained with method '{method}'. Choose a run with method = 'hetero-ssfl'." in said.replace("\n", " ")


def test_a_term_that_compares_no_kernels_is_refused(finished: RunFolder, tmp_path: Path, call: Call) -> None:
    path = Path(shutil.copytree(finished.path, tmp_path / "other"))
    RunFolder(path).write_config(tiny("alignment.distance=coordinates"))
    code, _, said = call("theory", path)
    assert code == 2
    assert "alignment.distance = 'coordinates'" in said.replace("\n", " ")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"site": "nodes", "nodes": []}, "on other machines"), ({"site": "python", "given": {}}, "are Python objects")],
)
def test_participants_that_are_not_here_are_refused_in_a_sentence(
    facts: dict[str, object], reason: str, finished: RunFolder, tmp_path: Path, call: Call
) -> None:
    path = Path(shutil.copytree(finished.path, tmp_path / "elsewhere"))
    RunFolder(path).write_json("facts.json", {**finished.read_json("facts.json"), **facts})
    code, _, said = call("theory", path)
    assert (code, reason in said) == (2, True)


def test_the_list_of_changed_assumptions_follows_the_config() -> None:
    parts = ("Momentum 0.9", "Weight decay", "schedule cosine", "target network moves", "1 - CKA", "power = 0.5")
    assert all(text in " ".join(changed_assumptions(tiny())) for text in parts)
    plain = ("optim.momentum=0", "optim.weight_decay=0", "optim.schedule=constant", "ssl.kind=vicreg", "alignment.mu=0")
    assert len(changed_assumptions(tiny(*plain))) == 3  # steps instead of epochs, BatchNorm, random views
    assert "alignment.when = epoch" in " ".join(changed_assumptions(tiny("alignment.when=epoch")))
    other_layer = "computed from the projector, and the kernels that are exchanged from the encoder"
    assert other_layer in " ".join(changed_assumptions(tiny("alignment.live_layer=projector")))
    assert other_layer not in " ".join(changed_assumptions(tiny()))
