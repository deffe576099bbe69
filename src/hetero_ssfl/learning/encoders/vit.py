"""A small vision transformer."""

import torch
from torch import Tensor, nn

from .whitening import pooled, whitened


class ViT(nn.Module):
    """A small vision transformer: patches, learned positions, pre-norm blocks, mean over patches.

    `whiten` and `pool` are as for the ResNets.
    """

    def __init__(
        self,
        in_channels: int,
        side: int,
        width: int = 96,
        depth: int = 4,
        heads: int = 3,
        patch: int = 4,
        whiten: int = 0,
        pool: int = 1,
    ) -> None:
        super().__init__()
        if side % patch:
            raise ValueError(f"patch = {patch} does not divide the image side {side}")
        self.pool = pool
        first, inputs = whitened(in_channels, whiten)
        self.patches = nn.Sequential(*first, nn.Conv2d(inputs, width, patch, patch))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, width * 2, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.patches(x)
        tokens = self.norm(self.blocks(grid.flatten(2).transpose(1, 2) + self.positions))
        return pooled(tokens.transpose(1, 2).view_as(grid), self.pool)
