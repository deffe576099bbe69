"""Hetero-SSFL on one page of plain PyTorch: three unlike encoders learn together from unlabeled digits.

Client k holds private images and its own networks: online W^o (encoder + projector), predictor W^p, and target W^t.
Everyone also holds the RAD, a few hundred unlabeled images. Before the first round the server averages the kernels of
the untrained clients. Each round:

1. the server sends the consensus kernel K_mean as a factor B, K_mean = B B^T;
2. client k takes E epochs of SGD on L_byol, on two views of its own images, plus a term on a batch of RAD images:
   mu * (1 - CKA(K_k, K_mean)), as in the paper; or with coordinates T that the server makes from B, one row per RAD
   image: a head h_k on the encoder predicts where an image lies among the RAD images;
3. client k sends a factor A_k of its kernel on the whole RAD, K_k = A_k A_k^T; weights and images stay home;
4. the server sets K_mean = sum_j w_j K_j, that is B = [sqrt(w_1) A_1 | sqrt(w_2) A_2 | ...].

With mu = 0 the same code is every client alone. Run it: python examples/one_page.py (a minute on one core).
"""

from __future__ import annotations  # the round comes first, the networks after it

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn

ROUNDS, EPOCHS, BATCH, RAD_BATCH = 10, 5, 64, 128
EMA, LR, MOMENTUM, WEIGHT_DECAY = 0.99, 0.05, 0.9, 5e-4
MU = {"alone": 0.0, "CKA": 4.0, "coordinates": 1.0}
COLUMNS, POWER, TEMPERATURE = 32, 0.25, 0.1


def federation(clients: list[Networks], images: list[Tensor], rad: Tensor, term: str) -> None:
    """All rounds. Weights w_j are equal."""
    weights = [1 / len(clients)] * len(clients)
    rng = [torch.Generator().manual_seed(k) for k in range(len(clients))]
    b = consensus([rad_factor(net, rad) for net in clients], weights)
    t = coordinates(b)
    for _ in range(ROUNDS):
        for k, net in enumerate(clients):
            local_training(net, images[k], rad, t if term == "coordinates" else b, term, rng[k])
        b = consensus([rad_factor(net, rad) for net in clients], weights)
        t = coordinates(b, last=t)


def local_training(net: Networks, images: Tensor, rad: Tensor, wanted: Tensor, term: str, rng: Generator) -> None:
    """Step 2: E epochs over the client's own images."""
    optimiser = sgd(net.train())
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images), generator=rng).split(BATCH):
            if len(batch) == BATCH:
                views = random_view(images[batch], rng), random_view(images[batch], rng)
                rows = torch.randperm(len(rad), generator=rng)[:RAD_BATCH]
                training_step(net, optimiser, local_loss(net, views, random_view(rad[rows], rng), wanted, rows, term))


def local_loss(
    net: Networks, views: tuple[Tensor, Tensor], rad_views: Tensor, wanted: Tensor, rows: Tensor, term: str
) -> Tensor:
    """L_byol + mu * distance; `wanted` is B or T, of which `rows` belong to `rad_views`."""
    loss = byol_loss(net, *views)
    if not MU[term]:
        return loss
    features = net.encoder(rad_views)
    if term == "CKA":
        return loss + MU[term] * (1 - cka(F.normalize(features, dim=1), wanted[rows]))
    there, here = (neighbourhood(z, wanted) for z in (wanted[rows], net.head(features)))
    return loss + MU[term] * F.kl_div(here, there, reduction="batchmean", log_target=True)


def neighbourhood(z: Tensor, t: Tensor) -> Tensor:
    """Log of a softmax over the similarities of z to the coordinates of all RAD images."""
    return (F.normalize(z, dim=1) @ t.T / TEMPERATURE).log_softmax(1)


def byol_loss(net: Networks, view_1: Tensor, view_2: Tensor) -> Tensor:
    """Predict the target's output for one view from the other view, both ways: 2 - 2 cos each."""
    loss = torch.zeros(())
    for seen, hidden in ((view_1, view_2), (view_2, view_1)):
        prediction = net.predictor(net.projector(net.encoder(seen)))
        loss = loss + 2 - 2 * F.cosine_similarity(prediction, net.target(hidden), dim=1).mean()
    return loss


def cka(a: Tensor, b: Tensor) -> Tensor:
    """Linear CKA of the kernels A A^T and B B^T, from their factors: <K, K'> = ||A^T B||^2."""
    a, b = a - a.mean(0), b - b.mean(0)
    return (a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm()).clamp_min(1e-12)


def rad_factor(net: Networks, rad: Tensor) -> Tensor:
    """Step 3: a factor of the client's kernel on the whole, unchanged RAD."""
    return factor(encode(net, rad))


def factor(representations: Tensor) -> Tensor:
    """What a client sends: A with A A^T = K^(1/2) / ||K^(1/2)||, K the centred kernel of rows of length 1.

    The root (singular values to the power 0.5) raises weak directions, so that the few strongest do not drown them;
    the norm makes clients count alike whatever the scale and width of their features.
    """
    a = F.normalize(representations.double(), dim=1)
    u, s, _ = torch.linalg.svd(a - a.mean(0), full_matrices=False)
    return (u * (s / s.norm()).sqrt()).float()


def consensus(factors: list[Tensor], weights: list[float]) -> Tensor:
    """B = [sqrt(w_1) A_1 | ...], so that B B^T = sum_j w_j K_j: no kernel is ever written out."""
    return torch.cat([w**0.5 * a for a, w in zip(factors, weights, strict=True)], dim=1)


def coordinates(b: Tensor, last: Tensor | None = None) -> Tensor:
    """T: the strongest directions of B, made more alike in strength, as rows of length 1.

    Turned onto the last round's coordinates (orthogonal Procrustes), so that they stay put while clients learn.
    """
    u, s, _ = torch.linalg.svd((b - b.mean(0)).double(), full_matrices=False)
    t = u[:, :COLUMNS] * s[:COLUMNS] ** POWER
    t = F.normalize(t - t.mean(0), dim=1)
    if last is not None:
        left, _, right = torch.linalg.svd(t.T @ last.double())
        t = t @ left @ right
    return t.float()


def training_step(net: Networks, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """SGD on W^o and W^p; W^t follows."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    net.move_target()


def sgd(net: Networks) -> torch.optim.Optimizer:
    online = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(online, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def random_view(images: Tensor, rng: Generator) -> Tensor:
    """Each image turned, slanted, stretched and shifted a little, brighter or darker."""
    maps = torch.eye(2, 3) + (torch.rand(len(images), 2, 3, generator=rng) - 0.5) * torch.tensor([0.5, 0.5, 0.4])
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    brightness = 0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, generator=rng)
    return F.grid_sample(images, grid, align_corners=False) * brightness


class Networks(nn.Module):
    """The three networks of a client. No two clients need the same encoder, nor the same width."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.projector, self.predictor = encoder, mlp(width, 64), mlp(64, 64)
        self.head = nn.Linear(width, COLUMNS)
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)

    @torch.no_grad()
    def move_target(self) -> None:
        """W^t <- ema * W^t + (1 - ema) * W^o."""
        online = nn.Sequential(self.encoder, self.projector)
        for old, new in zip(self.target.parameters(), online.parameters(), strict=True):
            old.lerp_(new, 1 - EMA)


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, outputs))


def conv(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def different_encoders() -> dict[str, Networks]:
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    dense = [nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU()]
    return {
        "deep CNN": Networks(nn.Sequential(*conv(1, 16, 1), *conv(16, 32, 2), *conv(32, 64, 2), *pool), 64),
        "flat CNN": Networks(nn.Sequential(*conv(1, 24, 1), *conv(24, 48, 2), nn.AvgPool2d(2), nn.Flatten()), 192),
        "MLP": Networks(nn.Sequential(*dense), 96),
    }


@torch.no_grad()
def encode(net: Networks, images: Tensor) -> Tensor:
    net.eval()
    features: Tensor = net.encoder(images)
    return features


def knn_accuracy(net: Networks, known: Tensor, labels: Tensor, test: Tensor, answers: Tensor) -> float:
    """Percent of test images whose label five nearest neighbours (by cosine) guess, from a few labeled images."""
    bank, queries = F.normalize(encode(net, known), dim=1), F.normalize(encode(net, test), dim=1)
    votes, nearest = (queries @ bank.T).topk(5)
    scores = torch.zeros(len(test), 10).scatter_add_(1, labels[nearest], votes)
    return 100 * float((scores.argmax(1) == answers).float().mean())


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(digits.images).float() / 16).unsqueeze(1)[order]
    labels = torch.from_numpy(digits.target)[order]
    test, answers = images[:400], labels[:400]  # nobody learns from these
    rad, known = images[400:700], slice(700, 800)  # RAD without labels; 100 labels, for the probe only
    private, classes = images[700:], labels[700:]
    own = [private[(classes >= low) & (classes <= high)] for low, high in ((0, 3), (4, 6), (7, 9))]  # disjoint classes
    scores: dict[str, list[float]] = {}
    for term in MU:
        torch.manual_seed(0)
        clients = different_encoders()
        federation(list(clients.values()), own, rad, term)
        for name, net in clients.items():
            scores.setdefault(name, []).append(knn_accuracy(net, images[known], labels[known], test, answers))
    print(f"{'':10}" + "".join(f"  {term:>11}" for term in MU) + "   (kNN accuracy on all ten digits, %)")
    for name, values in scores.items():
        print(f"{name:10}" + "".join(f"  {value:11.1f}" for value in values))


if __name__ == "__main__":
    main()
