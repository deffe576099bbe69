"""What a client contributes to the mean kernel: a factor of its kernel on the RAD, or a sketch of it.

`contribution` is the only way to make one, and `check_contribution` decides whether a received one may be used.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import AlignmentConfig
from ..errors import ProtocolError
from .factor import effective_rank, kernel_factor
from .mean import sketch, sketching_matrix, truncate

TOLERANCE = 0.05  # for a norm that is 1 except for rounding on the wire
REQUIRED = {"factor": {"factor"}, "sketch": {"sketch", "trace"}}  # a truncated factor comes with its trace, too


class Contribution(NamedTuple):
    """The arrays that a client sends, and the effective rank of its whole kernel."""

    arrays: dict[str, Tensor]
    effective_rank: float


def contribution(
    representations: Tensor, alignment: AlignmentConfig, seed: int = 0, wire: torch.dtype | None = None
) -> Contribution:
    """Make a client's contribution from its representations (RAD images x width).

    In factor form it is A_k, truncated to `alignment.rank`; tr K_k comes with it if that loses something. In sketch
    form it is K_k Omega and tr K_k, where Omega follows from the run's seed. `wire` is the type of the numbers, by
    default `alignment.wire`.
    """
    factor = kernel_factor(representations, alignment)
    return Contribution(packed(factor, alignment, seed, wire), effective_rank(factor))


def packed(
    factor: Tensor, alignment: AlignmentConfig, seed: int = 0, wire: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the arrays of a contribution from the factor of a client's kernel."""
    wire = wire or getattr(torch, alignment.wire)
    trace = factor.square().sum().float().view(1)
    if alignment.form == "sketch":
        return {"sketch": sketch(factor, sketching_matrix(len(factor), alignment.rank, seed)).to(wire), "trace": trace}
    cut = truncate(factor, alignment.rank)
    return {"factor": cut.factor.to(wire), **({"trace": trace} if cut.lost else {})}


def trace_of(arrays: Mapping[str, Tensor]) -> float:
    """Return tr K_k of the whole kernel, before any truncation."""
    return float(arrays["trace"]) if "trace" in arrays else float(arrays["factor"].double().square().sum())


def norm_of(arrays: Mapping[str, Tensor], rows: int) -> float:
    """Return the Frobenius norm of a client's kernel, or for a sketch a lower bound: ||K Omega|| / rows."""
    if "factor" in arrays:
        a = arrays["factor"].double()
        return float((a.T @ a).norm())
    return float(arrays["sketch"].double().norm()) / rows  # the columns of Omega have norm `rows`


def check_contribution(
    arrays: Mapping[str, Tensor],
    rows: int,
    alignment: AlignmentConfig,
    sender: str,
    max_norm: float = 1 + TOLERANCE,
    noise: float = 0.0,
) -> None:
    """Raise ProtocolError for a contribution that is malformed or would outweigh the others.

    `max_norm` is the largest norm of a kernel, and `noise` the standard deviation of normal noise in each entry.
    """
    form, rank = alignment.form, alignment.rank
    odd = sorted((arrays.keys() - {"trace"}) ^ (REQUIRED[form] - {"trace"})) or sorted(REQUIRED[form] - arrays.keys())
    if odd:
        raise ProtocolError(f"{sender} sent the wrong arrays for a {form}: '{odd[0][:40]}' is missing or unexpected.")
    min_width, max_width = (1, rank) if form == "factor" else (min(rank, rows),) * 2
    check_rows(arrays[form], rows, min_width, max_width, sender)
    # The norm of so many normal numbers varies by a few percent.
    norm, limit = norm_of(arrays, rows), max_norm + 2 * noise * math.sqrt(arrays[form].numel()) / rows
    if not 0 < norm <= limit:
        raise ProtocolError(
            f"{sender} sent a kernel of norm {norm:.3g}, expected more than 0 and at most {limit:.3g}: a larger one "
            "would outweigh the others."
        )
    if "trace" in arrays:
        trace, max_trace = arrays["trace"], limit * rows**0.5  # the largest trace of a kernel with norm `limit`
        if trace.numel() != 1 or not trace.is_floating_point() or not 0 < float(trace) <= max_trace:
            text = ", ".join(map(str, trace.flatten()[:3].tolist()))
            raise ProtocolError(f"{sender} sent a trace of {text}, expected one number up to {max_trace:.3g}.")


def check_rows(array: Tensor, rows: int, min_width: int, max_width: int, sender: str) -> None:
    """Raise ProtocolError unless there is one row per RAD image and an allowed number of columns."""
    if array.ndim != 2 or len(array) != rows or not min_width <= array.shape[1] <= max_width:
        raise ProtocolError(
            f"{sender} sent representations of shape {tuple(array.shape)}, expected {rows} rows and {min_width} to "
            f"{max_width} columns. It may have a different RAD."
        )
    if not array.is_floating_point():
        raise ProtocolError(f"{sender} sent representations of type {array.dtype}, expected floating point.")
