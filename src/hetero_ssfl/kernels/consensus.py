"""The mean kernel of all clients between two rounds, updated from the contributions that changed.

While all factors together fit into `alignment.rank` columns, the mean is their concatenation. Otherwise, and for
sketches, it is kept as running sums, and only the clients that changed are read: a round costs the same with ten
clients as with a thousand. Each contribution is read once.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import AlignmentConfig
from .contribution import norm_of, trace_of
from .coordinates import coordinates
from .mean import SINGLE, SPARE, Consensus, Sums, combine, sketch, sketching_matrix

ABSORBED = 1e6  # times the median norm: next to such a contribution the others lost digits in the sums


@dataclass(frozen=True)
class Group:
    """The clients whose kernels are averaged, in a fixed order (for the same bits), with their weights."""

    order: Sequence[str] = ()
    contributions: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Before they are scaled to sum to 1."""

    def present(self, names: Iterable[str] | None = None) -> list[str]:
        return [name for name in (self.order if names is None else names) if name in self.contributions]


@dataclass(frozen=True)
class MeanKernel:
    """The mean kernel, and what the next update needs."""

    factor: Tensor
    """B of the mean kernel K_mean = B B^T."""
    lost: float
    """The fraction of K_mean's trace that B drops."""
    sums: Sums | None = None
    """Running sums over all clients, if their factors together are wider than B may be."""
    norms: Tensor | None = None
    """The norm of each client's kernel in the order of the group, if kernels are not normalised."""
    coordinates: Tensor | None = None
    """One target vector per RAD image, if the alignment term uses coordinates."""

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {"factor": self.factor, "lost": torch.tensor(self.lost)}
        if self.sums is not None:
            totals = torch.tensor([self.sums.trace, self.sums.weight], dtype=torch.float64)
            tensors |= {"sums": self.sums.sketch, "totals": totals}
        optional = {"norms": self.norms, "coordinates": self.coordinates}
        return tensors | {name: tensor for name, tensor in optional.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "MeanKernel | None":
        """Return None before the first kernels have arrived."""
        if "factor" not in tensors:
            return None
        sums = Sums(tensors["sums"], *tensors["totals"].tolist()) if "sums" in tensors else None
        return cls(tensors["factor"], float(tensors["lost"]), sums, tensors.get("norms"), tensors.get("coordinates"))

    def norm_of_each(self, order: Sequence[str]) -> dict[str, float]:
        return {} if self.norms is None else dict(zip(order, self.norms.tolist(), strict=False))

    def usual_norm(self, order: Sequence[str], client: str) -> float:
        """Return the median norm of the other clients, which this client cannot influence; inf if unknown."""
        others = [norm for name, norm in self.norm_of_each(order).items() if name != client and norm > 0]
        return float(torch.tensor(others).median()) if others else math.inf

    def lost_digits(self, order: Sequence[str], changed: Collection[str]) -> bool:
        """Tell whether a changed contribution is so large that the others lost digits in the sums."""
        norms = self.norm_of_each(order)
        return any(norms[name] > ABSORBED * self.usual_norm(order, name) for name in norms.keys() & set(changed))


@dataclass(frozen=True)
class Averaging:
    """How the kernels of a run are averaged."""

    alignment: AlignmentConfig
    rows: int
    """Number of RAD images."""
    seed: int

    @property
    def wire(self) -> torch.dtype:
        wire: torch.dtype = getattr(torch, self.alignment.wire)
        return wire

    def omega(self) -> Tensor:
        """Return the Omega of the clients' sketches or, for sums of factors, the server's own."""
        columns = self.alignment.rank * (SPARE if self.alignment.form == "factor" else 1)
        return sketching_matrix(self.rows, columns, self.seed)

    def update(
        self, mean: MeanKernel | None, before: Group, after: Group, changed: Collection[str], noise: float = 0.0
    ) -> MeanKernel:
        """Return the mean kernel of the group `after`; `changed` are the clients that differ from `before`.

        `noise` is the standard deviation of normal noise in each entry of a single contribution.
        """
        norms = None if self.alignment.normalize else self._norms(mean, after, changed)
        whole = self._concatenated(after) if mean is None or mean.sums is None else None
        if whole is not None:
            return self._kept(whole, mean, None, norms)
        sums = self._sums(mean, before, after, [name for name in after.order if name in changed])
        precision = SINGLE if self.alignment.form == "factor" else torch.finfo(self.wire).eps
        in_mean = noise / len(after.contributions) ** 0.5  # weights are equal where there is noise
        cut = sums.consensus(self.omega(), precision, self.alignment.rank, in_mean)
        return self._kept(cut, mean, sums, norms)

    def mix(self, mean: MeanKernel | None, new: Sums, keep: float, noise: float = 0.0) -> MeanKernel:
        """Return the mean kernel of a secure sum, mixed with the fraction `keep` of the last one.

        `noise` is the deviation of the noise in each entry of the new mean. The mix does not have more.
        """
        if mean is not None and mean.sums is not None:
            old = mean.sums
            new = Sums().plus(keep, old.sketch, old.trace).plus(1 - keep, new.sketch, new.trace)
        cut = new.consensus(self.omega(), SINGLE, self.alignment.rank, noise)
        return self._kept(cut, mean, new if keep else None, None)

    def _kept(self, new: Consensus, last: MeanKernel | None, sums: Sums | None, norms: Tensor | None) -> MeanKernel:
        """Return the mean kernel as it is kept and sent, with coordinates if the alignment term uses them."""
        a, targets = self.alignment, None
        if a.distance == "coordinates":
            targets = coordinates(new.factor, a.coordinates, a.coordinates_power, last.coordinates if last else None)
        return MeanKernel(
            new.factor.to(self.wire), new.lost, sums, norms, None if targets is None else targets.to(self.wire)
        )

    def _concatenated(self, group: Group) -> Consensus | None:
        """Return [sqrt(w_j) A_j ...] of all clients, or None if it is wider than B may be."""
        if self.alignment.form == "sketch" or len(group.contributions) > self.alignment.rank:
            return None
        names, factors, columns, trace, truncated = group.present(), list[Tensor](), 0, 0.0, False
        for name in names:
            arrays = group.contributions[name]
            factors.append(arrays["factor"])
            columns += factors[-1].shape[1]
            if columns > self.alignment.rank:
                return None
            trace += group.weights[name] * trace_of(arrays)
            truncated |= "trace" in arrays
        weights = [group.weights[name] for name in names]
        factor = combine(factors, weights).factor
        kept = float(factor.double().square().sum()) * sum(weights)
        return Consensus(factor, max(0.0, 1 - kept / trace) if truncated else 0.0)

    def _sums(self, mean: MeanKernel | None, before: Group, after: Group, changed: Sequence[str]) -> Sums:
        """Subtract old and add new contributions of changed clients to the running sums, or sum all again."""
        sums = None if mean is None or mean.lost_digits(before.order, changed) else mean.sums
        if sums is None:
            sums, before, changed = Sums(), Group(), after.order
        for group, sign in ((before, -1), (after, 1)):
            for name in group.present(changed):
                sums = sums.plus(sign * group.weights[name], *self._sketched(group.contributions[name]))
        return sums

    def _sketched(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """Return K_k Omega and tr K_k for either form."""
        if self.alignment.form == "sketch":
            return arrays["sketch"], float(arrays["trace"])
        return sketch(arrays["factor"].float(), self.omega()), trace_of(arrays)

    def _norms(self, mean: MeanKernel | None, after: Group, changed: Collection[str]) -> Tensor:
        """Return the norm of each client's kernel in the order of the group (new clients last); 0 without a kernel."""
        known = mean.norm_of_each(after.order) if mean else {}
        new = {name: norm_of(after.contributions[name], self.rows) for name in after.present() if name in changed}
        norms = [new.get(name, 0.0) if name in changed else known.get(name, 0.0) for name in after.order]
        return torch.tensor(norms, dtype=torch.float64)
