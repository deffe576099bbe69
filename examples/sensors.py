"""Data other than images: three workshops with different networks learn from unlabeled vibration sensors.

Each sample is 3 channels x 128 steps; each workshop has two of six kinds of vibration. The example defines only data,
networks and views: `federate` trains on tensors of any shape. Labels are used only to probe the result.

    python examples/sensors.py            # alone and together, half a minute
    python examples/sensors.py --quick    # a quick test
"""

import argparse
import math
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn

from hetero_ssfl import Client, Run, federate

KINDS, CHANNELS, STEPS = 6, 3, 128


def vibrations(kind: int, count: int, rng: Generator) -> Tensor:
    """Return vibrations. Kinds differ in pitch and shape (sine, clipped, with an overtone); channels are delayed."""
    time = torch.linspace(0, 2 * math.pi, STEPS).view(1, 1, STEPS)
    pitch = (4 + 4 * (kind // 3)) * (1 + 0.1 * torch.randn(count, 1, 1, generator=rng))
    lag = torch.arange(CHANNELS).view(1, CHANNELS, 1) * 0.7 + 2 * math.pi * torch.rand(count, 1, 1, generator=rng)
    phase = pitch * time + lag
    shape = (phase.sin(), (3 * phase.sin()).clamp(-1, 1), 0.6 * phase.sin() + 0.6 * (3 * phase).sin())[kind % 3]
    loudness = torch.empty(count, 1, 1).uniform_(0.5, 1.5, generator=rng)
    return loudness * shape + 0.3 * torch.randn(count, CHANNELS, STEPS, generator=rng)


def views(batch: Tensor, rng: Generator) -> Tensor:
    """Change what must not matter: the start of a recording, its loudness, noise, and a short silence."""
    n = len(batch)
    start = torch.randint(STEPS, (n, 1, 1), generator=rng)
    shifted = batch.gather(2, (torch.arange(STEPS) + start).expand(-1, CHANNELS, -1) % STEPS)
    louder = shifted * torch.empty(n, 1, 1).uniform_(0.5, 1.5, generator=rng)
    silent = (torch.arange(STEPS) - torch.randint(STEPS, (n, 1, 1), generator=rng)).abs() < 8
    return louder.masked_fill(silent, 0) + 0.1 * torch.randn(batch.shape, generator=rng)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (CHANNELS, 32, 64, 64)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv1d(inputs, outputs, 7, 2, 3, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features.mean(2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv1d(CHANNELS, 32, 8, 4)
        self.gru = nn.GRU(32, 48, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.gru(self.patches(x).relu().mT)[0]
        return outputs.mean(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv1d(CHANNELS, 48, 8, 4)
        self.block = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.block(self.patches(x).mT)
        return tokens.mean(1)


def learn(method: str, count: int, rounds: int, run_dir: str | None = None) -> Run:
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    networks = (Convolutions(), Recurrent(), Attention())
    workshops = []
    for k, network in enumerate(networks):
        held = (k, k + 3)
        data = torch.cat([vibrations(kind, count, rng) for kind in held])
        labels = [kind for kind in held for _ in range(count)]
        workshops.append(Client(data, network, f"workshop-{k}", labels=labels))
    shared = torch.cat([vibrations(kind, 40, rng) for kind in range(KINDS)])
    return federate(
        workshops,
        shared,
        method,
        views=views,
        rounds=rounds,
        run_dir=run_dir,
        settings={"local_epochs": 3, "optim.batch": 64, "evaluation.labels_per_class": 10},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    columns = ["encoder", "linear_all", "linear_all_untrained", "mutual_cka"]
    for method in ("hetero-ssfl",) if quick else ("local", "hetero-ssfl"):
        run = learn(method, 32 if quick else 120, 1 if quick else 6)
        print(f"\n{method}\n{run.table()[columns].round(2)}")
