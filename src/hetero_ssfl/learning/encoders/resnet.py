"""ResNets for small images: a 3x3 stem without max-pool; width is a parameter.

`stem` is the stride of the first convolution: 1 is the usual choice at 32 px, 2 trains three times as fast. `whiten` is
the patch size of a fixed first layer (whitening.py; 0: none), and features are averaged over `pool` x `pool` parts.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .whitening import pooled, whitened

# depth -> (residual blocks per stage, bottleneck?)
STAGES: dict[int, tuple[tuple[int, ...], bool]] = {
    8: ((1, 1, 1), False),
    10: ((1, 1, 1, 1), False),
    14: ((2, 2, 2), False),
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
}


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution and BatchNorm, the building block of the networks in this package."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two 3x3 convolutions (or 1x1, 3x3, 1x1 with four times the output width) with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        if bottleneck:
            layers = [conv_bn(inputs, width, 1), conv_bn(width, width, 3, stride), conv_bn(width, outputs, 1)]
        else:
            layers = [conv_bn(inputs, width, 3, stride), conv_bn(width, outputs, 3)]
        self.layers = nn.ModuleList(layers)
        unchanged = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if unchanged else conv_bn(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer in self.layers[:-1]:
            out = F.relu(layer(out), inplace=True)
        return F.relu(self.layers[-1](out) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Maps images to vectors of the last stage's width (512 for ResNet-18 of width 64) times pool x pool."""

    def __init__(
        self, depth: int, in_channels: int, width: int = 64, stem: int = 1, whiten: int = 0, pool: int = 1
    ) -> None:
        super().__init__()
        counts, bottleneck = STAGES[depth]
        self.pool = pool
        first, inputs = whitened(in_channels, whiten)
        layers: list[nn.Module] = [*first, conv_bn(inputs, width, 3, stem), nn.ReLU(inplace=True)]
        inputs = width
        for stage, count in enumerate(counts):
            stage_width = width * 2**stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                layers.append(Block(inputs, stage_width, stride, bottleneck))
                inputs = stage_width * 4 if bottleneck else stage_width
        self.layers = nn.Sequential(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.layers(x), self.pool)
