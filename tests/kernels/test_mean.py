"""The factor form and the sketch form compared with dense L x L kernels, which only these tests build."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hetero_ssfl.config import AlignmentConfig
from hetero_ssfl.kernels.cka import centre, cka, factor_cka, gram
from hetero_ssfl.kernels.contribution import contribution
from hetero_ssfl.kernels.factor import effective_rank, flatten_spectrum, kernel_factor, nystroem, spectrum
from hetero_ssfl.kernels.mean import (
    SINGLE,
    SPARE,
    Consensus,
    Sums,
    combine,
    combine_sketches,
    sketch,
    sketching_matrix,
    truncate,
)
from hetero_ssfl.seeding import rng_for

LITERAL = AlignmentConfig(row_normalize=False, power=1.0)


def features(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(config: AlignmentConfig, a: torch.Tensor) -> torch.Tensor:
    """Compute K_j as a dense kernel: normalised rows, centred, eigenvalues raised to the power, scaled to norm 1."""
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
    consensus = combine([contribution(a, config).arrays["factor"] for a in clients], weights)
    expected = sum(w / sum(weights) * dense(config, a) for w, a in zip(weights, clients, strict=True))
    assert isinstance(expected, torch.Tensor)
    assert consensus.lost == 0
    kernel = consensus.factor.double() @ consensus.factor.double().T
    assert torch.allclose(kernel, expected, atol=1e-5 * float(expected.abs().max()) + 1e-6)


def test_cka_with_the_consensus_factor_equals_cka_with_the_dense_mean() -> None:
    config = AlignmentConfig()
    clients = [features(50, width, width) for width in (5, 20, 64)]
    factor = combine([contribution(a, config).arrays["factor"] for a in clients], [1, 1, 1]).factor.double()
    mean = sum(dense(config, a) for a in clients)
    assert isinstance(mean, torch.Tensor)
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
def test_truncation_keeps_the_strongest_directions_and_reports_the_loss(rank: int, seed: int) -> None:
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


def test_flattening_does_not_amplify_null_directions() -> None:
    a = features(30, 2, 0) @ features(2, 8, 1)  # rank 2 in 8 columns
    assert flatten_spectrum(a, 0.25).shape[1] == 2


def test_normalising_stops_a_client_with_large_features_from_dominating() -> None:
    quiet, loud = features(60, 8, 0), 1000 * features(60, 8, 1)
    fair = combine([contribution(a, LITERAL).arrays["factor"] for a in (quiet, loud)], [1, 1]).factor
    plain = LITERAL.model_copy(update={"normalize": False})
    unfair = combine([contribution(a, plain).arrays["factor"] for a in (quiet, loud)], [1, 1]).factor
    assert factor_cka(quiet.float(), fair) > 0.5
    assert factor_cka(quiet.float(), unfair) < 0.3


def test_effective_rank_counts_directions() -> None:
    flat = torch.linalg.qr(features(50, 7, 0) - features(50, 7, 0).mean(0)).Q
    assert effective_rank(flat) == pytest.approx(7, abs=1e-6)
    assert effective_rank(features(50, 1, 0)) == pytest.approx(1, abs=1e-9)
    assert effective_rank(features(5, 100, 0)) <= 5
    wide = features(30, 9, 2)
    fractions = spectrum(wide)
    assert float(fractions.sum()) == pytest.approx(1)
    assert effective_rank(wide) == pytest.approx(float(1 / fractions.square().sum()))


# --- the consensus as a sum of equal shapes --------------------------------------------------------


def kernel(consensus: Consensus) -> torch.Tensor:
    return consensus.factor.double() @ consensus.factor.double().T


def recovered(k: torch.Tensor, rank: int, seed: int = 0, wire: torch.dtype = torch.float32) -> Consensus:
    """Recover a dense kernel from its sketch."""
    omega = sketching_matrix(len(k), rank, seed)
    return combine_sketches((k @ omega).to(wire), float(k.trace()), omega, torch.finfo(wire).eps)


@pytest.mark.parametrize("columns", [40, 80])
def test_directions_that_noise_alone_explains_are_dropped(columns: int) -> None:
    """Pure noise leaves one or two directions. With a kernel of rank 5, its own are found, and hardly any others."""
    omega, noise = sketching_matrix(80, columns, 0), 0.5
    drawn = noise * torch.randn(80, columns, generator=rng_for(0, "noise"), dtype=torch.float64)
    assert combine_sketches(drawn, 1.0, omega, SINGLE, noise).factor.shape[1] <= 2
    assert combine_sketches(drawn, 1.0, omega, SINGLE).factor.shape[1] > columns / 3
    a = torch.linalg.qr(features(80, 5, 1)).Q
    y = sketch(a, omega) + drawn
    cleaned, raw = (combine_sketches(y, 1.0, omega, SINGLE, level).factor.double() for level in (noise, 0.0))
    assert 5 <= cleaned.shape[1] <= 6
    assert factor_cka(cleaned, a) > factor_cka(raw, a) + 0.05


def summed(sketches: list[torch.Tensor], weights: list[float], factors: list[torch.Tensor]) -> Sums:
    sums = Sums()
    for y, w, a in zip(sketches, weights, factors, strict=True):
        sums = sums.plus(w, y, float(a.square().sum()))
    return sums


def cut_by_sums(factors: list[torch.Tensor], rank: int) -> Consensus:
    """Truncate as the server does when factors exceed the rank."""
    omega = sketching_matrix(len(factors[0]), SPARE * rank, 0)
    sketches = [sketch(a.float(), omega) for a in factors]
    return summed(sketches, [1.0] * len(factors), [a.double() for a in factors]).consensus(omega, SINGLE, rank)


def decaying(rows: int, seed: int) -> torch.Tensor:
    """A kernel of full rank whose eigenvalues fall as 1 / k."""
    basis = torch.linalg.qr(features(rows, rows, seed)).Q
    return (basis / torch.arange(1, rows + 1)) @ basis.T


@given(
    rows=st.integers(12, 30),
    widths=st.lists(st.integers(2, 6), min_size=1, max_size=4),
    power=st.sampled_from([1.0, 0.5]),
    normalize=st.booleans(),
    wire=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 999),
)
def test_a_sum_of_sketches_recovers_the_dense_mean_of_different_clients(
    rows: int, widths: list[int], power: float, normalize: bool, wire: torch.dtype, seed: int
) -> None:
    spare = 0 if wire == torch.float64 else 5  # a random square matrix can be nearly singular, which amplifies rounding
    config = AlignmentConfig(power=power, normalize=normalize)
    clients = [features(rows, width, seed + k) for k, width in enumerate(widths)]
    weights = [float(k + 1) for k in range(len(widths))]
    omega = sketching_matrix(rows, sum(widths) + spare, seed)
    factors = [kernel_factor(a, config) for a in clients]
    consensus = summed([sketch(a, omega).to(wire) for a in factors], weights, factors).consensus(
        omega, torch.finfo(wire).eps, rank=rows
    )
    expected = sum(w / sum(weights) * dense(config, a) for w, a in zip(weights, clients, strict=True))
    assert isinstance(expected, torch.Tensor)
    assert torch.allclose(kernel(consensus), expected, atol=1e-5 * float(expected.abs().max()))
    assert consensus.lost == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("rank", [8, 16, 32])
def test_the_error_of_a_sketch_beyond_its_rank_is_within_the_theoretical_bound(rank: int) -> None:
    """The lost trace, averaged over Omega, is at most (1 + k / (r - k - 1)) * the sum of eigenvalues beyond k."""
    k = decaying(80, 0)
    tail = [float(torch.linalg.eigvalsh(k)[: 80 - cut].sum() / k.trace()) for cut in range(rank + 1)]
    lost = [recovered(k, rank, seed).lost for seed in range(20)]
    assert min(lost) > tail[rank]  # no rank-r kernel loses less than the best one
    assert sum(lost) / 20 < min((1 + cut / (rank - cut - 1)) * tail[cut] for cut in range(rank - 1))


def test_a_sketch_never_adds_mass_and_reports_the_loss() -> None:
    k = decaying(60, 1)
    consensus = recovered(k, 20)
    missing = k - kernel(consensus)
    assert float(torch.linalg.eigvalsh(missing)[0]) > -1e-6
    assert consensus.lost == pytest.approx(float(missing.trace() / k.trace()), abs=1e-6)
    assert consensus.factor.shape == (60, 20)


def test_a_sketch_with_as_many_columns_as_images_is_lossless() -> None:
    k = decaying(40, 2)
    assert torch.allclose(kernel(recovered(k, 512)), k, atol=1e-5)


@given(seed=st.integers(0, 999), width=st.integers(2, 9))
def test_a_rotated_representation_has_the_same_sketch(seed: int, width: int) -> None:
    config, omega = AlignmentConfig(), sketching_matrix(30, 8, seed)
    a, q = features(30, width, seed), torch.linalg.qr(features(width, width, seed + 1)).Q
    before = sketch(kernel_factor(a, config), omega)
    assert torch.allclose(sketch(kernel_factor(3 * a @ q, config), omega), before, atol=1e-7)
    assert not torch.allclose(sketch(kernel_factor(a.flip(0), config), omega), before, atol=1e-2)


def test_a_contribution_can_be_replaced_in_running_sums() -> None:
    omega, weights = sketching_matrix(40, 12, 0), [1.0, 2.0, 3.0]
    old, new = ([features(40, width, seed + width) for width in (3, 5, 9)] for seed in (0, 100))
    running = summed([sketch(a, omega) for a in old], weights, old)
    for factor, weight in ((old[1], -2.0), (new[1], 4.0)):  # its weight may also change
        running = running.plus(weight, sketch(factor, omega), float(factor.square().sum()))
    present = [old[0], new[1], old[2]]
    afresh = summed([sketch(a, omega) for a in present], [1.0, 4.0, 3.0], present)
    replaced, wanted = (sums.consensus(omega, 1e-9, 40) for sums in (running, afresh))
    stale = summed([sketch(a, omega) for a in old], weights, old).consensus(omega, 1e-9, 40)
    assert torch.allclose(kernel(replaced), kernel(wanted), atol=1e-5 * float(kernel(wanted).abs().max()))
    assert replaced.lost == pytest.approx(wanted.lost, abs=1e-9)
    assert not torch.allclose(kernel(stale), kernel(wanted), atol=1e-1)


@given(rows=st.integers(8, 24), clients=st.integers(3, 6), rank=st.integers(4, 30), seed=st.integers(0, 99))
def test_with_at_most_twice_as_many_images_as_rank_the_best_directions_are_kept(
    rows: int, clients: int, rank: int, seed: int
) -> None:
    factors = [contribution(features(rows, 6, seed + k), AlignmentConfig()).arrays["factor"] for k in range(clients)]
    found = cut_by_sums(factors, rank)
    together = torch.cat(factors, dim=1).double() / clients**0.5
    left, singular, _ = torch.linalg.svd(together, full_matrices=False)
    best = (left[:, :rank] * singular[:rank].square()) @ left[:, :rank].T
    assert found.factor.shape[1] <= rank
    if rows <= 2 * rank:
        assert torch.allclose(kernel(found), best, atol=1e-5)
    tail = float(singular[rank:].square().sum() / singular.square().sum())
    assert found.lost >= tail - 1e-6
    assert found.lost == pytest.approx(1 - float(kernel(found).trace() / (together @ together.T).trace()), abs=1e-5)


def test_with_many_images_the_loss_is_close_to_the_best_truncation() -> None:
    factors = [
        contribution(features(300, 20, 0) @ features(20, 20, k), AlignmentConfig()).arrays["factor"]
        for k in range(1, 9)
    ]
    noisy = [a + 0.02 * features(300, a.shape[1], 50 + k) for k, a in enumerate(factors)]
    exact = torch.cat(noisy, dim=1) / 8**0.5
    best, found = truncate(exact, 24), cut_by_sums(noisy, 24)
    assert best.lost < found.lost < 1.5 * best.lost
    assert float(factor_cka(found.factor.double(), exact)) > 0.97 * float(factor_cka(best.factor, exact))


def test_all_clients_draw_the_same_omega_from_the_seed() -> None:
    omega = sketching_matrix(50, 7, seed=3)
    assert torch.equal(omega, sketching_matrix(50, 7, seed=3))
    assert not torch.allclose(omega, sketching_matrix(50, 7, seed=4), atol=1)
    assert torch.allclose(omega.T @ omega, 50**2 * torch.eye(7, dtype=torch.float64), atol=1e-9)
    drawn = torch.randn(50, 7, dtype=torch.float64, generator=rng_for(3, "sketch"))
    assert bool(((omega.T @ drawn).diagonal() > 0).all())  # independent of the signs that the library's QR chooses
    assert sketching_matrix(5, 7, seed=3).shape == (5, 5)


@pytest.mark.parametrize("rows", [50, 1000])
def test_entries_of_a_sketch_are_of_order_one(rows: int) -> None:
    y = sketch(kernel_factor(features(rows, 40, 0), AlignmentConfig()), sketching_matrix(rows, 32, 0))
    assert 0.7 < float(y.square().mean().sqrt()) < 1.4


def test_half_precision_keeps_the_kernel() -> None:
    k = decaying(200, 3) / decaying(200, 3).norm()
    exact, half = (kernel(recovered(k, 64, wire=wire)) for wire in (torch.float32, torch.float16))
    assert float((half - exact).norm() / exact.norm()) < 5e-3
    assert float(cka(half, exact)) > 0.9999


def test_rounding_errors_do_not_count_as_directions() -> None:
    """A kernel of rank 3 has 3 directions, for any number of sketch columns and any wire precision."""
    a = features(100, 3, 0)
    k = a @ a.T / (a @ a.T).norm()
    for wire in (torch.float32, torch.float16):
        consensus = recovered(k, 64, wire=wire)
        assert torch.allclose(kernel(consensus), k, atol=20 * torch.finfo(wire).eps * float(k.abs().max()))
        assert consensus.factor.shape[1] <= 3 + 2


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_an_invalid_sum_of_sketches_gives_zeros(scale: float) -> None:
    omega = sketching_matrix(30, 8, 0)
    consensus = combine_sketches(scale * sketch(features(30, 5, 0), omega), 0.0, omega, SINGLE)
    assert torch.equal(consensus.factor, torch.zeros(30, 1))
    assert consensus.lost == 0
