"""A fixed first layer that whitens small patches of the shared images (the RAD).

The filters are the principal directions of the RAD's patches, each divided by its deviation, with both signs. The RAD
is public and the same for everyone: the layer reveals nothing, needs no gradient, and lets clients of all
architectures start from the same useful features. Known from supervised training (Coates et al., 2011; airbench, 2024).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data import to_input

MAX_PATCHES = 200_000
NOISE = 1e-2  # added to variances: directions weaker than this are mostly noise (inputs have a variance near 1)


class Whitening(nn.Module):
    """Convolution with fixed filters, then ReLU; the channels are the whitened directions and their negatives."""

    filters: Tensor

    def __init__(self, in_channels: int, size: int) -> None:
        super().__init__()
        directions = in_channels * size**2
        self.out_channels = 2 * directions
        self.register_buffer("filters", torch.zeros(directions, in_channels, size, size))

    def forward(self, x: Tensor) -> Tensor:
        size = self.filters.shape[-1]
        y = F.conv2d(F.pad(x, [size // 2, (size - 1) // 2] * 2), self.filters)
        return torch.cat([y, -y], 1).relu_()


def fit_whitening(network: nn.Module, rad: Tensor) -> None:
    """Set the filters of all whitening layers in a network from the pixels of the RAD."""
    for layer in network.modules():
        if isinstance(layer, Whitening):
            layer.filters.copy_(whitening_filters(rad, layer.filters.shape[-1]))


@torch.no_grad()
def whitening_filters(rad: Tensor, size: int) -> Tensor:
    """Return filters (directions, channels, size, size), strongest direction first."""
    images = to_input(rad[: max(1, MAX_PATCHES // rad[0, 0].numel())].cpu()).contiguous()
    patches = F.unfold(images, size).transpose(1, 2).flatten(0, 1).double()
    patches = patches - patches.mean(0)
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    filters = (directions * (variances + NOISE).rsqrt()).T.flip(0)
    return filters.float().view(-1, rad.shape[1], size, size)


def whitened(in_channels: int, size: int) -> tuple[list[nn.Module], int]:
    """Return the first layers of an encoder and their number of channels: none for size 0."""
    if not size:
        return [], in_channels
    layer = Whitening(in_channels, size)
    return [layer], layer.out_channels


def pooled(x: Tensor, cells: int) -> Tensor:
    """Return the means of a feature map over cells x cells parts, as one vector."""
    return x.mean((2, 3)) if cells == 1 else F.adaptive_avg_pool2d(x, cells).flatten(1)
