"""Noise with a budget: epsilon is what others compute, the noise has the stated size, and a node ends at its budget."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_ssfl.config import Config, parse_config
from hetero_ssfl.errors import ConfigError, ProtocolError
from hetero_ssfl.kernels.mean import sketch
from hetero_ssfl.methods import ServerState, Update, method_for
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.methods.private import METRICS
from hetero_ssfl.privacy.accountant import delta_of, epsilon_of, noise_multiplier
from hetero_ssfl.privacy.noise import gaussian
from hetero_ssfl.privacy.sums.rules import Rules

NOISY = ("privacy.secure=true", "alignment.form=sketch", "privacy.epsilon=8", "rad.size=20", "rounds=4")


@pytest.mark.parametrize(
    ("mu", "epsilon", "delta"), [(1.0, 1.0, 0.12693674), (3.0, 1.0, 0.78760074), (1.0, 2.0, 0.02092364)]
)
def test_delta_equals_that_in_the_tests_of_a_library(mu: float, epsilon: float, delta: float) -> None:
    """From google/differential-privacy, python/dp_accounting, pld/privacy_loss_mechanism_test.py: delta of a Gaussian
    mechanism with deviation 1 and sensitivity mu."""
    assert delta_of(mu, epsilon) == pytest.approx(delta, abs=1e-8)
    assert epsilon_of(mu**2, delta) == pytest.approx(epsilon, abs=1e-6)


def test_epsilon_equals_published_figures() -> None:
    """Bu, Dong, Long and Su, Deep Learning with Gaussian Differential Privacy (Harvard Data Science Review 2020), at
    delta = 1e-5: the caption of figure 4 (mu is rounded there), and the example in the README of the authors' code."""
    assert epsilon_of(0.35**2, 1e-5) == pytest.approx(1.34, abs=0.005)
    assert epsilon_of(1.775**2, 1e-5) < 8.68 < epsilon_of(1.785**2, 1e-5)
    batch, images, epochs, deviation = 256, 60_000, 15, 1.3
    mu = batch / images * math.sqrt(epochs * images / batch * math.expm1(deviation**-2))
    assert epsilon_of(mu**2, 1e-5) == pytest.approx(0.8345, abs=5e-5)


@pytest.mark.parametrize(("mu", "delta"), [(0.1, 1e-5), (1.0, 1e-5), (3.0, 1e-6), (10.0, 1e-9)])
def test_epsilon_equals_the_integral_over_the_privacy_loss(mu: float, delta: float) -> None:
    """delta = E[(1 - e^(epsilon - loss))+], and this loss is normal with mean mu^2/2 and variance mu^2."""
    epsilon = epsilon_of(mu**2, delta)
    z = np.linspace(-40, 40, 2_000_001)
    loss = mu**2 / 2 + mu * z
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    integral = (np.maximum(0.0, -np.expm1(np.minimum(epsilon - loss, 0.0))) * density).sum() * (z[1] - z[0])
    assert integral == pytest.approx(delta, rel=1e-4)


def test_epsilon_equals_that_of_the_library() -> None:
    """Run where dp-accounting is installed. It agreed to 8 digits when this was written (version 0.6.0)."""
    accounting, losses = pytest.importorskip("dp_accounting"), pytest.importorskip("dp_accounting.pld")
    for z, releases in ((1.0, 1), (4.0, 11), (20.0, 201)):
        accountant = losses.PLDAccountant()
        accountant.compose(accounting.GaussianDpEvent(z), releases)
        assert epsilon_of(releases / z**2, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@given(st.floats(0.1, 50), st.sampled_from([1e-3, 1e-5, 1e-9]), st.integers(1, 1000))
def test_the_multiplier_spends_the_whole_budget_and_no_more(epsilon: float, delta: float, releases: int) -> None:
    z = noise_multiplier(epsilon, delta, releases)
    assert epsilon_of(releases / z**2, delta) == pytest.approx(epsilon, rel=1e-6)
    assert epsilon_of((releases + 1) / z**2, delta) > epsilon


def test_noise_is_normal_and_different_each_time() -> None:
    drawn = gaussian(200_001, 3.0)
    assert drawn.std() == pytest.approx(3, rel=0.02)
    assert abs(drawn.mean()) < 0.05
    assert (np.abs(drawn) > 6).mean() == pytest.approx(0.0455, abs=0.004)
    assert not np.array_equal(drawn[:10], gaussian(10, 3.0))
    halves = drawn[:100_000], drawn[-100_000:]  # Box-Muller makes one of the cosines and the other of the sines
    assert abs(np.corrcoef(*halves)[0, 1]) < 0.02
    assert abs(np.corrcoef(*np.square(halves))[0, 1]) < 0.02


def update(config: Config, scale: float = 1.0) -> Update:
    a = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = scale**0.5 * a / (a.T @ a).norm().sqrt()
    return Update(
        60, {"sketch": sketch(a, HeteroSSFL(config).averaging.omega()), "trace": a.square().sum()}, {"loss_ssl": 7}
    )


def test_a_sum_has_the_noise_of_its_epsilon_whoever_survives() -> None:
    config = parse_config("", NOISY)
    method = HeteroSSFL(config)
    z = noise_multiplier(8.0, 1e-5, 5)
    survivors = Rules().survivors_needed(9)
    noise = []
    for _ in range(60):
        total = method.layout().zeros()
        for _ in range(survivors):
            total.add(method.summand(update(config), 9))
        sketched, _, metrics = method.means(total, 9, survivors)
        noise.append(survivors * (sketched - update(config).arrays["sketch"]).numpy())
        assert metrics == {}, "figures would need noise, too"
    assert np.std(noise) == pytest.approx(z * 20, rel=0.03)


def test_a_larger_kernel_counts_as_one_of_the_largest_norm() -> None:
    config = parse_config("", [*NOISY, "privacy.clip=0.5", "privacy.epsilon=4e5"])  # hardly any noise
    method = HeteroSSFL(config)
    direction = update(config).arrays["sketch"] / update(config).arrays["sketch"].norm()
    for scale in (1.0, 0.25):
        entries = method.summand(update(config, scale), 3)
        total = method.layout().zeros()
        for _ in range(3):
            total.add(entries)
        mean, _, _ = method.means(total, 3, 3)
        along = float((mean * direction).sum())  # the noise is random, with a deviation of 0.02 in any direction
        assert along == pytest.approx(min(scale, 0.5) * 20, rel=0.03)


def test_the_rest_of_the_vector_says_nothing() -> None:
    config = parse_config("", NOISY)
    first, second = (HeteroSSFL(config).summand(update(config, scale), 5) for scale in (1.0, 0.1))
    assert np.array_equal(first.figures, second.figures)
    assert len(METRICS) > 0


def test_rounds_say_what_was_spent() -> None:
    config = parse_config("", NOISY)
    method = HeteroSSFL(config)
    state, spent = ServerState(-1, ("a", "b", "c")), []
    while state.round < 4:
        state = method.aggregate(state, {name: update(config) for name in state.roster})
        spent.append(method.metrics(state)["epsilon"])
    assert spent == sorted(spent)
    assert state.shared["factor"].shape[1] <= 4, "noise alone has no directions to learn from"
    assert spent[-1] == pytest.approx(8.0, rel=1e-6)


# --- without secure sums ---

ALONE = (*NOISY, "privacy.secure=false")


def test_a_single_sketch_has_the_whole_noise_and_nothing_beside_it() -> None:
    config = parse_config("", ALONE)
    method, honest = HeteroSSFL(config), update(config)
    sent = [method.with_noise(honest) for _ in range(60)]
    noise = [(each.arrays["sketch"].double() - honest.arrays["sketch"]).numpy() for each in sent]
    assert np.std(noise) == pytest.approx(noise_multiplier(8.0, 1e-5, 5) * 20, rel=0.03)
    for first, second in ((sent[0], sent[1]), (sent[0], method.with_noise(replace(update(config, 0.1), examples=7)))):
        assert not torch.equal(first.arrays["sketch"], second.arrays["sketch"])
        assert torch.equal(first.arrays["trace"], second.arrays["trace"])
        assert (first.examples, dict(first.metrics)) == (second.examples, dict(second.metrics)) == (1, {})


def test_a_single_sketch_is_clipped_and_rounded() -> None:
    config = parse_config("", [*ALONE, "privacy.clip=0.5", "privacy.epsilon=4e5"])  # hardly any noise
    for scale in (1.0, 0.25):
        sent = HeteroSSFL(config).with_noise(update(config, scale)).arrays["sketch"].double()
        assert float(sent.norm()) == pytest.approx(min(scale, 0.5) * 20, rel=0.02)
        steps = sent / 2.0**-19  # the norm is below 16 = 2^4, of which float32 holds 23 bits
        assert torch.equal(steps, steps.round())
        assert not torch.equal(steps / 2, (steps / 2).round())


def test_the_server_accepts_noise_and_no_more() -> None:
    config = parse_config("", ALONE)
    method, state = HeteroSSFL(config), ServerState(-1, ("a", "b"))
    sent = method.with_noise(update(config))
    method.check(state, "a", sent)
    with pytest.raises(ProtocolError, match="would outweigh the others"):
        method.check(state, "a", replace(sent, arrays={**sent.arrays, "sketch": 3 * sent.arrays["sketch"]}))
    after = method.aggregate(state, {name: method.with_noise(update(config)) for name in state.roster})
    assert method.metrics(after)["epsilon"] == pytest.approx(epsilon_of(noise_multiplier(8.0, 1e-5, 5) ** -2, 1e-5))
    assert after.shared["factor"].shape[1] <= 4, "of noise alone, half of 20 directions are positive"


# --- what to expect ---


def ratio_in(warning: str | None) -> float:
    return float(str(warning).partition("mean kernel is ")[2].split()[0])


def test_the_start_says_how_large_the_noise_in_the_mean_is() -> None:
    """The deviation of the noise in an entry of the mean, times the root of the number of entries, over the norm."""
    secure, alone = (HeteroSSFL(parse_config("", [*settings, "privacy.clip=0.5"])) for settings in (NOISY, ALONE))
    one = noise_multiplier(8.0, 1e-5, 5) * 20  # relative to the norm of a single sketch
    assert ratio_in(alone.start_warning(5)) == pytest.approx(one / 5**0.5, rel=0.01)
    assert ratio_in(secure.start_warning(5)) == pytest.approx(
        one / 5**0.5 / Rules().survivors_needed(5) ** 0.5, rel=0.01
    )
    assert "(2 times as large as with privacy.secure)" in str(alone.start_warning(5)), "4 of 5 must survive"
    # Noise alone has eigenvalues up to sqrt(2 / 20) times its norm. A kernel of norm 1 has none above 1.
    expected = {"it will not learn": (1, 9), "it learns only": (0.1, 1), "it can learn": (0, 0.1)}
    for clients in (3, 5, 10, 20, 100, 10**4):
        edge = ratio_in(secure.start_warning(clients)) / 10**0.5
        (words,) = (words for words, (low, high) in expected.items() if low <= edge < high)
        assert words in str(secure.start_warning(clients)), (clients, edge)
    assert {words for words in expected if any(words in str(secure.start_warning(n)) for n in (3, 20, 10**4))} == {
        *expected
    }
    assert "probes are sent without noise" in str(secure.start_warning(5))
    silent = HeteroSSFL(parse_config("", [*ALONE, "evaluation.probes=[]"]))
    assert "probes" not in str(silent.start_warning(5))
    assert HeteroSSFL(parse_config("")).start_warning(5) is None


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("clients.weights=size", "clients.weights = 'size': sizes would need noise"),
        ("alignment.form=factor", "alignment.form = 'factor': noise is added to sketches"),
        ("alignment.normalize=false", "alignment.normalize = false: a kernel needs a bound"),
    ],
)
def test_what_would_need_more_noise_is_refused(secure: bool, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.epsilon = 8 does not allow") as caught:
        parse_config("", [*NOISY, f"privacy.secure={str(secure).lower()}", setting])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_methods_without_noise_are_refused() -> None:
    config = parse_config("", [*ALONE, "method=fedbyol"])
    with pytest.raises(ConfigError, match="method 'fedbyol' has no noise"):
        method_for(config)


def test_an_own_method_that_can_be_summed_but_has_no_noise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "summed.py").write_text(
        "from hetero_ssfl.methods import Local\nclass Summed(Local):\n    sums_only = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="method 'summed:Summed' has no noise"):
        method_for(parse_config("", [*ALONE, "method=summed:Summed"]))
