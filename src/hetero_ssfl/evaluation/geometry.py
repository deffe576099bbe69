"""How alike the clients see the same images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..objectives import factor_cka


def mutual_cka(features: Sequence[Tensor]) -> Tensor:
    """Debiased linear CKA between every two clients' features of the same images (0 for unrelated ones)."""
    n = len(features)
    out = torch.eye(n)
    for i in range(n):
        for j in range(i):
            out[i, j] = out[j, i] = factor_cka(features[i].double(), features[j].double(), debiased=True)
    return out
