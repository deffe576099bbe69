"""Features of a frozen encoder."""

import torch
from torch import Tensor, nn

from ..data import to_input


@torch.no_grad()
def extract_features(encoder: nn.Module, pixels: Tensor, batch: int = 512) -> Tensor:
    """Return the features of images without augmentation, in evaluation mode, as float32 on the CPU."""
    was_training = encoder.training
    encoder.eval()
    device = next(encoder.parameters()).device
    parts = [encoder(to_input(rows.to(device, non_blocking=True))).float() for rows in pixels.split(batch)]
    encoder.train(was_training)
    return torch.cat(parts).cpu()
