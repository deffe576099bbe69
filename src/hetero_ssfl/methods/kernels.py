"""The server's side of kernels: what a client's share may be, and the mean kernel of all shares.

While all factors together fit into `alignment.rank` columns, the mean is their concatenation. Beyond, and for sketches,
the server keeps running sums and looks only at those who changed: a round costs as much with ten clients as with a
thousand.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..consensus import SINGLE, SPARE, Sums, combine, mutual_cka, sketch, sketching_matrix, spectrum, truncate
from ..errors import ProtocolError
from .base import ClientId, ServerState

PARTS = {"factor": ("factor",), "sketch": ("sketch", "trace")}
TOLERANCE = 0.05  # of a norm that is 1 but for rounding on the wire
WILD = 1000.0  # times the median norm of the others' kernels
ABSORBED = 1e6  # times that median: next to such a share the others lost digits in the sums
SHOWN, SHOWN_IMAGES = 20, 200  # clients and RAD images of the mutual CKA in a round's events


@dataclass(frozen=True)
class KernelState:
    """What the server keeps of all kernels between two rounds."""

    factor: Tensor
    """B of the mean kernel K_mean = B B^T."""
    lost: float
    """The fraction of K_mean that B leaves out."""
    sums: Sums | None = None
    """Running sums over all clients, where their factors together are wider than B may be."""
    norms: Tensor | None = None
    """The norm of each client's kernel in the order of the roster, where kernels are not normalised."""

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {"factor": self.factor, "lost": torch.tensor(self.lost)}
        if self.sums is not None:
            totals = torch.tensor([self.sums.trace, self.sums.weight], dtype=torch.float64)
            tensors |= {"sums": self.sums.sketch, "totals": totals}
        return tensors if self.norms is None else {**tensors, "norms": self.norms}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "KernelState | None":
        """None before the first kernels arrived."""
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

    # --- a client's share ---

    def share(self, factor: Tensor) -> dict[str, Tensor]:
        """What a client sends: A_k cut to the rank, or K_k Omega and tr K_k."""
        if self.alignment.form == "factor":
            return {"factor": truncate(factor, self.alignment.rank).factor.to(self.wire)}
        return {"sketch": sketch(factor, self.omega()).to(self.wire), "trace": factor.square().sum().float().view(1)}

    def check(self, state: ServerState, client: ClientId, arrays: Mapping[str, Tensor]) -> None:
        """Raise ProtocolError for what is no share, or would outweigh the others."""
        form, rank = self.alignment.form, self.alignment.rank
        odd = sorted(arrays.keys() ^ set(PARTS[form]))
        if odd:
            raise ProtocolError(f"{client} sent other arrays than a {form}: '{odd[0][:40]}' is on one side only.")
        narrowest, widest = (1, rank) if form == "factor" else (min(rank, self.rows),) * 2
        check_rows(arrays[form], self.rows, narrowest, widest, client)
        size, most = self.norm(arrays), 1 + TOLERANCE
        if not self.alignment.normalize:  # then no scale is agreed on; only a wild one can be known
            most = WILD * self._usual(state, client)
        if not 0 < size <= most:
            raise ProtocolError(
                f"{client} sent a kernel of norm {size:.3g}, expected more than 0 and at most {most:.3g}: it would "
                "outweigh the others, or says nothing."
            )
        if form == "sketch":
            trace, highest = arrays["trace"], most * self.rows**0.5  # of eigenvalues with that norm
            if trace.numel() != 1 or not trace.is_floating_point() or not 0 < float(trace) <= highest:
                text = ", ".join(map(str, trace.flatten()[:3].tolist()))
                raise ProtocolError(f"{client} sent a trace of {text}, expected one number up to {highest:.3g}.")

    def norm(self, share: Mapping[str, Tensor]) -> float:
        """Frobenius norm of a client's kernel; of a sketch the part that Omega sees, which is no greater."""
        if self.alignment.form == "factor":
            a = share["factor"].double()
            return float((a.T @ a).norm())
        return float(share["sketch"].double().norm()) / self.rows  # Omega's columns have that length

    def _usual(self, state: ServerState, client: ClientId) -> float:
        """The median norm of the others, which no client can move by itself; unknown in the opening."""
        others = [n for name, n in zip(state.roster, norms_of(state), strict=False) if name != client and n > 0]
        return float(torch.tensor(others).median()) if others else math.inf

    # --- the mean ---

    def consensus(self, before: ServerState, after: ServerState, changed: Collection[ClientId]) -> KernelState:
        """The mean kernel of the state `after`; `changed` are the clients that differ from `before`."""
        kept, sums = KernelState.from_tensors(before.shared), None
        norms = None if self.alignment.normalize else self._norms(before, after, changed)
        factors = self._all_factors(after) if kept is None or kept.sums is None else None
        if factors is not None:
            mean = combine(list(factors.values()), [self.weights(after, name) for name in factors])
        else:
            sums = self._sums(before, after, [name for name in after.roster if name in changed])
            precision = SINGLE if self.alignment.form == "factor" else torch.finfo(self.wire).eps
            mean = sums.consensus(self.omega(), precision, self.alignment.rank)
        return KernelState(mean.factor.to(self.wire), mean.lost, sums, norms)

    def _all_factors(self, state: ServerState) -> dict[ClientId, Tensor] | None:
        """In the order of the roster, which decides the last bits; None if they are wider than B may be."""
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
        """Those of `before`, less the old shares of those who changed, plus their new ones; or all anew."""
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

    def _sketched(self, share: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """K_k Omega and tr K_k, whichever form the client sent."""
        if self.alignment.form == "sketch":
            return share["sketch"], float(share["trace"])
        factor = share["factor"]
        return sketch(factor.float(), self.omega()), float(factor.double().square().sum())

    def omega(self) -> Tensor:
        """The clients' own or, for sums of factors, the server's."""
        columns = self.alignment.rank * (SPARE if self.alignment.form == "factor" else 1)
        return sketching_matrix(self.rows, columns, self.seed)

    # --- sizes, where none is agreed on ---

    def _norms(self, before: ServerState, after: ServerState, changed: Collection[ClientId]) -> Tensor:
        """Of each client's kernel, in the order of the roster (newcomers are at its end); 0 where there is none."""
        norms = torch.zeros(len(after.roster), dtype=torch.float64)
        known = norms_of(before)
        norms[: len(known)] = torch.tensor(known, dtype=torch.float64)
        for place, name in enumerate(after.roster):
            if name in changed:
                norms[place] = self.norm(after.clients[name]) if name in after.clients else 0.0
        return norms

    def _absorbed(self, before: ServerState, changed: Collection[ClientId]) -> bool:
        """Whether one who leaves the sums was so large in the opening that the others lost digits there."""
        return any(
            size > ABSORBED * self._usual(before, name)
            for name, size in zip(before.roster, norms_of(before), strict=False)
            if name in changed
        )

    # --- to look at ---

    def portrait(self, state: ServerState) -> dict[str, Any]:
        """The consensus' spectrum and how alike the clients' kernels are, on some of the RAD images."""
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


def check_rows(array: Tensor, rows: int, narrowest: int, widest: int, sender: str) -> None:
    """One row per RAD image, and no more columns than were agreed on."""
    if array.ndim != 2 or len(array) != rows or not narrowest <= array.shape[1] <= widest:
        raise ProtocolError(
            f"{sender} sent representations of shape {tuple(array.shape)}, expected {rows} rows and {narrowest} to "
            f"{widest} columns: it may hold another RAD."
        )
    if not array.is_floating_point():
        raise ProtocolError(f"{sender} sent representations of type {array.dtype}, expected floating point.")


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
