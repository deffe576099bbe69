"""Optimisers by name: SGD and AdamW equal torch's, LARS follows its formula, a user's own is checked."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from hetero_ssfl.config import OptimConfig
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.learning import optimisers
from hetero_ssfl.learning.optimisers import LARS, TRUST, build_optimiser


def parameters() -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.double)) for shape in ((3, 4), (4,))]


def steps(optimiser: torch.optim.Optimizer, trained: list[nn.Parameter], count: int = 3) -> list[torch.Tensor]:
    for _ in range(count):
        optimiser.zero_grad()
        sum((p**3).sum() for p in trained).backward()  # type: ignore[union-attr]
        optimiser.step()
    return [p.detach() for p in trained]


def test_lars_follows_its_formula() -> None:
    """Three steps computed by hand. Vectors (biases, norms) take plain momentum steps without decay."""
    lr, momentum, decay = 0.1, 0.9, 0.01
    trained = parameters()
    found = steps(LARS(trained, lr, momentum, decay), trained)
    for start, result in zip(parameters(), found, strict=True):
        w, m = start.detach().clone(), torch.zeros_like(start)
        for _ in range(3):
            g = 3 * w**2
            if w.ndim > 1:
                g = g + decay * w
                g = g * TRUST * float(w.square().sum()) ** 0.5 / float(g.square().sum()) ** 0.5
            m = momentum * m + g
            w = w - lr * m
        torch.testing.assert_close(result, w)


def test_a_layer_of_zeros_can_leave_zero_with_lars() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    optimiser = LARS([weight], 0.1, 0.9, 0.0)
    weight.sum().backward()
    optimiser.step()
    assert torch.equal(weight.detach(), torch.full((2, 2), -0.1))


def test_muon_follows_its_formula_with_an_exact_orthogonal_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps computed with an SVD in place of Newton-Schulz; vectors take AdamW's steps."""

    def exact(m: torch.Tensor) -> torch.Tensor:
        u, _, vh = torch.linalg.svd(m, full_matrices=False)
        return u @ vh

    lr, momentum, decay = 0.1, 0.9, 0.01
    monkeypatch.setattr(optimisers, "orthogonal", exact)
    trained, known = parameters(), parameters()
    matrix, vector = steps(optimisers.Muon(trained, lr, momentum, decay), trained)
    w, m = known[0].detach().clone(), torch.zeros(3, 4, dtype=torch.double)
    for _ in range(3):
        g = 3 * w**2
        m = momentum * m + g
        w = (1 - lr * decay) * w - lr * 0.2 * 2 * exact(g + momentum * m)  # the larger side is 4
    torch.testing.assert_close(matrix, w)
    adamw = torch.optim.AdamW(known[1:], lr, weight_decay=decay)
    assert torch.equal(vector, steps(adamw, known[1:])[0])


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (6, 6)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    m = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e3
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    values = torch.linalg.svdvals(optimisers.orthogonal(m))
    assert 0.5 < float(values.min()) < float(values.max()) < 1.3
    assert float((optimisers.orthogonal(m) * (u @ vh)).sum()) / min(shape) > 0.8


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_sgd_is_bit_identical_to_torch(momentum: float, decay: float) -> None:
    config = OptimConfig(kind="sgd", lr=0.01, momentum=momentum, weight_decay=decay)
    ours, theirs = parameters(), parameters()
    known = torch.optim.SGD(theirs, lr=0.01, momentum=momentum, weight_decay=decay, foreach=True)
    for a, b in zip(steps(build_optimiser(ours, config), ours), steps(known, theirs), strict=True):
        assert torch.equal(a, b)


def test_sgd_skips_parameters_without_gradient() -> None:
    used, idle = parameters()
    twin_used, twin_idle = parameters()
    ours = build_optimiser([used, idle], OptimConfig(kind="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4))
    theirs = torch.optim.SGD([twin_used, twin_idle], lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=True)
    for trained in ([0], [0, 1], [1], [0, 1]):
        for optimiser, pair in ((ours, (used, idle)), (theirs, (twin_used, twin_idle))):
            optimiser.zero_grad(set_to_none=True)
            sum((pair[k] ** 3).sum() for k in trained).backward()  # type: ignore[union-attr]
            optimiser.step()
    assert torch.equal(used, twin_used)
    assert torch.equal(idle, twin_idle)


def test_training_does_not_import_torchs_compiler() -> None:
    """Importing it would take a second in every training process."""
    program = (
        "import sys, torch; from hetero_ssfl.config import OptimConfig; from hetero_ssfl.learning.optimisers import *\n"
        "p = torch.nn.Parameter(torch.ones(2)); o = build_optimiser([p], OptimConfig(kind='sgd'))\n"
        "p.sum().backward(); o.step()\n"
        "assert float(p.detach()[0]) < 1; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_adamw_equals_torch() -> None:
    config = OptimConfig(kind="adamw", lr=0.01)
    ours, theirs = parameters(), parameters()
    expected = steps(torch.optim.AdamW(theirs, lr=0.01, weight_decay=config.weight_decay), theirs)
    for a, b in zip(steps(build_optimiser(ours, config), ours), expected, strict=True):
        torch.testing.assert_close(a, b)


def no_optimiser(parameters: object, lr: float) -> float:
    return lr


def test_a_users_own_optimiser_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"no_optimiser' returned float, expected a torch.optim.Optimizer"):
        build_optimiser(parameters(), OptimConfig(kind=f"{__name__}:no_optimiser"))
