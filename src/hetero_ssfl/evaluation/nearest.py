"""Nearest neighbours among features."""

import torch.nn.functional as F
from torch import Tensor


def nearest(features: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k nearest rows of `features` for each row number in `queries`, and their cosine similarities.

    Both have shape (queries, k), nearest first. A query is not its own neighbour, so k is at most the other rows.
    """
    similarity = F.normalize(features[queries].float(), dim=1) @ F.normalize(features.float(), dim=1).T
    similarity.scatter_(1, queries[:, None], -2)  # the query itself comes last
    values, rows = similarity.topk(min(k, len(features) - 1), dim=1)
    return rows, values
