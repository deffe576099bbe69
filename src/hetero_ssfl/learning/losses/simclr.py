"""SimCLR (Chen et al., 2020, arXiv:2002.05709): tell the other view of an image from the views of other images.

    loss = mean_i  -log( exp(cos(z_i, z_i') / t) / sum_{k != i} exp(cos(z_i, z_k) / t) )

over all 2n views i of n images, where i' is the other view of the same image and t the temperature.

    simclr(z_1, z_2, SslConfig(kind="simclr", temperature=0.2))  # z_1, z_2: projections (n, d) of two views
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import SslConfig


def simclr(z_1: Tensor, z_2: Tensor, ssl: SslConfig) -> Tensor:
    """Return the loss of one pair of views."""
    z = F.normalize(torch.cat([z_1, z_2]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = (z @ z.T / ssl.temperature).masked_fill(itself, float("-inf"))
    return F.cross_entropy(similarity, torch.arange(len(z), device=z.device).roll(len(z_1)))
