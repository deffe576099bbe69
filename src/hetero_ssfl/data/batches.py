"""Rows of a data set on the device that trains, without waiting for that device."""

import torch
from torch import Tensor


def take(data: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Return data[rows] on `device`, wherever `data` is; `rows` are on the CPU.

    A copy that blocks would wait for all work queued on an accelerator. A pinned one does not.
    """
    if data.device.type != "cpu":
        return data[rows.to(data.device, non_blocking=True)]
    batch = data[rows]
    if device.type == "cuda":
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=True)
