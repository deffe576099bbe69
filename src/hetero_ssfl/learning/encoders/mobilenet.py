"""A small MobileNetV2."""

from torch import Tensor, nn

from .resnet import conv_bn
from .whitening import pooled, whitened


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, projection (MobileNetV2)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.layers = nn.Sequential(
            conv_bn(inputs, hidden, 1),
            nn.ReLU6(inplace=True),
            conv_bn(hidden, hidden, 3, stride, groups=hidden),
            nn.ReLU6(inplace=True),
            conv_bn(hidden, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.residual else out


class MobileNet(nn.Module):
    """Options as for the ResNets."""

    def __init__(
        self,
        in_channels: int,
        width: int = 16,
        depth: int = 2,
        expand: int = 4,
        stem: int = 1,
        whiten: int = 0,
        pool: int = 1,
    ) -> None:
        super().__init__()
        self.pool = pool
        first, inputs = whitened(in_channels, whiten)
        layers: list[nn.Module] = [*first, conv_bn(inputs, width, 3, stem), nn.ReLU6(inplace=True)]
        inputs = width
        for stage in range(3):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                layers.append(InvertedResidual(inputs, width * 2**stage, stride, expand))
                inputs = width * 2**stage
        self.layers = nn.Sequential(*layers, conv_bn(inputs, inputs * 2, 1), nn.ReLU6(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.layers(x), self.pool)
