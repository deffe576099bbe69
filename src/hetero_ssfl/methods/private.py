"""Sketches of kernels that the server sees only as a sum, or with noise: `privacy.secure` and `privacy.epsilon`.

A reply becomes a vector of integers, and the means over clients come from the sum of these vectors. The vector holds
w Y (the weighted sketch), w tr K, w, the number of images, and for each metric of training its value and a 1, which
counts the clients that have it.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config
from ..errors import ProtocolError
from ..kernels.consensus import Averaging, MeanKernel
from ..kernels.mean import Sums
from ..privacy.accountant import noise_multiplier
from ..privacy.noise import TAIL, Noise, gaussian
from ..privacy.sums import Layout, Rules, Vector, decode, encode
from .base import Method, ServerState, Update

METRICS = ("loss_ssl", "loss_alignment", "spread", "batch_rank", "effective_rank", "clipped")
"""The metrics of which the server learns the means. Others stay with the client."""
MAX_METRIC = 1e6
MAX_IMAGES = 1e9
TOLERANCE = 0.05  # for a norm that is at most 1 except for rounding


def noise_of(config: Config) -> Noise | None:
    """Return the noise that a sketch, or a sum of sketches, needs for `privacy.epsilon` over all rounds.

    The columns of Omega have norm `rad.size`, so that is the largest norm of the sketch of a kernel of norm 1.
    """
    privacy, rows = config.privacy, config.rad.size
    if privacy.epsilon is None:
        return None
    z = noise_multiplier(privacy.epsilon, privacy.delta, releases_of(config))
    return Noise(privacy.clip * rows, z * privacy.clip * rows)


def releases_of(config: Config) -> int:
    """Return how often a client sends a contribution: once in each round, and once in the opening."""
    return config.rounds + 1


class PrivateSketches(Method):
    """A method whose server needs only the mean kernel: what `privacy.secure` and `privacy.epsilon` need of it.

    It implements the capabilities SecureSums and Noise, and a part of Warnings.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.averaging = Averaging(config.alignment, config.rad.size, config.seed)
        self.summands = Summands(config)
        self.noise = noise_of(config)

    @property
    def wire(self) -> torch.dtype:
        """The type of a contribution's numbers. A secure sum has its own integers, and noise needs float32's range."""
        return torch.float32 if self.config.privacy.secure or self.noise else self.averaging.wire

    # --- secure sums ---

    def layout(self) -> Layout:
        return self.summands.layout()

    def summand(self, update: Update, participants: int) -> Vector:
        return self.summands.encode(update, participants)

    def aggregate_sum(
        self, state: ServerState, total: Vector, participants: int, summands: int
    ) -> tuple[ServerState, dict[str, float]]:
        means = self.summands.decode(total, participants, summands)
        new, noise = Sums().plus(1.0, means.sketch, means.trace), self.summands.noise_in_mean(participants, summands)
        mixed = self.averaging.mix(MeanKernel.from_tensors(state.shared), new, self.config.privacy.keep, noise)
        return replace(state, round=state.round + 1, shared=mixed.to_tensors()), means.metrics

    # --- noise ---

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
        summed = self.summands.noise_in_mean(per_round, per_round)
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


@dataclass(frozen=True)
class Means:
    """Weighted means over the clients of a sum."""

    sketch: Tensor
    trace: float
    metrics: dict[str, float]


class Summands:
    """The vectors of one config. All numbers are fixed point, scaled so that the sum over all participants fits."""

    def __init__(self, config: Config) -> None:
        self.rows, self.columns = config.rad.size, min(config.alignment.rank, config.rad.size)
        self.by_size = config.clients.weights == "size"
        self.max_weight = MAX_IMAGES if self.by_size else 1.0
        self.max_entry, self.threshold = config.privacy.largest_entry, config.privacy.threshold
        self.noise = noise_of(config)

    def layout(self) -> Layout:
        """Equal weights fit into 32 bits, as exact as float32. Weights by size need 64."""
        return Layout(3 + 2 * len(METRICS), self.rows * self.columns, 64 if self.by_size else 32)

    def encode(self, update: Update, participants: int) -> Vector:
        weight = min(float(update.examples), MAX_IMAGES) if self.by_size else 1.0
        entries = update.arrays["sketch"].double().numpy().ravel()
        if self.noise:
            return self._noisy(entries, participants, self.noise)
        clipped = float((np.abs(entries) > self.max_entry).mean())
        entries = weight * np.clip(entries, -self.max_entry, self.max_entry)
        known = {**update.metrics, "clipped": clipped}
        values = [weight * float(update.arrays["trace"]), weight, float(update.examples)]
        values += [known.get(name, 0.0) for name in METRICS] + [float(name in known) for name in METRICS]
        return self._vector(values, entries, participants)

    def _noisy(self, entries: NDArray[np.float64], participants: int, noise: Noise) -> Vector:
        """Return the clipped sketch with this client's part of the noise. All else in the vector is constant."""
        entries = noise.clipped(entries) + gaussian(entries.size, self._part(participants))
        return self._vector([1.0, 1.0, 1.0] + [0.0] * 2 * len(METRICS), entries, participants)

    def _vector(self, values: list[float], entries: NDArray[np.float64], participants: int) -> Vector:
        limits = zip(values, self._limits(), strict=True)
        scalars = [encode(np.array([value]), 64, participants, limit) for value, limit in limits]
        body = encode(entries, self.layout().word, participants, self._range(participants))
        return Vector(np.concatenate(scalars), body)

    def _part(self, participants: int) -> float:
        """Return the deviation of one client's noise: as many as must survive give all of it together."""
        assert self.noise is not None
        return self.noise.deviation / Rules(self.threshold).survivors_needed(participants) ** 0.5

    def noise_in_mean(self, participants: int, summands: int) -> float:
        """Return the deviation of the noise in each entry of the mean of `summands` sketches; 0 without noise."""
        return self._part(participants) / summands**0.5 if self.noise else 0.0

    def _range(self, participants: int) -> float:
        """Return the largest size of an entry of the vector."""
        room = TAIL * self._part(participants) if self.noise else 0.0
        return self.max_weight * (self.max_entry + room)

    def decode(self, total: Vector, participants: int, summands: int) -> Means:
        """Return the means, or raise ProtocolError for a sum that no honest clients can have."""
        limits = zip(total.figures.reshape(-1, 1), self._limits(), strict=True)
        trace, weight, images, *rest = (float(decode(words, participants, most)[0]) for words, most in limits)
        values, counts = rest[: len(METRICS)], rest[len(METRICS) :]
        expected = images if self.by_size else float(summands)
        if weight <= 0 or abs(weight - expected) > 0.5 or not summands <= images <= summands * MAX_IMAGES:
            raise ProtocolError(f"the weights of {summands} clients sum to {weight:g}, expected {expected:g}.")
        body = decode(total.body, participants, self._range(participants))
        mean = torch.from_numpy(body / weight).reshape(self.rows, self.columns)
        self._check(mean, trace / weight, self.noise_in_mean(participants, summands))
        metrics = {name: v / round(n) for name, v, n in zip(METRICS, values, counts, strict=True) if round(n) > 0}
        return Means(mean, trace / weight, metrics)

    def _check(self, mean: Tensor, trace: float, deviation: float) -> None:
        size, most = float(mean.norm()) / self.rows, 1 + TOLERANCE  # the columns of Omega have norm `rows`
        most += 2 * deviation * mean.numel() ** 0.5 / self.rows
        if not 0 < size <= most or not 0 < trace <= most * self.rows**0.5:
            raise ProtocolError(
                f"the mean kernel has norm {size:.3g} and trace {trace:.3g}, expected at most {most:.3g} and "
                f"{most * self.rows**0.5:.3g}: a client sent something else than a kernel."
            )

    def _limits(self) -> list[float]:
        """Return the largest size of each scalar of the vector: trace, weight, images, metrics and their counts."""
        weight = self.max_weight
        return [weight * 2 * self.rows**0.5, weight, MAX_IMAGES] + [MAX_METRIC] * len(METRICS) + [1.0] * len(METRICS)
