"""Check the clients' contributions and compute their mean kernel.

While all factors together fit into `alignment.rank` columns, the mean is their concatenation. Otherwise, and for
sketches, the server keeps running sums and reads only the clients that changed: a round costs the same with ten clients
as with a thousand.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..errors import ProtocolError
from ..kernels.cka import mutual_cka
from ..kernels.factor import spectrum
from ..kernels.mean import SINGLE, SPARE, Sums, combine, sketch, sketching_matrix, truncate
from .base import ClientId, ServerState
from .private import noise_of

REQUIRED = {"factor": {"factor"}, "sketch": {"sketch", "trace"}}  # a truncated factor comes with its trace, too
TOLERANCE = 0.05  # for a norm that is 1 except for rounding on the wire
WILD = 1000.0  # times the median norm of the others' kernels
ABSORBED = 1e6  # times that median: next to such a contribution the others lost digits in the sums
SHOWN, SHOWN_IMAGES = 20, 200  # clients and RAD images of the mutual CKA in a round's events


@dataclass(frozen=True)
class KernelState:
    """The server's state of all kernels between two rounds."""

    factor: Tensor
    """B of the mean kernel K_mean = B B^T."""
    lost: float
    """The fraction of K_mean's trace that B drops."""
    sums: Sums | None = None
    """Running sums over all clients, if their factors together are wider than B may be."""
    norms: Tensor | None = None
    """The norm of each client's kernel in the order of the roster, if kernels are not normalised."""

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {"factor": self.factor, "lost": torch.tensor(self.lost)}
        if self.sums is not None:
            totals = torch.tensor([self.sums.trace, self.sums.weight], dtype=torch.float64)
            tensors |= {"sums": self.sums.sketch, "totals": totals}
        return tensors if self.norms is None else {**tensors, "norms": self.norms}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "KernelState | None":
        """Return None before the first kernels have arrived."""
        if "factor" not in tensors:
            return None
        sums = Sums(tensors["sums"], *tensors["totals"].tolist()) if "sums" in tensors else None
        return cls(tensors["factor"], float(tensors["lost"]), sums, tensors.get("norms"))


def norms_of(state: ServerState) -> list[float]:
    kept = KernelState.from_tensors(state.shared)
    return [] if kept is None or kept.norms is None else kept.norms.tolist()


class Kernels:
    def __init__(self, config: Config, weight: Callable[[ServerState, ClientId], float]) -> None:
        self.rows, self.weights = config.rad.size, weight
        self.alignment, self.seed = config.alignment, config.seed
        self.wire: torch.dtype = getattr(torch, self.alignment.wire)
        self.noise = noise_of(config)
        # A secure sum has its own integers, and noise needs the range of float32.
        self.up = torch.float32 if config.privacy.secure or self.noise else self.wire

    # --- a client's contribution ---

    def contribution(self, factor: Tensor) -> dict[str, Tensor]:
        """Return what a client sends: A_k, or K_k Omega and tr K_k. If A_k is truncated, tr K_k tells what was lost."""
        trace = factor.square().sum().float().view(1)
        if self.alignment.form == "sketch":
            return {"sketch": sketch(factor, self.omega()).to(self.up), "trace": trace}
        cut = truncate(factor, self.alignment.rank)
        sent = {"factor": cut.factor.to(self.wire)}
        return {**sent, "trace": trace} if cut.lost else sent

    def with_noise(self, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a sketch with noise that is enough by itself. The trace is constant, because it would need noise."""
        assert self.noise is not None
        noisy = self.noise.alone(sent["sketch"].double().numpy())
        return {"sketch": torch.from_numpy(noisy), "trace": torch.ones(1)}

    def check(self, state: ServerState, client: ClientId, arrays: Mapping[str, Tensor]) -> None:
        """Raise ProtocolError for a contribution that is malformed or would outweigh the others."""
        form, rank = self.alignment.form, self.alignment.rank
        odd = sorted((arrays.keys() - {"trace"}) ^ (REQUIRED[form] - {"trace"})) or sorted(
            REQUIRED[form] - arrays.keys()
        )
        if odd:
            raise ProtocolError(
                f"{client} sent the wrong arrays for a {form}: '{odd[0][:40]}' is missing or unexpected."
            )
        narrowest, widest = (1, rank) if form == "factor" else (min(rank, self.rows),) * 2
        check_rows(arrays[form], self.rows, narrowest, widest, client)
        size, most = self.norm(arrays), 1 + TOLERANCE
        if not self.alignment.normalize:  # then there is no agreed scale, and only extreme norms can be refused
            most = WILD * self._usual(state, client)
        if self.noise:  # the norm of so many normal numbers varies by a few percent
            most += 2 * self.noise.deviation * arrays[form].numel() ** 0.5 / self.rows
        if not 0 < size <= most:
            raise ProtocolError(
                f"{client} sent a kernel of norm {size:.3g}, expected more than 0 and at most {most:.3g}: a larger one "
                "would outweigh the others."
            )
        if "trace" in arrays:
            trace, highest = arrays["trace"], most * self.rows**0.5  # the largest trace of a kernel with norm `most`
            if trace.numel() != 1 or not trace.is_floating_point() or not 0 < float(trace) <= highest:
                text = ", ".join(map(str, trace.flatten()[:3].tolist()))
                raise ProtocolError(f"{client} sent a trace of {text}, expected one number up to {highest:.3g}.")

    def norm(self, contribution: Mapping[str, Tensor]) -> float:
        """Return the Frobenius norm of a client's kernel, or for a sketch a lower bound: ||K Omega|| / rows."""
        if self.alignment.form == "factor":
            a = contribution["factor"].double()
            return float((a.T @ a).norm())
        return float(contribution["sketch"].double().norm()) / self.rows  # the columns of Omega have norm `rows`

    def _usual(self, state: ServerState, client: ClientId) -> float:
        """Return the median norm of the other clients, which this client cannot influence; inf in the opening."""
        others = [n for name, n in zip(state.roster, norms_of(state), strict=False) if name != client and n > 0]
        return float(torch.tensor(others).median()) if others else math.inf

    # --- the mean ---

    def consensus(self, before: ServerState, after: ServerState, changed: Collection[ClientId]) -> KernelState:
        """Return the mean kernel of the state `after`; `changed` are the clients that differ from `before`."""
        kept, sums = KernelState.from_tensors(before.shared), None
        norms = None if self.alignment.normalize else self._norms(before, after, changed)
        factors = self._all_factors(after) if kept is None or kept.sums is None else None
        if factors is not None:
            weights = [self.weights(after, name) for name in factors]
            mean = combine(list(factors.values()), weights)
            whole = sum(w * trace_of(after.clients[name]) for w, name in zip(weights, factors, strict=True))
            kept_trace = float(mean.factor.double().square().sum()) * sum(weights)
            truncated = any("trace" in after.clients[name] for name in factors)
            mean = replace(mean, lost=max(0.0, 1 - kept_trace / whole) if truncated else 0.0)
        else:
            sums = self._sums(before, after, [name for name in after.roster if name in changed])
            precision = SINGLE if self.alignment.form == "factor" else torch.finfo(self.wire).eps
            noise = self.noise.deviation / len(after.clients) ** 0.5 if self.noise else 0.0  # weights are equal
            mean = sums.consensus(self.omega(), precision, self.alignment.rank, noise)
        return KernelState(mean.factor.to(self.wire), mean.lost, sums, norms)

    def mixed(self, before: ServerState, new: Sums, keep: float, noise: float = 0.0) -> KernelState:
        """Return the mean kernel of a secure sum, mixed with the fraction `keep` of the last one.

        `noise` is the deviation of the noise in each entry of the new mean. The mix does not have more.
        """
        kept = KernelState.from_tensors(before.shared)
        if kept is not None and kept.sums is not None:
            old = kept.sums
            new = Sums().plus(keep, old.sketch, old.trace).plus(1 - keep, new.sketch, new.trace)
        mean = new.consensus(self.omega(), SINGLE, self.alignment.rank, noise)
        return KernelState(mean.factor.to(self.wire), mean.lost, new if keep else None)

    def _all_factors(self, state: ServerState) -> dict[ClientId, Tensor] | None:
        """Return all factors in the order of the roster (for the same bits), or None if wider than B may be."""
        if self.alignment.form == "sketch" or len(state.clients) > self.alignment.rank:
            return None
        factors, columns = {}, 0
        for name in state.roster:
            if name in state.clients:
                factors[name] = state.clients[name]["factor"]
                columns += factors[name].shape[1]
            if columns > self.alignment.rank:
                return None
        return factors

    def _sums(self, before: ServerState, after: ServerState, changed: Sequence[ClientId]) -> Sums:
        """Subtract old and add new contributions of changed clients to the sums of `before`, or sum all again."""
        kept = KernelState.from_tensors(before.shared)
        if kept is not None and kept.sums is not None and not self._absorbed(before, changed):
            sums = kept.sums
        else:
            sums, before, changed = Sums(), replace(before, clients={}), after.roster
        for state, sign in ((before, -1), (after, 1)):
            for name in changed:
                if name in state.clients:
                    sums = sums.plus(sign * self.weights(state, name), *self._sketched(state.clients[name]))
        return sums

    def _sketched(self, contribution: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """Return K_k Omega and tr K_k for either form."""
        if self.alignment.form == "sketch":
            return contribution["sketch"], float(contribution["trace"])
        return sketch(contribution["factor"].float(), self.omega()), trace_of(contribution)

    def omega(self) -> Tensor:
        """Return the Omega of the clients' sketches or, for sums of factors, the server's own."""
        columns = self.alignment.rank * (SPARE if self.alignment.form == "factor" else 1)
        return sketching_matrix(self.rows, columns, self.seed)

    # --- norms of kernels that are not normalised ---

    def _norms(self, before: ServerState, after: ServerState, changed: Collection[ClientId]) -> Tensor:
        """Return the norm of each client's kernel in the order of the roster (new clients last); 0 without kernel."""
        norms = torch.zeros(len(after.roster), dtype=torch.float64)
        known = norms_of(before)
        norms[: len(known)] = torch.tensor(known, dtype=torch.float64)
        for place, name in enumerate(after.roster):
            if name in changed:
                norms[place] = self.norm(after.clients[name]) if name in after.clients else 0.0
        return norms

    def _absorbed(self, before: ServerState, changed: Collection[ClientId]) -> bool:
        """Tell whether a subtracted contribution was so large that the others lost digits in the sums."""
        return any(
            size > ABSORBED * self._usual(before, name)
            for name, size in zip(before.roster, norms_of(before), strict=False)
            if name in changed
        )

    # --- for reports ---

    def portrait(self, state: ServerState) -> dict[str, Any]:
        """Return the spectrum of the consensus and the mutual CKA of the clients on some of the RAD images."""
        kept = KernelState.from_tensors(state.shared)
        if kept is None:
            return {}
        found: dict[str, Any] = {"spectrum": _rounded(spectrum(kept.factor)[:64])}
        if self.alignment.form == "factor":
            names = [name for name in state.roster if name in state.clients][:SHOWN]
            step = -(-self.rows // SHOWN_IMAGES)
            factors = [state.clients[name]["factor"][::step].clone() for name in names]  # a view would keep all rows
            found |= {"clients": names, "mutual_cka": [_rounded(row) for row in mutual_cka(factors)]}
        return found


def trace_of(contribution: Mapping[str, Tensor]) -> float:
    """Return tr K_k of the whole kernel, before any truncation."""
    if "trace" in contribution:
        return float(contribution["trace"])
    return float(contribution["factor"].double().square().sum())


def check_rows(array: Tensor, rows: int, narrowest: int, widest: int, sender: str) -> None:
    """Raise ProtocolError unless there is one row per RAD image and an allowed number of columns."""
    if array.ndim != 2 or len(array) != rows or not narrowest <= array.shape[1] <= widest:
        raise ProtocolError(
            f"{sender} sent representations of shape {tuple(array.shape)}, expected {rows} rows and {narrowest} to "
            f"{widest} columns. It may have a different RAD."
        )
    if not array.is_floating_point():
        raise ProtocolError(f"{sender} sent representations of type {array.dtype}, expected floating point.")


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
