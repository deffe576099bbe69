"""Features of a frozen encoder, and nearest neighbours among them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import to_input


@torch.no_grad()
def extract_features(
    encoder: nn.Module, pixels: Tensor, batch: int = 512, forward: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the features of images without augmentation, in evaluation mode, as float32 on the CPU.

    They are what the encoder returns, or what `forward` computes with it.
    """
    was_training = encoder.training
    encoder.eval()
    device, forward = next((p.device for p in encoder.parameters()), torch.device("cpu")), forward or encoder
    parts = [forward(to_input(rows.to(device, non_blocking=True))).float() for rows in pixels.split(batch)]
    encoder.train(was_training)
    return torch.cat(parts).cpu()


def nearest(features: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k nearest rows of `features` for each row number in `queries`, and their cosine similarities.

    Both have shape (queries, k), nearest first. A query is not its own neighbour, so k is at most the other rows.
    """
    similarity = F.normalize(features[queries].float(), dim=1) @ F.normalize(features.float(), dim=1).T
    similarity.scatter_(1, queries[:, None], -2)  # the query itself comes last
    values, rows = similarity.topk(min(k, len(features) - 1), dim=1)
    return rows, values
