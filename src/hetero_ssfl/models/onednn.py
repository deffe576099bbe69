"""A guard against one fault of oneDNN, torch's convolution library on CPUs.

oneDNN 3.12 (torch 2.13.0) writes past its buffer in the weight gradient of a 1x1 convolution with stride and 2 to 7
input channels in channels-last layout, on machines with AVX2 but no AVX-512. The process then dies later, anywhere.
`tests/survey/convolutions.py` found no other convolution with the fault. When it finds none at all with the oldest
supported torch, this file and its only caller may go.
"""

from types import MethodType

import torch.nn.functional as F
from torch import Tensor, nn

SIMD_WIDTH = 8  # float32 numbers in an AVX2 register; from that many channels on nothing is overrun


def guard_convolutions(network: nn.Module) -> None:
    """Let each convolution of the faulty class take every stride-th pixel first and then convolve with stride 1.

    Parameters, their names and the results (but for rounding) stay; other layers are not touched.
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
