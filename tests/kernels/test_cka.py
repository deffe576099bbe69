"""CKA compared with formulas in numpy, its invariances, and changes that it must detect."""

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_ssfl.config import AlignmentConfig
from hetero_ssfl.kernels.cka import centre, cka, cka_debiased, factor_cka, gram
from hetero_ssfl.kernels.distance import alignment_distance, relational_kl

LINEAR = AlignmentConfig(distance="cka")


def features(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numpy_cka(a: np.ndarray, b: np.ndarray) -> float:
    """Compute CKA by definition: HSIC with explicit centring matrices."""
    n = len(a)
    h = np.eye(n) - np.ones((n, n)) / n
    k, m = h @ (a @ a.T) @ h, h @ (b @ b.T) @ h
    return float(np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m)))


def numpy_debiased_hsic(k: np.ndarray, m: np.ndarray) -> float:
    """Compute the unbiased estimator as a U-statistic over all quadruples of distinct images (brute force)."""
    n = len(k)
    total, count = 0.0, 0
    for i in range(n):
        for j in range(n):
            for q in range(n):
                for r in range(n):
                    if len({i, j, q, r}) == 4:
                        total += k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q])
                        count += 1
    return total / count


@given(rows=st.integers(4, 30), width=st.integers(1, 40), other=st.integers(1, 40), seed=st.integers(0, 999))
def test_dense_and_factor_cka_equal_the_definition(rows: int, width: int, other: int, seed: int) -> None:
    a, b = features(rows, width, seed), features(rows, other, seed + 1)
    expected = numpy_cka(a.numpy(), b.numpy())
    assert float(factor_cka(a, b)) == pytest.approx(expected, abs=1e-9)
    assert float(cka(centre(gram(a, LINEAR)), centre(gram(b, LINEAR)))) == pytest.approx(expected, abs=1e-9)
    assert float(factor_cka(a.float(), b.float())) == pytest.approx(expected, abs=1e-5)


def test_without_centring_cka_is_the_papers_literal_formula() -> None:
    a, b = features(20, 5, 0), features(20, 7, 1)
    x, y = a.numpy(), b.numpy()
    literal = np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    assert float(factor_cka(a, b, center=False)) == pytest.approx(literal, abs=1e-9)


def test_debiased_cka_equals_the_brute_force_u_statistic() -> None:
    a, b = features(7, 3, 0), features(7, 4, 1)
    b[:, 0] += a[:, 0]
    k, m = (a @ a.T).numpy(), (b @ b.T).numpy()
    cross, own, other = numpy_debiased_hsic(k, m), numpy_debiased_hsic(k, k), numpy_debiased_hsic(m, m)
    expected = cross / np.sqrt(own * other)
    assert float(cka_debiased(gram(a, LINEAR), gram(b, LINEAR))) == pytest.approx(expected, abs=1e-9)
    assert float(factor_cka(a, b, debiased=True)) == pytest.approx(expected, abs=1e-9)


@given(rows=st.integers(8, 40), width=st.integers(2, 12), seed=st.integers(0, 999), scale=st.floats(0.1, 10))
def test_cka_ignores_rotation_shift_and_scale(rows: int, width: int, seed: int, scale: float) -> None:
    z = features(rows, width, seed)
    q = torch.linalg.qr(features(width, width, seed + 1)).Q
    assert float(factor_cka(z, scale * z @ q + 3)) == pytest.approx(1.0, abs=1e-9)


def test_cka_detects_reordered_images_and_unequal_stretching() -> None:
    z = features(100, 10, 0)
    assert factor_cka(z, z.flip(0)) < 0.5
    assert factor_cka(z, z * torch.tensor([10.0] + [1.0] * 9)) < 0.9


def test_only_the_biased_estimator_finds_unrelated_features_aligned() -> None:
    a, b = features(64, 256, 0), features(64, 256, 1)
    assert factor_cka(a, b) > 0.7
    assert abs(factor_cka(a, b, debiased=True)) < 0.1


@pytest.mark.parametrize("deviation", [0.1, 0.02])
def test_debiased_cka_is_accurate_with_a_large_common_mean_in_single_precision(deviation: float) -> None:
    """Features after a ReLU have a large common mean, and the estimator subtracts large terms."""
    shared = features(128, 32, 0)
    a, b = 1 + deviation * shared, 1 + deviation * (shared + features(128, 32, 1))
    expected = float(factor_cka(a, b, debiased=True))
    assert 0.3 < expected < 0.7
    assert float(factor_cka(a.float(), b.float(), debiased=True)) == pytest.approx(expected, abs=1e-3)


def test_the_literal_formula_has_the_opposite_sign() -> None:
    z, other = features(30, 4, 0), features(30, 6, 1)
    literal = AlignmentConfig(distance="literal-cka")
    assert float(alignment_distance(z, other, literal)) == pytest.approx(
        1 - float(alignment_distance(z, other, LINEAR))
    )


@pytest.mark.parametrize("kernel", ["linear", "rbf", "polynomial"])
@pytest.mark.parametrize("estimator", ["biased", "debiased"])
@pytest.mark.parametrize("row_normalize", [True, False])
def test_the_gradient_is_correct(kernel: str, estimator: Literal["biased", "debiased"], row_normalize: bool) -> None:
    config = AlignmentConfig(distance="cka", kernel=kernel, estimator=estimator, row_normalize=row_normalize)
    live, consensus = features(8, 3, 0).requires_grad_(), features(8, 5, 1)
    assert torch.autograd.gradcheck(lambda z: alignment_distance(z, consensus, config), live)


def test_the_gradient_of_relational_kl_is_correct() -> None:
    live, consensus = features(6, 3, 0).requires_grad_(), features(6, 5, 1)
    assert torch.autograd.gradcheck(lambda z: relational_kl(z, consensus, 0.5), live)


def test_relational_kl_equals_its_formula_with_a_temperature_for_each_side() -> None:
    live, consensus = features(6, 3, 0), features(6, 5, 1)
    found = relational_kl(live, consensus, 0.5, 0.1)
    unit = [(z / z.norm(dim=1, keepdim=True)).numpy() for z in (consensus, live)]
    total = 0.0
    for i in range(6):
        others = [j for j in range(6) if j != i]
        weights = [np.exp([z[i] @ z[j] / t for j in others]) for z, t in zip(unit, (0.1, 0.5), strict=True)]
        p, q = (w / w.sum() for w in weights)
        total += float((p * np.log(p / q)).sum())
    assert float(found) == pytest.approx(total / 6, rel=1e-9)
    assert float(relational_kl(live, consensus, 0.1)) == pytest.approx(float(relational_kl(live, consensus, 0.1, 0.1)))


def test_remembered_images_are_neighbours_but_their_own_neighbourhoods_do_not_count() -> None:
    """Rows without a gradient must not lower the weight of the others, whatever their number."""
    live, consensus = features(9, 3, 0), features(9, 5, 1)
    found = relational_kl(live, consensus, 0.5, 0.1, rows=4)
    wanted, given = (
        (z @ z.T / t).fill_diagonal_(float("-inf")).softmax(1)[:4]
        for z, t in ((torch.nn.functional.normalize(consensus), 0.1), (torch.nn.functional.normalize(live), 0.5))
    )
    by_hand = torch.where(wanted > 0, wanted * (wanted / given).log(), 0.0).sum() / 4
    assert float(found) == pytest.approx(float(by_hand), rel=1e-9)
    assert float(found) != pytest.approx(float(relational_kl(live, consensus, 0.5, 0.1)), rel=1e-3)


def test_a_cold_consensus_asks_only_for_the_nearest_neighbour() -> None:
    live, consensus = features(12, 3, 5), features(12, 4, 0)
    similarity = torch.nn.functional.normalize(consensus, dim=1) @ torch.nn.functional.normalize(consensus, dim=1).T
    nearest = similarity.fill_diagonal_(-2).argmax(1)
    mine = torch.nn.functional.normalize(live, dim=1)
    given = (mine @ mine.T / 0.5).fill_diagonal_(float("-inf")).log_softmax(1)
    cross_entropy = -given[range(12), nearest].mean()
    assert float(relational_kl(live, consensus, 0.5, 1e-4)) == pytest.approx(float(cross_entropy), abs=1e-3)
    assert float(relational_kl(live, consensus, 0.5, 0.5)) != pytest.approx(float(cross_entropy), abs=0.1)


@pytest.mark.parametrize("distance", ["cka", "relational-kl"])
@pytest.mark.parametrize("kernel", ["linear", "rbf", "polynomial"])
def test_distance_is_zero_for_itself_and_larger_for_others(
    distance: Literal["cka", "relational-kl"], kernel: str
) -> None:
    config = AlignmentConfig(distance=distance, kernel=kernel, row_normalize=False)
    z = torch.nn.functional.normalize(features(30, 4, 0), dim=1)
    values, vectors = torch.linalg.eigh(gram(z, config))
    factor = vectors * values.clamp_min(0).sqrt() if distance == "cka" else z - z.mean(0)
    assert float(alignment_distance(z, factor, config)) == pytest.approx(0, abs=1e-6)
    assert float(alignment_distance(z.flip(0), factor, config)) > 0.05


def test_descending_the_distance_aligns_two_representations() -> None:
    live, consensus = features(40, 6, 0).requires_grad_(), features(40, 6, 1)
    optimiser = torch.optim.Adam([live], lr=0.05)
    before = float(alignment_distance(live.detach(), consensus, LINEAR))
    for _ in range(100):
        optimiser.zero_grad()
        alignment_distance(live, consensus, LINEAR).backward()
        optimiser.step()
    assert float(alignment_distance(live.detach(), consensus, LINEAR)) < 0.3 * before


def test_half_precision_features_do_not_overflow() -> None:
    z = (features(64, 128, 0) * 300).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        distance = alignment_distance(z, z, AlignmentConfig(distance="cka", row_normalize=False))
    assert distance.dtype == torch.float32
    assert float(distance) == pytest.approx(0, abs=1e-4)


def test_rbf_and_polynomial_kernels_equal_their_formulas() -> None:
    z = features(9, 3, 0)
    x = z.numpy()
    squared = ((x[:, None] - x[None]) ** 2).sum(-1)
    rbf = gram(z, AlignmentConfig(kernel="rbf", bandwidth=0.7))
    assert np.allclose(rbf, np.exp(-squared / (2 * 0.7**2 * squared.mean())), atol=1e-9)
    polynomial = gram(z, AlignmentConfig(kernel="polynomial", degree=3))
    assert np.allclose(polynomial, (x @ x.T / (x**2).sum(1).mean() + 1) ** 3, atol=1e-9)
