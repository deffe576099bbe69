"""Parts that a user might define."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, inputs: int = 1, width: int = 24) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 8, 3, 2, 1)
        self.out = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).relu().mean((2, 3)))


class AnyNet(Net):
    """Takes images of any number of channels."""

    def __init__(self, in_channels: int) -> None:
        super().__init__(in_channels)


def net(**options: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(**options)


SETTINGS = {"data.validation": 60}
"""Settings of the run that tests share."""


WRONG_ENCODERS = """
from torch import nn

class Pair(nn.Conv2d):
    def __init__(self):
        super().__init__(1, 4, 3)

    def forward(self, x):
        return x.flatten(1), x

class Colour(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.Flatten())
"""
"""A module with encoders that cannot be used: one returns a tuple, one needs colour images."""
