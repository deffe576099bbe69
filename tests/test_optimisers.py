"""Optimisers by name: SGD and AdamW are torch's, LARS is its formula, a user's own is checked."""

import pytest
import torch
from torch import nn

from hetero_ssfl.config import OptimConfig
from hetero_ssfl.errors import ConfigError
from hetero_ssfl.optimisers import LARS, TRUST, build_optimiser


def parameters() -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.double)) for shape in ((3, 4), (4,))]


def steps(optimiser: torch.optim.Optimizer, trained: list[nn.Parameter], count: int = 3) -> list[torch.Tensor]:
    for _ in range(count):
        optimiser.zero_grad()
        sum((p**3).sum() for p in trained).backward()  # type: ignore[union-attr]
        optimiser.step()
    return [p.detach() for p in trained]


def test_lars_is_its_formula() -> None:
    """Three steps written out by hand; vectors (biases, norms) take plain momentum steps without decay."""
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


@pytest.mark.parametrize(("kind", "known"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_the_others_are_torchs(kind: str, known: type[torch.optim.Optimizer]) -> None:
    config = OptimConfig(kind=kind, lr=0.01)
    options = {"momentum": 0.9} if kind == "sgd" else {}
    ours, theirs = parameters(), parameters()
    expected = steps(known(theirs, lr=0.01, weight_decay=config.weight_decay, **options), theirs)
    for a, b in zip(steps(build_optimiser(ours, config), ours), expected, strict=True):
        torch.testing.assert_close(a, b)


def no_optimiser(parameters: object, lr: float) -> float:
    return lr


def test_a_users_own_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"no_optimiser' returned float, expected a torch.optim.Optimizer"):
        build_optimiser(parameters(), OptimConfig(kind=f"{__name__}:no_optimiser"))
