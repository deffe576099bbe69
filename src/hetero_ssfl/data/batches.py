"""Copy rows of a data set to the training device without blocking."""

import torch
from torch import Tensor


def take(data: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return data[rows] on `device`. `data` may be on any device; `rows` are on the CPU.

    A blocking copy would wait for all work queued on an accelerator; a copy from pinned memory does not.
    """
    if data.device.type != "cpu":
        return data[rows.to(data.device, non_blocking=True)]
    batch = data[rows]
    if device.type == "cuda":
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=True)
