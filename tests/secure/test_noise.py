"""Noise with a budget: epsilon is what others compute, the noise has the stated size, and a node ends at its budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ssfl.config import Config, parse_config
from hetero_ssfl.consensus import sketch
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.methods import ServerState, Update
from hetero_ssfl.methods.hetero import HeteroSSFL
from hetero_ssfl.methods.summands import FIGURES
from hetero_ssfl.noise import delta_of, epsilon_of, gaussian, noise_multiplier
from hetero_ssfl.secure import Rules

NOISY = ("privacy.secure=true", "alignment.form=sketch", "privacy.epsilon=8", "rad.size=20", "rounds=4")


def test_epsilon_of_a_known_case() -> None:
    """The published value of Google's dp-accounting (its test of the Gaussian mechanism): deviation 1, epsilon 1."""
    assert delta_of(1.0, 1.0) == pytest.approx(0.12693674, abs=1e-8)
    assert epsilon_of(1.0, 0.12693674) == pytest.approx(1.0, abs=1e-6)


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


def update(config: Config, scale: float = 1.0) -> Update:
    import torch

    a = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = scale**0.5 * a / (a.T @ a).norm().sqrt()
    return Update(
        60, {"sketch": sketch(a, HeteroSSFL(config).kernels.omega()), "trace": a.square().sum()}, {"loss_ssl": 7}
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
        mean = method.summands.decode(total, 9, survivors)
        noise.append(survivors * (mean.sketch - update(config).arrays["sketch"]).numpy())
        assert dict(mean.figures) == {}, "figures would need noise, too"
    assert np.std(noise) == pytest.approx(z * 20, rel=0.03)


def test_a_larger_kernel_counts_as_one_of_the_largest_norm() -> None:
    config = parse_config("", [*NOISY, "privacy.clip=0.5", "privacy.epsilon=1e5"])  # hardly any noise
    method = HeteroSSFL(config)
    for scale in (1.0, 0.25):
        entries = method.summand(update(config, scale), 3)
        total = method.layout().zeros()
        for _ in range(3):
            total.add(entries)
        mean = method.summands.decode(total, 3, 3)
        assert float(mean.sketch.norm()) == pytest.approx(min(scale, 0.5) * 20, rel=0.02)


def test_the_rest_of_the_vector_says_nothing() -> None:
    config = parse_config("", NOISY)
    first, second = (HeteroSSFL(config).summand(update(config, scale), 5) for scale in (1.0, 0.1))
    assert np.array_equal(first.figures, second.figures)
    assert len(FIGURES) > 0


def test_rounds_say_what_was_spent_and_the_start_says_what_to_expect() -> None:
    config = parse_config("", NOISY)
    method = HeteroSSFL(config)
    state, spent = ServerState(-1, ("a", "b", "c")), []
    while state.round < 4:
        state = method.aggregate(state, {name: update(config) for name in state.roster})
        spent.append(method.metrics(state)["epsilon"])
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(8.0, rel=1e-6)
    few, many = (str(method.start_warning(count)) for count in (5, 10**6))
    assert "it will not learn" in few
    assert "it may learn" in many
    assert method.start_warning(5) is not None
    assert HeteroSSFL(parse_config("")).start_warning(5) is None


@pytest.mark.parametrize("setting", ["privacy.secure=false", "clients.weights=size"])
def test_noise_needs_a_secure_sum_with_equal_weights(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.epsilon = 8 is not possible"):
        parse_config("", [*NOISY, setting])
