"""Sketches of kernels that the server sees only as a sum, or with noise: `privacy.secure` and `privacy.epsilon`.

A reply becomes a vector of integers, and the means over clients come from the sum of these vectors. The vector holds
w Y (the weighted sketch), w tr K, w, the number of images, and for each metric of training its value and a 1, which
counts the clients that have it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config
from ..errors import ProtocolError
from ..kernels.agreement import geometric_medians
from ..kernels.consensus import Averaging, MeanKernel
from ..kernels.mean import Sums
from ..privacy.accountant import noise_multiplier
from ..privacy.noise import TAIL, Noise, gaussian
from ..privacy.sums.rules import Rules
from ..privacy.sums.vectors import Layout, Vector, decode, encode
from .base import Method, ServerState, Update

METRICS = ("loss_ssl", "loss_alignment", "spread", "batch_rank", "effective_rank", "clipped")
"""The metrics of which the server learns the means. Others stay with the client."""
MAX_METRIC = 1e6
MAX_IMAGES = 1e9
TOLERANCE = 0.05  # for a norm that is at most 1 except for rounding


class PrivateSketches(Method):
    """A method whose server needs only the mean kernel: what `privacy.secure` and `privacy.epsilon` need of it.

    It implements the capabilities SecureSums and Noise, and a part of Warnings. Vectors of secure sums are fixed point,
    scaled so that the sum over all participants fits.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.averaging = Averaging(config.alignment, config.rad.size, config.seed)
        self.rows, self.columns = config.rad.size, min(config.alignment.rank, config.rad.size)
        self.by_size = config.clients.weights == "size"
        self.max_weight = MAX_IMAGES if self.by_size else 1.0
        self.noise: Noise | None = None
        privacy = config.privacy
        if privacy.epsilon is not None:
            # The columns of Omega have norm `rad.size`, so a kernel of norm 1 has a sketch of at most that norm.
            z = noise_multiplier(privacy.epsilon, privacy.delta, config.rounds + 1)  # and once in the opening
            self.noise = Noise(privacy.clip * self.rows, z * privacy.clip * self.rows)

    @property
    def wire(self) -> torch.dtype:
        """The type of a contribution's numbers. A secure sum has its own integers, and noise needs float32's range."""
        return torch.float32 if self.config.privacy.secure or self.noise else self.averaging.wire

    # --- secure sums ---

    def layout(self) -> Layout:
        """Equal weights fit into 32 bits, as exact as float32. Weights by size need 64."""
        return Layout(3 + 2 * len(METRICS), self.rows * self.columns, 64 if self.by_size else 32)

    def summand(self, update: Update, participants: int) -> Vector:
        entries = update.arrays["sketch"].double().numpy().ravel()
        if self.noise:  # the clipped sketch with this client's part of the noise; all else in the vector is constant
            entries = self.noise.clipped(entries) + gaussian(entries.size, self._part(participants))
            return self._vector([1.0, 1.0, 1.0] + [0.0] * 2 * len(METRICS), entries, participants)
        weight, most = min(float(update.examples), self.max_weight), self.config.privacy.largest_entry
        clipped = float((np.abs(entries) > most).mean())
        known = {**update.metrics, "clipped": clipped}
        values = [weight * float(update.arrays["trace"]), weight, float(update.examples)]
        values += [known.get(name, 0.0) for name in METRICS] + [float(name in known) for name in METRICS]
        return self._vector(values, weight * np.clip(entries, -most, most), participants)

    def _vector(self, values: list[float], entries: NDArray[np.float64], participants: int) -> Vector:
        limits = zip(values, self._limits(), strict=True)
        scalars = [encode(np.array([value]), 64, participants, limit) for value, limit in limits]
        body = encode(entries, self.layout().word, participants, self._range(participants))
        return Vector(np.concatenate(scalars), body)

    def aggregate_sum(
        self, state: ServerState, total: Vector, participants: int, summands: int
    ) -> tuple[ServerState, dict[str, float]]:
        sketch, trace, metrics = self.means(total, participants, summands)
        new, noise = Sums().plus(1.0, sketch, trace), self.noise_in_mean(participants, summands)
        mixed = self.averaging.mix(MeanKernel.from_tensors(state.shared), new, self.config.privacy.keep, noise)
        return replace(state, round=state.round + 1, shared=mixed.to_tensors()), metrics

    def aggregate_groups(
        self, state: ServerState, sums: Sequence[tuple[Vector, int, int]]
    ) -> tuple[ServerState, dict[str, float], list[str]]:
        """Take the geometric median of the groups' mean sketches: it is a kernel's sketch, and a minority of spoilt
        groups, each of a bounded norm, cannot move it far."""
        used, warnings = [], []
        for total, participants, summands in sums:
            try:
                used.append((*self.means(total, participants, summands), summands))
            except ProtocolError as error:
                warnings.append(f"the sum of a group is left out: {error}")
        if 2 * len(used) <= self.config.privacy.groups:
            raise ProtocolError(f"only {len(used)} of {self.config.privacy.groups} groups have a sum that can be used.")
        sketches, sizes = torch.stack([sketch.flatten() for sketch, *_ in used]) / self.rows, [n for *_, n in used]
        weights = torch.tensor([sizes], dtype=torch.float64)
        parts = geometric_medians(sketches @ sketches.T, weights)[0].tolist()
        new, keep = Sums(), self.config.privacy.keep
        for part, (sketch, trace, _, _) in zip(parts, used, strict=True):
            new = new.plus(part, sketch, trace)
        mixed = self.averaging.mix(MeanKernel.from_tensors(state.shared), new, keep)
        names = {name for _, _, metrics, _ in used for name in metrics}
        told = {name: [(m[name], n) for _, _, m, n in used if name in m] for name in sorted(names)}
        means = {name: sum(v * n for v, n in known) / sum(n for _, n in known) for name, known in told.items()}
        return replace(state, round=state.round + 1, shared=mixed.to_tensors()), means, warnings

    def means(self, total: Vector, participants: int, summands: int) -> tuple[Tensor, float, dict[str, float]]:
        """Return the mean sketch, trace and metrics. Raise ProtocolError for a sum that no honest clients can have."""
        limits = zip(total.figures.reshape(-1, 1), self._limits(), strict=True)
        trace, weight, images, *rest = (float(decode(words, participants, most)[0]) for words, most in limits)
        values, counts = rest[: len(METRICS)], rest[len(METRICS) :]
        expected = images if self.by_size else float(summands)
        if weight <= 0 or abs(weight - expected) > 0.5 or not summands <= images <= summands * MAX_IMAGES:
            raise ProtocolError(f"the weights of {summands} clients sum to {weight:g}, expected {expected:g}.")
        body = decode(total.body, participants, self._range(participants))
        mean = torch.from_numpy(body / weight).reshape(self.rows, self.columns)
        size, most = float(mean.norm()) / self.rows, 1 + TOLERANCE  # the columns of Omega have norm `rows`
        most += 2 * self.noise_in_mean(participants, summands) * mean.numel() ** 0.5 / self.rows
        if not 0 < size <= most or not 0 < trace / weight <= most * self.rows**0.5:
            raise ProtocolError(
                f"the mean kernel has norm {size:.3g} and trace {trace / weight:.3g}, expected at most {most:.3g} and "
                f"{most * self.rows**0.5:.3g}: a client sent something else than a kernel."
            )
        metrics = {name: v / round(n) for name, v, n in zip(METRICS, values, counts, strict=True) if round(n) > 0}
        return mean, trace / weight, metrics

    def _limits(self) -> list[float]:
        """Return the largest size of each scalar of the vector: trace, weight, images, metrics and their counts."""
        weight = self.max_weight
        return [weight * 2 * self.rows**0.5, weight, MAX_IMAGES] + [MAX_METRIC] * len(METRICS) + [1.0] * len(METRICS)

    def _range(self, participants: int) -> float:
        """Return the largest size of an entry of the vector."""
        return self.max_weight * (self.config.privacy.largest_entry + TAIL * self._part(participants))

    # --- noise ---

    def _part(self, participants: int) -> float:
        """Return the deviation of one client's noise: as many as must survive give all of it together."""
        needed = Rules(self.config.privacy.threshold).survivors_needed(participants)
        return self.noise.deviation / needed**0.5 if self.noise else 0.0

    def noise_in_mean(self, participants: int, summands: int) -> float:
        """Return the deviation of the noise in each entry of the mean of `summands` sketches; 0 without noise."""
        return self._part(participants) / summands**0.5

    def with_noise(self, update: Update) -> Update:
        """Return a sketch with noise that is enough by itself. The trace is constant, because it would need noise."""
        assert self.noise is not None
        noisy = self.noise.alone(update.arrays["sketch"].double().numpy())
        return Update(1, {"sketch": torch.from_numpy(noisy), "trace": torch.ones(1)})

    def spent(self, releases: int) -> float:
        return releases * (self.noise.clip / self.noise.deviation) ** 2 if self.noise else 0.0

    def start_warning(self, clients: int) -> str | None:
        """Say how large the noise is beside the largest signal, and what clients can then learn."""
        noise, privacy, entries = self.noise, self.config.privacy, self.layout().body
        if noise is None:
            return None
        per_round = self.config.clients.selected_per_round(clients)
        summed = self.noise_in_mean(per_round, per_round)
        alone = noise.deviation / clients**0.5  # in the mean of the last contributions of all clients
        ratio = (summed if privacy.secure else alone) * entries**0.5 / noise.clip
        edge = ratio * (2 / self.config.rad.size) ** 0.5  # the largest eigenvalue of noise alone (kernels/mean.py)
        learns = "it can learn from the consensus" if edge < 0.1 else "it learns only what is strongest in the kernels"
        learns = learns if edge < 1 else "it will not learn from the consensus"
        who = f"with {per_round} clients per round" if privacy.secure else f"with {clients} clients and no secure sums"
        worse = "" if privacy.secure else f" ({alone / summed:.2g} times as large as with privacy.secure)"
        probed = self.config.evaluation.probes or self.config.evaluation.label_shares
        probes = " Accuracies of probes are sent without noise (evaluation.probes)." if probed else ""
        return (
            f"privacy.epsilon = {privacy.epsilon:g}: {who} the noise in the mean kernel is {ratio:.3g} times as large "
            f"as the largest signal{worse}, so {learns}; see docs/privacy.md.{probes}"
        )
