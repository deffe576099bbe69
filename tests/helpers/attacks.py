"""What a client that lies can send instead of its kernel: well-formed factors, each as large as is allowed.

`Attacked` is Hetero-SSFL in which the last clients lie: `name = "rank one, 1"` in a config names the attack and the
number of attackers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetero_ssfl.kernels.cka import at_least_float32
from hetero_ssfl.kernels.contribution import packed
from hetero_ssfl.kernels.factor import kernel_factor
from hetero_ssfl.kernels.mean import sketch, sketching_matrix
from hetero_ssfl.learning.training import TrainingClient, rad_representations
from hetero_ssfl.methods import Broadcast, HeteroSSFL, Update
from hetero_ssfl.seeding import rng_for


@dataclass(frozen=True)
class Knowledge:
    """What an attacker has when it replies."""

    own: Tensor
    """The factor of its own kernel, as an honest client would send it."""
    consensus: Tensor
    """What the server sent, a factor or coordinates; in the opening its own factor."""
    pixels: Tensor
    """The RAD, one row per image."""
    round: int
    rounds: int
    seed: int = 0

    def normal(self, *shape: int, own_stream: str = "attack") -> Tensor:
        return torch.randn(shape, generator=rng_for(self.seed, own_stream, self.round))


def random_features(known: Knowledge) -> Tensor:
    return known.normal(*known.own.shape)


def constant(known: Knowledge) -> Tensor:
    """Nearly the same features for all images: exactly the same ones have a centred kernel of norm 0."""
    return 1 + 1e-3 * known.normal(len(known.own), 1)


def permuted_rows(known: Knowledge) -> Tensor:
    return known.own[torch.randperm(len(known.own), generator=rng_for(known.seed, "rows"))]


def rank_one(known: Knowledge) -> Tensor:
    """The strongest direction of its own kernel and nothing else."""
    u, s, _ = torch.linalg.svd(known.own, full_matrices=False)
    return u[:, :1] * s[0]


def reversed_consensus(known: Knowledge) -> Tensor:
    """The directions of the consensus with the weakest as the strongest."""
    u, s, _ = torch.linalg.svd(known.consensus, full_matrices=False)
    kept = s > 1e-4 * s[0]
    return u[:, kept] / s[kept]


def same_lie(known: Knowledge) -> Tensor:
    """The kernel of raw pixels with shuffled images: the same from every attacker in every round."""
    return known.pixels[torch.randperm(len(known.pixels), generator=rng_for(0, "same lie"))]


def honest_until_half_time(known: Knowledge) -> Tensor:
    return known.own if known.round <= known.rounds // 2 else permuted_rows(known)


def below_the_threshold(known: Knowledge) -> Tensor:
    """As much of the consensus as an honest client has, and permuted rows in the rest of the norm."""
    a, b = (x / (x.T @ x).norm().sqrt() for x in (centred(known.consensus), centred(permuted_rows(known))))
    return torch.cat([a, b], 1)


ATTACKS: dict[str, Callable[[Knowledge], Tensor]] = {
    "random features": random_features,
    "constant": constant,
    "permuted rows": permuted_rows,
    "rank one": rank_one,
    "reversed consensus": reversed_consensus,
    "same lie": same_lie,
    "honest until half-time": honest_until_half_time,
    "below the threshold": below_the_threshold,
}
NORM = 1.04  # a contribution of norm 1.05 is still accepted


def centred(a: Tensor) -> Tensor:
    return a - a.mean(0)


def lie(attack: str, known: Knowledge) -> Tensor:
    """Return the factor that an attacker sends, scaled within the allowed norm."""
    a = centred(ATTACKS[attack](known).double())
    return (a * (NORM / (a.T @ a).norm()) ** 0.5).float()


class Attacked(HeteroSSFL):
    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        honest = super().local_update(client, down)
        attack, _, liars = self.config.name.rpartition(", ")
        number = int(client.name.rpartition("-")[2])
        if attack not in ATTACKS or number < self.config.clients.count - int(liars):
            return honest
        own = at_least_float32(honest.arrays["factor"])
        consensus = down.arrays.get(self.sends, own).cpu().float()
        pixels = client.rad.flatten(1).float()
        known = Knowledge(own, consensus, pixels, down.round, self.config.rounds, self.config.seed + number)
        arrays = packed(lie(attack, known), self.config.alignment)
        return replace(honest, arrays=arrays)


class Dictator(HeteroSSFL):
    """The last client sends n T - (n - 1) B to a secure sum, where T is its own kernel with permuted images and B the
    last consensus: if that is nearly the mean of the others, the mean of all is T. Nobody sees what it sends."""

    def local_update(self, client: TrainingClient, down: Broadcast) -> Update:
        honest, count = super().local_update(client, down), self.config.clients.count
        others = down.arrays.get("factor")
        if self.config.name != "liar" or others is None or int(client.name.rpartition("-")[2]) < count - 1:
            return honest
        factor = kernel_factor(rad_representations(client), self.config.alignment).float().flip(0)
        size = count // self.config.privacy.groups
        omega = sketching_matrix(len(client.rad), self.config.alignment.rank, self.config.seed)
        spoilt = size * sketch(factor, omega) - (size - 1) * sketch(others.float(), omega)
        return replace(honest, arrays={"sketch": spoilt, "trace": honest.arrays["trace"]})
