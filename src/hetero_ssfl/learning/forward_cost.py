"""What one forward pass of an encoder costs, counted without computing it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ConfigError
from .encoders import build_encoder

BATCH = 2


class Work(NamedTuple):
    """The cost of an encoder. Costs of a forward pass are per image, except for `operations`."""

    parameters: int
    state_bytes: int
    """Size of its saved state: parameters and buffers."""
    width: int
    multiply_adds: int
    activation_bytes: int
    """Size of all intermediate results, which training keeps until the backward pass."""
    largest_bytes: int
    """Size of the largest intermediate result."""
    operations: int
    """Number of torch operations in one pass. Each takes some time, however small the batch is."""


def work_of(spec: str, in_channels: int, side: int) -> Work:
    """Count the work on torch's meta device, which has shapes but no data, so that size does not matter.

    An encoder that does not run there is tried on two blank images instead.
    """
    try:
        with torch.device("meta"):
            return _counted(spec, in_channels, side)
    except ConfigError:  # build_encoder turns everything that an encoder raises into this
        return _counted(spec, in_channels, side)


@torch.no_grad()
def _counted(spec: str, in_channels: int, side: int) -> Work:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, where it is installed

    encoder, width = build_encoder(spec, in_channels, side)
    with FlopCounterMode(display=False) as flops, _Counter() as counter:
        encoder.eval()(torch.zeros(BATCH, in_channels, side, side))
    parameters = sum(p.numel() for p in encoder.parameters())
    state = sum(t.nbytes for t in encoder.state_dict().values())
    multiply_adds, activations = flops.get_total_flops() // (2 * BATCH), counter.total // BATCH
    return Work(parameters, state, width, multiply_adds, activations, counter.largest // BATCH, counter.operations)


class _Counter(TorchDispatchMode):
    """Counts operations and the bytes of their results. Views and results written in place need no new memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if not func.is_view and not func._schema.is_mutable:
            results = out if isinstance(out, tuple | list) else (out,)
            size = sum(t.nbytes for t in results if isinstance(t, Tensor))
            self.total, self.largest = self.total + size, max(self.largest, size)
        return out
