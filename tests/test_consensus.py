"""The factor form against dense L x L kernels, which exist only here."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hetero_ssfl.config import AlignmentConfig
from hetero_ssfl.consensus import (
    client_factor,
    combine,
    effective_rank,
    flatten_spectrum,
    nystroem,
    spectrum,
    truncate,
)
from hetero_ssfl.objectives import centre, cka, factor_cka, gram

LITERAL = AlignmentConfig(row_normalize=False, power=1.0)


def features(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(config: AlignmentConfig, a: torch.Tensor) -> torch.Tensor:
    """K_j written out: normalised rows, centred, powered through its eigenvalues, scaled to norm 1."""
    a = F.normalize(a, dim=1) if config.row_normalize else a
    k = gram(a, config)
    k = centre(k) if config.center else k
    values, vectors = torch.linalg.eigh(k)
    kept = values > 1e-11 * values.max()
    k = (vectors[:, kept] * values[kept] ** config.power) @ vectors[:, kept].T
    return k / k.norm() if config.normalize else k


@given(
    rows=st.integers(6, 30),
    widths=st.lists(st.integers(2, 12), min_size=1, max_size=4),
    power=st.sampled_from([1.0, 0.5, 0.25]),
    row_normalize=st.booleans(),
    normalize=st.booleans(),
    center=st.booleans(),
    seed=st.integers(0, 999),
)
def test_factor_form_equals_dense_form(
    rows: int, widths: list[int], power: float, row_normalize: bool, normalize: bool, center: bool, seed: int
) -> None:
    config = AlignmentConfig(power=power, row_normalize=row_normalize, normalize=normalize, center=center)
    clients = [features(rows, width, seed + k) for k, width in enumerate(widths)]
    weights = [float(k + 1) for k in range(len(widths))]
    consensus = combine([client_factor(a, config) for a in clients], weights, rank=512)
    expected = sum(w / sum(weights) * dense(config, a) for w, a in zip(weights, clients, strict=True))
    assert consensus.lost == 0
    kernel = consensus.factor.double() @ consensus.factor.double().T
    assert torch.allclose(kernel, expected, atol=1e-5 * float(expected.abs().max()) + 1e-6)


def test_cka_with_the_consensus_factor_equals_cka_with_the_dense_mean() -> None:
    config = AlignmentConfig()
    clients = [features(50, width, width) for width in (5, 20, 64)]
    factor = combine([client_factor(a, config) for a in clients], [1, 1, 1], 512).factor.double()
    mean = sum(dense(config, a) for a in clients)
    live = features(50, 9, 3)
    assert float(factor_cka(live, factor)) == pytest.approx(float(cka(centre(live @ live.T), centre(mean))), abs=1e-5)


@pytest.mark.parametrize("kernel", ["rbf", "polynomial"])
def test_a_nonlinear_kernel_has_an_exact_factor_on_few_rows(kernel: str) -> None:
    config = AlignmentConfig(kernel=kernel)
    a = features(40, 6, 0)
    factor = nystroem(a, config)
    assert torch.allclose(factor @ factor.T, gram(a, config), atol=1e-6)


def test_a_nonlinear_kernel_is_close_on_many_rows() -> None:
    config = AlignmentConfig(kernel="rbf")
    a = features(1200, 3, 0)
    factor = nystroem(a, config)
    assert factor.shape[1] <= 512
    assert float(cka(factor @ factor.T, gram(a, config))) > 0.999


@given(rank=st.integers(1, 10), seed=st.integers(0, 99))
def test_truncation_keeps_the_strongest_directions_and_says_what_it_lost(rank: int, seed: int) -> None:
    a = features(40, 12, seed) * torch.logspace(0, -2, 12, dtype=torch.float64)
    cut = truncate(a, rank)
    left, singular, _ = torch.linalg.svd(a, full_matrices=False)
    best = (left[:, :rank] * singular[:rank].square()) @ left[:, :rank].T
    assert cut.factor.shape == (40, rank)
    assert torch.allclose(cut.factor @ cut.factor.T, best, atol=1e-6)
    assert cut.lost == pytest.approx(1 - float(singular[:rank].square().sum() / singular.square().sum()), abs=1e-9)


def test_flattening_raises_singular_values_to_the_power() -> None:
    a = features(30, 5, 0) * torch.tensor([16.0, 4.0, 1.0, 0.25, 0.1])
    before, after = torch.linalg.svdvals(a), torch.linalg.svdvals(flatten_spectrum(a, 0.5))
    assert torch.allclose(after, before.sqrt(), atol=1e-9)


def test_flattening_does_not_blow_up_directions_that_are_not_there() -> None:
    a = features(30, 2, 0) @ features(2, 8, 1)  # rank 2 in 8 columns
    assert flatten_spectrum(a, 0.25).shape[1] == 2


def test_normalising_stops_a_client_with_large_features_from_dominating() -> None:
    quiet, loud = features(60, 8, 0), 1000 * features(60, 8, 1)
    fair = combine([client_factor(a, LITERAL) for a in (quiet, loud)], [1, 1], 512).factor
    plain = LITERAL.model_copy(update={"normalize": False})
    unfair = combine([client_factor(a, plain) for a in (quiet, loud)], [1, 1], 512).factor
    assert factor_cka(quiet.float(), fair) > 0.5
    assert factor_cka(quiet.float(), unfair) < 0.3


def test_effective_rank_counts_directions() -> None:
    flat = torch.linalg.qr(features(50, 7, 0) - features(50, 7, 0).mean(0)).Q
    assert effective_rank(flat) == pytest.approx(7, abs=1e-6)
    assert effective_rank(features(50, 1, 0)) == pytest.approx(1, abs=1e-9)
    assert effective_rank(features(5, 100, 0)) <= 5
    wide = features(30, 9, 2)
    share = spectrum(wide)
    assert float(share.sum()) == pytest.approx(1)
    assert effective_rank(wide) == pytest.approx(float(1 / share.square().sum()))
