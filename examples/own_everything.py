"""Use your own data, encoder, views, loss, kernel and method, each in a few lines of this script.

python examples/own_everything.py
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from hetero_ssfl import Client, HeteroSSFL, ServerState, effective_rank, federate
from hetero_ssfl.learning.learner import Learner


def own_data(count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Return colour images (n, 3, 16, 16) as uint8, half with a horizontal and half with a vertical bright stripe."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 100, (count, 3, 16, 16), generator=rng, dtype=torch.uint8)
    for k, at in enumerate(torch.randint(2, 12, (count,), generator=rng).tolist()):
        stripe = images[k, :, at : at + 3] if k % 2 else images[k, :, :, at : at + 3]
        stripe += 120
    return images, ["across" if k % 2 else "down" for k in range(count)]


class OwnEncoder(nn.Module):
    """An encoder is any module that maps a batch to vectors (n, width). Training starts from its weights."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, width, 3, 2, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features.amax((2, 3))


def own_views(batch: Tensor, rng: Generator) -> Tensor:
    """Shift each image (values in [0, 1]) a little and change its brightness. Use only `rng` for random numbers."""
    shifts = torch.randint(-2, 3, (len(batch), 2), generator=rng).tolist()
    moved = torch.stack([image.roll(shift, (1, 2)) for image, shift in zip(batch, shifts, strict=True)])
    return (moved * (0.7 + 0.6 * torch.rand(len(batch), 1, 1, 1, generator=rng))).clamp(0, 1)


def own_loss(learner: Learner, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Distinguish an image's other view, seen by the target network, from those of other images (as MoCo does).

    Return the loss, and the projections of the first view to monitor for collapse."""
    z = [nn.functional.normalize(learner.represent(view, "projector"), dim=1) for view in views[:2]]
    targets = [nn.functional.normalize(learner.targets(view), dim=1) for view in views[:2]]
    same = torch.arange(len(z[0]), device=z[0].device)
    losses = [nn.functional.cross_entropy(a @ b.T / 0.2, same) for a, b in ((z[0], targets[1]), (z[1], targets[0]))]
    return (losses[0] + losses[1]) / 2, z[0]


def own_kernel(a: Tensor, b: Tensor) -> Tensor:
    """Laplacian kernel exp(-distance / scale). The scale depends only on `b`, so that any `a` gets the same kernel."""
    scale = b.std(0).norm().clamp_min(1e-6)
    return torch.exp(-(a[:, None] - b[None] + 1e-9).norm(dim=2) / scale)


class OwnMethod(HeteroSSFL):
    """Hetero-SSFL that weights clients by the effective rank of their kernels."""

    name = "by-rank"

    def weight(self, state: ServerState, name: str) -> float:
        return effective_rank(state.clients[name]["factor"])


if __name__ == "__main__":
    encoders: list[nn.Module | str] = [OwnEncoder(), OwnEncoder(48), "resnet8(width=8)"]
    clients = []
    for k, encoder in enumerate(encoders):
        images, labels = own_data(160, seed=k)
        clients.append(Client(images, encoder, labels=labels))
    run = federate(
        clients,
        rad=60,  # images taken from the clients' data
        method=OwnMethod,
        views=own_views,
        loss=own_loss,
        kernel=own_kernel,
        rounds=2,
        settings={"local_epochs": 2, "optim.batch": 32},
    )
    print(run.table()[["encoder", "loss_ssl", "mutual_cka", "linear_all"]].round(2))
    print(run.encoder(0))
