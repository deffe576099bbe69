"""A small MobileNetV2."""

from torch import Tensor, nn

from .resnet import conv_bn


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
    def __init__(self, in_channels: int, width: int = 16, depth: int = 2, expand: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(in_channels, width, 3), nn.ReLU6(inplace=True)]
        inputs = width
        for stage in range(3):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                layers.append(InvertedResidual(inputs, width * 2**stage, stride, expand))
                inputs = width * 2**stage
        self.layers = nn.Sequential(*layers, conv_bn(inputs, inputs * 2, 1), nn.ReLU6(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features.mean((2, 3))
