"""Which images an encoder finds alike."""

import torch.nn.functional as F
from torch import Tensor


def nearest(features: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rows of `features` most like each row number in `queries`, without itself, and their cosine similarities.

    Both (queries, k), most alike first; k is at most all other rows.
    """
    similarity = F.normalize(features[queries].float(), dim=1) @ F.normalize(features.float(), dim=1).T
    similarity.scatter_(1, queries[:, None], -2)  # itself last
    values, rows = similarity.topk(min(k, len(features) - 1), dim=1)
    return rows, values
