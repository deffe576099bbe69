"""Coordinates compared with a dense kernel, and what must not change them."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hetero_ssfl.config import AlignmentConfig
from hetero_ssfl.kernels.consensus import Averaging, Group
from hetero_ssfl.kernels.contribution import contribution
from hetero_ssfl.kernels.coordinates import coordinates, turned
from hetero_ssfl.kernels.mean import combine

ROWS = 40
ALIGNMENT = AlignmentConfig(distance="coordinates", coordinates=6)
seeds = st.integers(0, 10**6)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed)).Q


def cosines(t: Tensor) -> Tensor:
    return (t @ t.T).double()


def dense_cosines(kernel: Tensor, columns: int, power: float) -> Tensor:
    """Compute the cosines between rows of T from an L x L kernel alone."""
    middle = torch.eye(len(kernel), dtype=torch.float64) - 1 / len(kernel)
    values, vectors = torch.linalg.eigh(middle @ kernel @ middle)
    values, vectors = values.flip(0)[:columns], vectors.flip(1)[:, :columns]
    flat = (vectors * values.clamp_min(0) ** power) @ vectors.T  # singular values to the power, squared
    flat = middle @ flat @ middle
    lengths = flat.diagonal().sqrt()
    return flat / lengths / lengths[:, None]


@given(seeds, st.integers(3, 8), st.sampled_from([0.25, 0.5, 1.0]))
def test_they_agree_with_a_dense_kernel(seed: int, columns: int, power: float) -> None:
    b = normal(ROWS, 12, seed=seed)
    t = coordinates(b, columns, power)
    assert torch.allclose(cosines(t), dense_cosines(b @ b.T, columns, power), atol=1e-5)
    assert torch.allclose(t.norm(dim=1), torch.ones(ROWS))


def targets(representations: Sequence[Tensor], last: Tensor | None = None) -> Tensor:
    factors = [contribution(a, ALIGNMENT).arrays["factor"] for a in representations]
    return coordinates(combine(factors, [1.0] * len(factors)).factor, 6, 0.25, last)


@given(seeds)
def test_a_clients_rotation_and_the_order_of_clients_do_not_matter(seed: int) -> None:
    a, b = normal(ROWS, 7, seed=seed), normal(ROWS, 5, seed=seed + 1)
    expected = targets([a, b])
    last = normal(ROWS, 6, seed=seed + 2).float()
    for same in ([3 * a @ rotation(7, seed), b], [b, a]):
        assert torch.allclose(cosines(targets(same)), cosines(expected), atol=1e-4)
        assert torch.allclose(targets(same, last), targets([a, b], last), atol=1e-3)


def test_reordered_images_do_matter() -> None:
    a, b = normal(ROWS, 7, seed=0), normal(ROWS, 5, seed=1)
    assert not torch.allclose(cosines(targets([a.flip(0), b])), cosines(targets([a, b])), atol=0.1)


@given(seeds)
def test_a_turned_consensus_has_the_same_targets(seed: int) -> None:
    """The mean kernel does not know its axes; Procrustes finds those of the last round again."""
    b, q = normal(ROWS, 9, seed=seed), rotation(6, seed + 1)
    last = coordinates(b, 6, 0.25) @ q.float()
    assert torch.allclose(coordinates(b, 6, 0.25, last), last, atol=1e-4)
    assert torch.allclose(coordinates(b @ rotation(9, seed), 6, 0.25, last), last, atol=1e-3)
    assert not torch.allclose(coordinates(b, 6, 0.25), last, atol=1e-2)


@given(seeds)
def test_no_rotation_is_nearer_than_procrustes(seed: int) -> None:
    t, onto = normal(ROWS, 4, seed=seed), normal(ROWS, 4, seed=seed + 1)
    best = float((turned(t, onto) - onto).norm())
    assert best <= float((t @ rotation(4, seed + 2) - onto).norm()) + 1e-9
    assert torch.allclose(cosines(turned(t, onto)), cosines(t))


def test_a_narrow_consensus_leaves_columns_of_zeros() -> None:
    t = coordinates(normal(ROWS, 3, seed=0), 6, 0.25)
    assert t.shape == (ROWS, 6)
    assert not bool(t[:, 3:].any())


@pytest.mark.parametrize("form", ["factor", "sketch"])
def test_the_consensus_keeps_its_coordinates_in_place(form: str) -> None:
    """Clients that learned a little get nearly the same targets."""
    alignment = AlignmentConfig.model_validate({**ALIGNMENT.model_dump(), "form": form})
    averaging = Averaging(alignment, ROWS, seed=0)
    before = {name: normal(ROWS, 8, seed=k) for k, name in enumerate("abc")}
    after = {name: a + 0.02 * normal(ROWS, 8, seed=9) @ rotation(8, 3) for name, a in before.items()}

    def group(clients: dict[str, Tensor]) -> Group:
        arrays = {name: contribution(a, alignment).arrays for name, a in clients.items()}
        return Group("abc", arrays, dict.fromkeys("abc", 1.0))

    first = averaging.update(None, Group(), group(before), "abc")
    second = averaging.update(first, group(before), group(after), "abc")
    assert first.coordinates is not None
    assert second.coordinates is not None
    assert float(F.cosine_similarity(first.coordinates, second.coordinates).min()) > 0.9
    kept = type(second).from_tensors(second.to_tensors())
    assert kept is not None
    assert kept.coordinates is not None
    assert torch.equal(kept.coordinates, second.coordinates)
