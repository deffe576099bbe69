"""A workaround for a bug in oneDNN, torch's convolution library on CPUs.

oneDNN 3.12 (torch 2.13.0) writes past its buffer in the weight gradient of a 1x1 convolution with stride and 2 to 7
input channels in channels-last layout, on machines with AVX2 but no AVX-512. The process then crashes later, anywhere.
`tests/survey/convolutions.py` found no other convolution with the bug. When it finds none at all with the oldest
supported torch, remove this file and its only caller.
"""

from types import MethodType

import torch.nn.functional as F
from torch import Tensor, nn

SIMD_WIDTH = 8  # float32 numbers in an AVX2 register; convolutions with at least as many channels are not affected


def guard_convolutions(network: nn.Module) -> None:
    """Make each faulty convolution first take every stride-th pixel and then convolve with stride 1.

    Parameters, their names and the results (except for rounding) stay the same; other layers are not changed.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and is_faulty(module):
            module._conv_forward = MethodType(_subsample_then_convolve, module)  # type: ignore[method-assign]


def is_faulty(layer: nn.Conv2d) -> bool:
    return (
        layer.kernel_size == (1, 1)
        and layer.stride != (1, 1)
        and layer.padding in ((0, 0), "valid")
        and layer.groups == 1
        and 1 < layer.in_channels < SIMD_WIDTH
    )


def _subsample_then_convolve(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, columns = layer.stride
    return F.conv2d(x[..., ::rows, ::columns], weight, bias)
