"""Two small architectures that are not ResNets, so that clients can differ in more than depth."""

import torch
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


class ViT(nn.Module):
    """A small vision transformer: patches, learned positions, pre-norm blocks, mean over patches."""

    def __init__(
        self, in_channels: int, side: int, width: int = 96, depth: int = 4, heads: int = 3, patch: int = 4
    ) -> None:
        super().__init__()
        if side % patch:
            raise ValueError(f"patch = {patch} does not divide the image side {side}")
        self.patches = nn.Conv2d(in_channels, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, width * 2, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        out: Tensor = self.norm(self.blocks(tokens)).mean(1)
        return out
