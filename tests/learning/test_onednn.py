"""The workaround for oneDNN's buffer overrun, tested with memory checks and limited to AVX2."""

import copy
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from hetero_ssfl.learning.encoders import build_encoder
from hetero_ssfl.learning.encoders.onednn import guard_convolutions, is_faulty
from hetero_ssfl.runs.environment import CHECKED_MEMORY, try_convolutions

checked_memory = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="needs an x86 processor and glibc"
)

EVERY_ENCODER = """
import torch
from hetero_ssfl.config import ModelConfig, SslConfig
from hetero_ssfl.learning.encoders import BUILTIN
from hetero_ssfl.learning.learner import build_learner
from hetero_ssfl.learning.losses import byol
ssl = SslConfig(kind="byol", projector=(16, 8), predictor=16)
for name in BUILTIN:
    for width in (3, 4, 5, 6, 12, 20):
        options = f"width={width}, heads=1" if name == "vit" else f"width={width}"
        learner = build_learner(ModelConfig(encoder=f"{name}({options})"), ssl, 3, 8, seed=0)
        optimiser = torch.optim.SGD(learner.trainable(), lr=0.01)
        for _ in range(2):
            views = [torch.randn(8, 3, 8, 8).contiguous(memory_format=torch.channels_last) for _ in range(2)]
            optimiser.zero_grad()
            byol(learner, views)[0].backward()
            optimiser.step()
        assert all(p.isfinite().all() for p in learner.parameters()), name
print("done")
"""


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit oneDNN in child processes to AVX2."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


@checked_memory
def test_without_the_guard_memory_is_corrupted(avx2):
    """If this fails with the oldest supported torch, the guard can be removed."""
    assert try_convolutions(guarded=False).returncode < 0


@checked_memory
def test_with_the_guard_memory_is_not_corrupted(avx2):
    done = try_convolutions(guarded=True)
    assert done.returncode == 0, done.stderr[-500:]


@checked_memory
def test_every_encoder_of_any_width_trains_without_corrupting_memory(avx2):
    environment = {**os.environ, **CHECKED_MEMORY}
    done = subprocess.run([sys.executable, "-c", EVERY_ENCODER], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-500:]


@pytest.mark.parametrize("stride", [2, 3, (2, 1)])
@pytest.mark.parametrize("side", [7, 8])
def test_the_guard_does_not_change_the_results(stride, side):
    plain = nn.Conv2d(4, 9, 1, stride).double()  # double precision, so that rounding hides no difference
    guarded = copy.deepcopy(plain)
    guard_convolutions(guarded)
    grads = []
    for layer in (plain, guarded):
        x = torch.randn(5, 4, side, side, dtype=torch.double, generator=torch.Generator().manual_seed(0))
        out = layer(x.requires_grad_())
        (out * out.detach().cos()).sum().backward()
        assert layer.bias is not None
        grads.append([out, x.grad, layer.weight.grad, layer.bias.grad])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_copy_of_a_guarded_layer_uses_its_own_weights():
    layer = nn.Conv2d(4, 9, 1, 2)
    guard_convolutions(layer)
    twin = copy.deepcopy(layer)
    nn.init.zeros_(twin.weight)
    assert twin.bias is not None
    nn.init.zeros_(twin.bias)
    x = torch.randn(2, 4, 8, 8)
    assert not twin(x).any()
    assert layer(x).any()


def test_other_layers_are_not_changed():
    others = [
        nn.Conv2d(4, 8, 1),
        nn.Conv2d(4, 8, 3, 2, 1),
        nn.Conv2d(1, 8, 1, 2),
        nn.Conv2d(8, 8, 1, 2),
        nn.Conv2d(4, 8, 1, 2, padding=1),
        nn.Conv2d(4, 8, 1, 2, groups=2),
        nn.ConvTranspose2d(4, 8, 1, 2),
    ]
    before = [set(vars(layer)) for layer in others]
    guard_convolutions(nn.ModuleList(others))
    assert [set(vars(layer)) for layer in others] == before


class Mine(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyConv2d(5, 3), nn.Conv2d(5, 6, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_users_encoder_is_guarded():
    encoder, _ = build_encoder(f"{__name__}:Mine", 3, 16)
    assert [name for name, m in encoder.named_modules() if isinstance(m, nn.Conv2d) and is_faulty(m)] == ["1"]
    assert isinstance(encoder, nn.Sequential)
    assert "_conv_forward" in vars(encoder[1])
    assert "_conv_forward" not in vars(encoder[0])
